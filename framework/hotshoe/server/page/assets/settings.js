// The parameters panel: from its fields to the fields of a request.

const NUMBERS = [
  'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'max_tokens',
  'presence_penalty', 'frequency_penalty', 'repetition_penalty',
];
const ESCAPES = { n: '\n', t: '\t', r: '\r', '\\': '\\' };

/**
 * What the panel says. An empty field is left out, so that the server decides; limits are the
 * server's too, and its refusal is shown.
 *
 * Throws an Error with the `field` at fault if one holds no number.
 */
export function readParameters(form) {
  const found = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    if (field.validity.badInput) throw Object.assign(new Error(`${labelOf(field)}: not a number`), { field });
    if (field.value !== '') found[name] = Number(field.value);
  }
  const stop = form.elements.stop.value.split('\n').filter(Boolean).map(unescaped);
  if (stop.length) found.stop = stop;
  return found;
}

const labelOf = (field) => field.labels[0].firstChild.textContent.trim();
const unescaped = (line) => line.replace(/\\([ntr\\])/g, (_, letter) => ESCAPES[letter]);
