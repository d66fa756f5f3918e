// Building elements: text is always set as text, never as markup.

/** An element by its id. */
export const byId = (id) => document.getElementById(id);

/** A new element: properties, `dataset`, attributes for what is no property, then children. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { dataset, ...others } = properties;
  Object.assign(made.dataset, dataset);
  for (const [name, value] of Object.entries(others)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SVG = 'http://www.w3.org/2000/svg';

/** A new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  set(made, attributes);
  made.append(...children);
  return made;
}

/** Set several attributes. */
export function set(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, value);
}
