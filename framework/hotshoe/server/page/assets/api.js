// Calls to the server: the API key, errors in the API's own words, and server-sent events.

const KEY = 'hotshoe-api-key';

/** What the API said against a request. */
export class ApiError extends Error {
  constructor(message, { status, type, param, code } = {}) {
    super(message);
    Object.assign(this, { status, type, param, code });
  }

  /** Type, parameter and code, as far as the API named them. */
  get details() {
    const named = [['HTTP', this.status], ['type', this.type], ['param', this.param], ['code', this.code]];
    return named.filter(([, value]) => value != null).map(([name, value]) => `${name} ${value}`).join(' · ');
  }
}

export class Api {
  /** @param {(error: ApiError) => void} onKeyWanted called whenever the server refuses the key */
  constructor(onKeyWanted) {
    this.onKeyWanted = onKeyWanted;
  }

  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /** A JSON answer to a GET. */
  async get(path) {
    return (await this.#fetch(path, {})).json();
  }

  /** The events of a streamed answer, decoded, up to the closing `[DONE]`. */
  async *stream(path, body, signal) {
    const response = await this.#fetch(path, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'Content-Type': 'application/json' },
      signal,
    });
    let isComplete = false;
    for await (const data of events(response.body)) {
      isComplete ||= data === '[DONE]';
      // read on to the end: leaving now would cut the connection
      if (isComplete) continue;
      const event = JSON.parse(data);
      if (event.error) throw described(event);
      yield event;
    }
    if (!isComplete) throw new ApiError('The connection ended before the answer was complete');
  }

  async #fetch(path, options) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: 'no-store' });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ApiError("The server can't be reached");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status === 401) this.onKeyWanted(error);
    throw error;
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return described(JSON.parse(text), response.status);
  } catch {
    return new ApiError(text || response.statusText || 'The server gave no reason', { status: response.status });
  }
}

function described({ error, detail }, status) {
  if (error?.message) return new ApiError(error.message, { status, ...error });
  return new ApiError(JSON.stringify(error ?? detail), { status });
}

/** The data of each server-sent event of a response body. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines.map((one) => one.replace(/\r$/, ''))) {
        if (line.startsWith('data:')) {
          data.push(line.slice(5).replace(/^ /, ''));
        } else if (line === '' && data.length) {
          yield data.join('\n');
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
