// Small charts in SVG. Colours come from the stylesheet, by class, so light and dark need no redraw.

import { element, set, svg } from './dom.js';

const HEIGHT = 92;
const LEFT = 46;
const TOP = 8;
const BOTTOM = 4;
const RIGHT = 2;

/**
 * A chart with a title, a legend that shows the values of the newest point (or of the one under the
 * pointer), and a caption of the horizontal axis. `data-points` counts what is drawn.
 */
export class Chart {
  #options;
  #points = [];
  #domain = [0, 1];
  #summary = null;
  #hovered = null;

  /**
   * @param options `id`, `title`, `kind` (line, bars or dots), `series` (names, the lowest first),
   *   `format` (a value for people), `floor` (the least top of the vertical axis), `caption`
   *   (what the horizontal axis is), `top` (a fixed top instead of one that follows the data).
   */
  constructor(options) {
    this.#options = options;
    this.values = options.series.map(() => element('b', { textContent: '–' }));
    this.legend = element(
      'p', { className: 'legend' },
      ...options.series.map((name, index) => element(
        'span', { className: `series-${options.colours[index]}` }, element('i'), `${name} `, this.values[index],
      )),
    );
    this.caption = element('span', { textContent: options.caption });
    this.note = element('span');
    this.plot = svg('svg', { role: 'img', height: HEIGHT });
    this.grid = svg('g', { class: 'grid' });
    this.marks = options.series.map((_, index) => [
      svg('path', { class: `area series-${options.colours[index]}` }),
      svg('path', { class: `mark ${options.kind} series-${options.colours[index]}` }),
    ]);
    this.rule = svg('path', { class: 'rule' });
    this.plot.append(this.grid, ...this.marks.flat(), this.rule);
    this.element = element(
      'figure', { className: 'chart', id: `chart-${options.id}`, dataset: { points: '0' } },
      element('figcaption', {}, element('h3', { textContent: options.title }), this.legend),
      this.plot, element('p', { className: 'axis' }, this.caption, this.note),
    );
    this.plot.addEventListener('pointermove', (event) => this.#hover(event.offsetX));
    this.plot.addEventListener('pointerleave', () => this.#hover(null));
    new ResizeObserver(() => this.#render()).observe(this.plot);
  }

  /**
   * @param points `{x, values, label}`, sorted by x; `label` says where on the axis it is.
   * @param domain first and last x of the axis.
   * @param summary values for the legend in place of the newest point's.
   * @param note shown at the end of the axis.
   */
  draw(points, domain, { summary = null, note = '' } = {}) {
    this.#points = points.filter((point) => point.x >= domain[0]);
    this.#domain = domain;
    this.#summary = summary;
    this.note.textContent = note;
    this.element.dataset.points = this.#points.length;
    this.#render();
  }

  #hover(x) {
    this.#hovered = x;
    this.#render();
  }

  #render() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const scale = this.#scale(width);
    this.#drawGrid(scale, width);
    const { kind } = this.#options;
    const base = this.#points.map(() => 0);
    this.marks.forEach(([area, mark], index) => {
      const tops = this.#points.map((point, i) => point.values[index] + (kind === 'bars' ? base[i] : 0));
      if (kind === 'bars') set(mark, { d: bars(this.#points, base, tops, scale) });
      if (kind === 'dots') set(mark, { d: dots(this.#points, tops, scale) });
      if (kind === 'line') {
        const line = steps(this.#points, tops, scale);
        set(mark, { d: line });
        set(area, { d: line && `${line}V${scale.y(0)}H${scale.x(this.#points[0].x)}Z` });
      }
      tops.forEach((top, i) => { base[i] = top; });
    });
    this.#tell(scale);
  }

  #scale(width) {
    const { kind, top, floor } = this.#options;
    const heights = this.#points.map(({ values }) => (
      kind === 'bars' ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values)
    ));
    const highest = top ?? roundUp(Math.max(floor, ...heights));
    const [from, to] = this.#domain;
    const perX = (width - LEFT - RIGHT) / (to - from);
    return {
      highest,
      slot: perX,
      x: (value) => LEFT + (value - from) * perX,
      y: (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - TOP - BOTTOM),
    };
  }

  #drawGrid(scale, width) {
    const lines = [0, 0.5, 1].map((share) => {
      const y = Math.round(scale.y(share * scale.highest)) + 0.5;
      const text = svg('text', { x: LEFT - 6, y: y + 3.5 });
      text.textContent = this.#options.format(share * scale.highest);
      return [svg('path', { d: `M${LEFT} ${y}H${width}` }), text];
    });
    this.grid.replaceChildren(...lines.flat());
  }

  #tell(scale) {
    const { format, caption, series, title } = this.#options;
    const point = this.#hovered === null ? null : nearest(this.#points, this.#hovered, scale);
    set(this.rule, { d: point ? `M${scale.x(point.x).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}` : '' });
    const newest = this.#points.at(-1);
    const shown = point?.values.map(format) ?? this.#summary ?? newest?.values.map(format);
    this.values.forEach((node, index) => { node.textContent = shown?.[index] ?? '–'; });
    this.caption.textContent = point?.label ?? caption;
    const words = series.map((name, index) => `${name} ${shown?.[index] ?? 'no data'}`);
    set(this.plot, { 'aria-label': `${title}: ${words.join(', ')}` });
  }
}

function steps(points, tops, scale) {
  if (!points.length) return '';
  const [first, ...others] = points.map((point, i) => [scale.x(point.x).toFixed(1), scale.y(tops[i]).toFixed(1)]);
  return `M${first.join(' ')}${others.map(([x, y]) => `H${x}V${y}`).join('')}`;
}

function bars(points, base, tops, scale) {
  const gap = scale.slot > 3 ? 1 : 0;
  return points.map((point, i) => {
    if (tops[i] === base[i]) return '';
    const [x, low, high] = [scale.x(point.x) - scale.slot, scale.y(base[i]), scale.y(tops[i])];
    return `M${x.toFixed(1)} ${low.toFixed(1)}V${high.toFixed(1)}h${(scale.slot - gap).toFixed(1)}V${low.toFixed(1)}Z`;
  }).join('');
}

// a round cap makes a dot of a line that goes nowhere
function dots(points, tops, scale) {
  return points.map((point, i) => `M${(scale.x(point.x) - scale.slot / 2).toFixed(1)} ${scale.y(tops[i]).toFixed(1)}h0`).join('');
}

function nearest(points, x, scale) {
  let best = null;
  for (const point of points) {
    if (best === null || Math.abs(scale.x(point.x) - x) < Math.abs(scale.x(best.x) - x)) best = point;
  }
  return best;
}

/** The next number whose half is easy to read too. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= value * 0.999999);
}
