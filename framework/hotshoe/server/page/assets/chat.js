// The chat playground: a conversation of turns, each a question and its streamed answer.

import { ApiError } from './api.js';
import { byId, element } from './dom.js';
import { readParameters } from './settings.js';

export class Chat {
  #api;
  #turns = [];
  #abort = null;
  #frame = null;

  constructor(api) {
    this.#api = api;
    this.#listen();
    this.#refresh();
  }

  #listen() {
    const prompt = byId('prompt');
    byId('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#ask(prompt.value.trim());
    });
    prompt.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#ask(prompt.value.trim());
      }
    });
    prompt.addEventListener('input', () => this.#refresh());
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.#stop();
    });
    byId('stop').addEventListener('click', () => this.#stop());
    byId('clear').addEventListener('click', () => this.#clear());
    byId('regenerate').addEventListener('click', () => this.#regenerate());
    for (const button of byId('empty').querySelectorAll('button')) {
      button.addEventListener('click', () => this.#ask(button.textContent));
    }
  }

  #ask(question) {
    if (!question || this.#abort) return;
    const turn = new Turn(question);
    if (!this.#answer(turn, this.#turns)) return;
    this.#turns.push(turn);
    byId('log').append(turn.item);
    byId('prompt').value = '';
    this.#refresh();
    scrollDown();
  }

  #regenerate() {
    const turn = this.#turns.at(-1);
    if (turn && !this.#abort) this.#answer(turn, this.#turns.slice(0, -1));
  }

  #stop() {
    this.#abort?.abort();
    byId('prompt').focus();
  }

  #clear() {
    this.#abort?.abort();
    this.#turns = [];
    byId('log').replaceChildren();
    this.#refresh();
    byId('prompt').focus();
  }

  /** Start to answer a turn; false if the panel holds no usable parameters. */
  #answer(turn, before) {
    let body;
    try {
      body = this.#request(turn, before);
    } catch (error) {
      showProblem(error);
      return false;
    }
    this.#stream(turn, body);
    return true;
  }

  #request(turn, before) {
    const parameters = readParameters(byId('settings'));
    const system = byId('system').value.trim();
    return {
      ...(byId('model').disabled ? {} : { model: byId('model').value }),
      messages: [
        ...(system ? [{ role: 'system', content: system }] : []),
        ...before.filter((one) => one.isUsable).flatMap((one) => one.messages),
        { role: 'user', content: turn.question },
      ],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      n: 1,
      ...parameters,
    };
  }

  async #stream(turn, body) {
    const abort = new AbortController();
    this.#abort = abort;
    turn.begin();
    this.#refresh();
    try {
      for await (const event of this.#api.stream('v1/chat/completions', body, abort.signal)) {
        turn.take(event);
        this.#paintSoon(turn);
      }
      turn.end(turn.finishReason ?? 'no finish reason');
    } catch (error) {
      if (abort.signal.aborted) turn.end('stopped by you');
      else turn.fail(error);
      if (isNearBottom(160)) scrollDown();
    } finally {
      if (this.#abort === abort) this.#abort = null;
      this.#refresh();
    }
  }

  /** Show what has arrived, once a frame: hundreds of tokens a second cost no more than a few. */
  #paintSoon(turn) {
    if (this.#frame !== null) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = null;
      const follows = isNearBottom(40);
      turn.paint();
      if (follows) scrollDown();
    });
  }

  #refresh() {
    const isBusy = this.#abort !== null;
    byId('empty').hidden = this.#turns.length > 0;
    byId('log').setAttribute('aria-busy', isBusy);
    byId('clear').disabled = this.#turns.length === 0;
    byId('regenerate').disabled = isBusy || this.#turns.length === 0;
    byId('send').hidden = isBusy;
    byId('stop').hidden = !isBusy;
    fitHeight(byId('prompt'));
  }
}

/** A question and its answer, on the page and in the conversation. */
class Turn {
  constructor(question) {
    this.question = question;
    this.answer = '';
    this.#node = document.createTextNode('');
    this.#body = element('p', { className: 'text' }, this.#node);
    this.#stats = element('p', { className: 'stats' });
    this.#copy = element('button', { type: 'button', className: 'quiet copy', textContent: 'Copy' });
    this.#copy.addEventListener('click', () => this.#toClipboard());
    this.#reply = element(
      'article', { className: 'message assistant', 'aria-label': 'Answer' },
      this.#body, element('footer', {}, this.#stats, this.#copy),
    );
    this.item = element(
      'li', { className: 'turn' },
      element(
        'article', { className: 'message user', 'aria-label': 'You' },
        element('p', { className: 'text', textContent: question }),
      ),
      this.#reply,
    );
  }

  #node;
  #body;
  #stats;
  #copy;
  #reply;
  #usage;
  #times;

  /** Whether later turns may build on this one. */
  get isUsable() {
    return this.answer !== '';
  }

  get messages() {
    return [{ role: 'user', content: this.question }, { role: 'assistant', content: this.answer }];
  }

  begin() {
    this.answer = '';
    this.finishReason = null;
    this.#node.data = '';
    this.#usage = null;
    this.#times = { start: performance.now(), first: null, last: null, count: 0 };
    this.#reply.querySelector('.error')?.remove();
    this.#reply.dataset.state = 'streaming';
    this.#copy.hidden = true;
    this.paint();
  }

  /** One chunk of the stream. */
  take(event) {
    if (event.usage) this.#usage = event.usage;
    const choice = event.choices?.[0];
    const text = choice?.delta?.content;
    if (text) {
      this.answer += text;
      this.#times.last = performance.now();
      this.#times.first ??= this.#times.last;
      this.#times.count += 1;
    }
    if (choice?.finish_reason) {
      const { finish_reason: reason, stop_reason: stop } = choice;
      this.finishReason = stop == null ? reason : `${reason} ${JSON.stringify(stop)}`;
    }
  }

  /** Bring what is shown up to date. */
  paint() {
    this.#node.appendData(this.answer.slice(this.#node.length));
    this.#showStats();
  }

  end(reason) {
    this.finishReason = reason;
    this.#reply.dataset.state = 'done';
    this.#copy.hidden = !navigator.clipboard || !this.isUsable;
    this.paint();
  }

  fail(error) {
    const isRefusal = error instanceof ApiError;
    const details = [isRefusal ? error.details : '', this.isUsable ? '' : 'left out of the conversation'];
    const shown = element(
      'div', { className: 'error', role: 'alert' },
      element('p', { className: 'error-message', textContent: error.message }),
      element('p', { className: 'error-details', textContent: details.filter(Boolean).join(' · ') }),
    );
    this.#body.after(shown);
    this.#reply.dataset.state = 'failed';
    this.finishReason = 'error';
    this.paint();
  }

  #showStats() {
    const { start, first, last, count } = this.#times;
    const tokens = this.#usage?.completion_tokens ?? count;
    const shown = {};
    if (first !== null && last > first) shown.rate = `${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tok/s`;
    if (first !== null) shown.ttft = `TTFT ${milliseconds(first - start)}`;
    if (tokens > 0) shown.tokens = `${tokens} token${tokens === 1 ? '' : 's'}`;
    if (this.#usage) shown.prompt = promptUse(this.#usage);
    if (this.finishReason) shown.finish = this.finishReason;
    const parts = Object.entries(shown).map(([stat, textContent]) => element('span', { dataset: { stat }, textContent }));
    // spaces, so that a narrow line can break between them
    this.#stats.replaceChildren(...parts.flatMap((part) => [part, ' ']));
  }

  async #toClipboard() {
    await navigator.clipboard.writeText(this.answer);
    this.#copy.textContent = 'Copied';
    setTimeout(() => { this.#copy.textContent = 'Copy'; }, 1200);
  }
}

function promptUse(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return `${usage.prompt_tokens} prompt${cached ? ` (${cached} cached)` : ''}`;
}

const milliseconds = (value) => (value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`);

function showProblem(error) {
  const { field } = error;
  field?.setCustomValidity(error.message);
  field?.reportValidity();
  field?.addEventListener('input', () => field.setCustomValidity(''), { once: true });
  if (!field) throw error;
}

function fitHeight(area) {
  if (CSS.supports('field-sizing', 'content')) return;
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight}px`;
}

function isNearBottom(margin) {
  const box = byId('log-scroll');
  return box.scrollHeight - box.scrollTop - box.clientHeight < margin;
}

function scrollDown() {
  const box = byId('log-scroll');
  box.scrollTop = box.scrollHeight;
}
