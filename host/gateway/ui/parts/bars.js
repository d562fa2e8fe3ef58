// Stacked bars, one for each day, drawn as elements: few of them, sharp at any width, and readable without sight.
import { useMedia } from '../lib/hooks.js';
import { html, cx, useId, useState } from '../lib/html.js';

/**
 * `bars` is `[{label, title, values: [n, …]}]`, `series` is `[{label, tone}]` from the bottom up; `format(value)` writes a value with its unit, `axis(value)` a tick.
 */
export function Bars({ title, bars, series, format, axis = format, height = 180 }) {
  const [chosen, choose] = useState(null);
  const id = useId();
  const totals = bars.map(({ values }) => values.reduce((sum, value) => sum + value, 0));
  const top = nice(Math.max(0, ...totals));
  const isNarrow = useMedia('(max-width: 640px)');
  const every = Math.max(1, Math.ceil(bars.length / (isNarrow ? 4 : 10)));
  const shown = chosen === null ? null : bars[chosen];
  const sum = (n) => bars.reduce((all, { values }) => all + values[n], 0);
  return html`<figure class="bars" aria-labelledby=${id}>
    <div class="bars-head"><figcaption id=${id} class="chart-title">${title}</figcaption>
      <div class="chart-legend">${series.map(({ label, tone }, n) => html`<span class="chart-key" key=${label}><span class=${`chart-swatch tone-${tone}`}></span>${label}<b>${format(shown ? shown.values[n] : sum(n))}</b></span>`)}
        <span class="chart-when">${shown ? shown.title : 'in all'}</span></div></div>
    <div class="bars-plot" style=${{ height: `${height}px` }}>
      <div class="bars-axis" aria-hidden="true">${[1, 0.5, 0].map((share) => html`<span key=${share} style=${{ bottom: `${share * 100}%` }}>${axis(top * share)}</span>`)}</div>
      <div class="bars-area" onMouseLeave=${() => choose(null)}>
        ${[1, 0.5, 0].map((share) => html`<span class="bars-line" key=${share} aria-hidden="true" style=${{ bottom: `${share * 100}%` }}></span>`)}
        <ol class="bars-list">${bars.map(({ label, title: name, values }, n) => html`<li key=${label} class=${cx('bar', chosen === n && 'chosen')} onMouseEnter=${() => choose(n)}>
          <span class="sr-only">${name}: ${series.map((each, k) => `${each.label} ${format(values[k])}`).join(', ')}</span>
          <span class="bar-stack" aria-hidden="true">${values.map((value, k) => value > 0 && html`<span key=${series[k].label} class=${`bar-part tone-${series[k].tone}`} style=${{ height: `${(value / top) * 100}%` }}></span>`)}</span>
        </li>`)}</ol>
      </div>
    </div>
    <div class="bars-labels" aria-hidden="true">${bars.map(({ label }, n) => html`<span key=${label}>${n % every === 0 ? label : ''}</span>`)}</div>
  </figure>`;
}

/** Returns a round number that is not below `value`. */
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((each) => each >= value);
}
