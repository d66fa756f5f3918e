// The live view: polls `/live` and keeps the last minute.

import { Chart } from './charts.js';
import { byId, element } from './dom.js';

const INTERVAL_MS = 500;
const RETRY_MS = 2000;
const WINDOW_S = 60;
const NUM_COLUMNS = 240;
const NUM_STEPS = 120;
const NUM_REQUESTS = 120;
const NUM_GAPS = 240;

const count = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : String(Math.round(value * 10) / 10));
const percent = (value) => `${(value * 100).toFixed(value < 0.1 && value > 0 ? 1 : 0)}%`;

function milliseconds(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10000 ? 0 : 1)} s`;
  return ms < 10 && ms > 0 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
}

export class Live {
  #api;
  #onState;
  #charts;
  #steps = [];
  #samples = [];
  #isContinuous = false;
  #timer = null;

  /** @param onState called with `ok` and the answer, or with `failed` and the error */
  constructor(api, onState) {
    this.#api = api;
    this.#onState = onState;
    this.#charts = makeCharts();
    byId('charts').append(...Object.values(this.#charts).map((chart) => chart.element));
    document.addEventListener('visibilitychange', () => { if (!document.hidden) this.start(); });
  }

  /** Poll from now on, at once. */
  start() {
    // whatever was missed may have been another engine's: its step numbers start again
    this.#isContinuous = false;
    clearTimeout(this.#timer);
    this.#poll();
  }

  async #poll() {
    let delay = INTERVAL_MS;
    try {
      const after = this.#isContinuous ? this.#steps.at(-1)?.step_id ?? -1 : -1;
      const data = await this.#api.get(`live?after=${after}`);
      if (!this.#isContinuous) this.#steps = this.#samples = [];
      this.#isContinuous = true;
      this.#take(data);
      this.#onState('ok', data);
    } catch (error) {
      this.#isContinuous = false;
      delay = error.status === 401 ? null : RETRY_MS;
      this.#onState('failed', error);
    }
    clearTimeout(this.#timer);
    if (delay !== null && !document.hidden) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  #take(data) {
    const { load, time_s: now } = data;
    const fresh = data.steps.map((row) => Object.fromEntries(row.map((value, i) => [data.step_columns[i], value])));
    const start = now - WINDOW_S;
    this.#steps = [...this.#steps, ...fresh].slice(-NUM_STEPS);
    this.#samples = [...this.#samples, ...fresh, { time_s: now, ...load }].filter((one) => one.time_s >= start);
    byId('tile-running').textContent = count(load.num_running);
    byId('tile-waiting').textContent = count(load.num_waiting);
    byId('tile-kv').textContent = percent(load.kv_cache_usage);
    byId('tile-rate').textContent = count(Math.round(load.generation_tokens_per_s));
    byId('tile-not-drafted').textContent = count(load.num_requests_not_drafted);
    byId('not-drafted').hidden = !data.totals.spec_decode_num_drafts && !load.num_requests_not_drafted;
    this.#draw(data, start);
    showPlugins(data.components);
    showFacts(data.facts);
  }

  #draw(data, start) {
    const charts = this.#charts;
    const minute = [start, data.time_s];
    const peaks = peaksOf(this.#samples, start);
    const timed = (pick) => peaks.map((one) => (
      { x: one.time_s, values: pick(one), label: `${(data.time_s - one.time_s).toFixed(1)} s ago` }
    ));
    charts.requests.draw(timed((one) => [one.num_running, one.num_waiting]), minute);
    charts.kv.draw(timed((one) => [one.kv_cache_usage]), minute);
    charts.steps.draw(this.#steps.map((step, index) => ({
      x: index - this.#steps.length + 1,
      values: [step.num_decode_tokens, step.num_prefill_tokens],
      label: `step ${step.step_id} · ${milliseconds(step.duration_ms)}`,
    })), [-NUM_STEPS, 0]);
    drawLatency(charts.ttft, data.time_to_first_token_ms, NUM_REQUESTS);
    drawLatency(charts.gaps, data.inter_token_latency_ms, NUM_GAPS);
  }
}

function makeCharts() {
  return {
    requests: new Chart({
      id: 'requests', title: 'Requests', kind: 'line', series: ['running', 'waiting'], colours: [1, 2],
      format: count, floor: 4, caption: 'last 60 s',
    }),
    steps: new Chart({
      id: 'steps', title: 'Tokens per step', kind: 'bars', series: ['decode', 'prefill'], colours: [1, 3],
      format: count, floor: 4, caption: `last ${NUM_STEPS} steps`,
    }),
    kv: new Chart({
      id: 'kv', title: 'KV cache in use', kind: 'line', series: [''], colours: [3],
      format: percent, floor: 0.04, caption: 'last 60 s',
    }),
    ttft: new Chart({
      id: 'ttft', title: 'Time to first token', kind: 'bars', series: ['p50'], colours: [2],
      format: milliseconds, floor: 10, caption: `last ${NUM_REQUESTS} requests`,
    }),
    gaps: new Chart({
      id: 'gaps', title: 'Time between tokens', kind: 'dots', series: ['p50'], colours: [1],
      format: milliseconds, floor: 4, caption: `last ${NUM_GAPS} tokens`,
    }),
  };
}

/** The newest values, and their percentiles in the legend. */
function drawLatency(chart, { recent, p50, p99 }, slots) {
  const shown = recent.slice(-slots);
  const points = shown.map((value, index) => (
    { x: index - shown.length + 1, values: [value], label: milliseconds(value) }
  ));
  if (p50 === null) chart.draw([], [-slots, 0]);
  else chart.draw(points, [-slots, 0], { summary: [milliseconds(p50)], note: `p99 ${milliseconds(p99)}` });
}

/** At most one point per column of the minute, each with the highest values of its column. */
function peaksOf(history, start) {
  const columns = new Map();
  for (const one of history) {
    const column = Math.floor(((one.time_s - start) / WINDOW_S) * NUM_COLUMNS);
    const peak = columns.get(column);
    columns.set(column, peak ? {
      time_s: one.time_s,
      num_running: Math.max(peak.num_running, one.num_running),
      num_waiting: Math.max(peak.num_waiting, one.num_waiting),
      kv_cache_usage: Math.max(peak.kv_cache_usage, one.kv_cache_usage),
    } : one);
  }
  return [...columns.values()];
}

function showPlugins(components) {
  const body = byId('plugins');
  const wanted = JSON.stringify(components);
  if (body.dataset.shown === wanted) return;
  body.dataset.shown = wanted;
  body.replaceChildren(...Object.entries(components).map(([place, text]) => {
    const [, name, source] = /^(.*?)(?: \((.*)\))?$/.exec(text);
    return element(
      'tr', {}, element('th', { scope: 'row', textContent: place }),
      element('td', { textContent: name }), element('td', { textContent: source ?? '' }),
    );
  }));
}

function showFacts({ device, dtype, max_model_len: length }) {
  byId('facts').textContent = `${device} · ${dtype} · ${length.toLocaleString('en')} tokens`;
}
