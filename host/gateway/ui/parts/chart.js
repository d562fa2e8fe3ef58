// Curves over time, in the theme's colors, with uPlot. The values under the cursor stand in the legend; every chart has its figures in words and as
// a table too, for those who do not see curves.
import uPlot from '../vendor/uplot.js';
import { clock, minute, number } from '../lib/format.js';
import { html, cx, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { color, theme } from '../lib/theme.js';
import { Button } from './basics.js';

/**
 * `at` are times in milliseconds; `series` is `[{label, values, tone?: 1…6, area?, dash?}]` with null where nothing happened; `format(value)` writes a value with its
 * unit, `axis(value)` a tick. Charts with the same `sync` share their cursor. `range` is `[min, max]` of the values, if fixed; `from` and `to`
 * bound the time.
 */
export function Chart({ title, about, at, series, format = number, axis = format, sync, height = 168, range, from, to, name }) {
  const box = useRef();
  const plot = useRef(null);
  const legend = useRef([]);
  const [asTable, setAsTable] = useState(false);
  const { shown } = theme.use();
  const id = useId();
  const shape = series.map(({ label, tone, area, dash }) => [label, tone, area, dash].join()).join(';');
  const latest = useRef();
  latest.current = { at, series, format, axis, range, from, to };
  const data = useMemo(() => [at.map((ms) => ms / 1000), ...series.map(({ values }) => values)], [at, ...series.map(({ values }) => values)]);

  useLayoutEffect(() => {
    if (asTable) return undefined;
    const options = optionsOf(latest, { width: box.current.clientWidth, height, sync, onCursor: (index) => say(legend.current, latest.current, index) });
    const made = new uPlot(options, data, box.current);
    plot.current = made;
    const size = new ResizeObserver(() => {
      const width = box.current?.clientWidth;
      if (width && width !== made.width) made.setSize({ width, height });
    });
    size.observe(box.current);
    return () => { size.disconnect(); made.destroy(); plot.current = null; };
  }, [shape, shown, height, sync, asTable]);

  useEffect(() => {
    if (!plot.current) return;
    plot.current.setData(data, false);
    plot.current.setScale('x', bounds(latest.current));
    if (plot.current.cursor.idx === null || plot.current.cursor.left < 0) say(legend.current, latest.current, null);
  }, [data, from, to]);

  return html`<figure class="chart" aria-labelledby=${`${id}-title`} aria-describedby=${`${id}-words`}>
    <div class="chart-head">
      <figcaption><span class="chart-title" id=${`${id}-title`}>${title}</span>${about && html`<span class="chart-about">${about}</span>`}</figcaption>
      <${Button} kind="quiet" small icon=${asTable ? name ?? 'engine' : 'table'} label=${asTable ? `Show “${title}” as curves` : `Show “${title}” as a table`} onClick=${() => setAsTable(!asTable)} />
    </div>
    <div class="chart-legend" aria-hidden="true">${series.map(({ label, tone = 1, dash }, n) => html`<span class="chart-key" key=${label}>
      <span class=${cx('chart-swatch', `tone-${tone}`, dash && 'dashed')}></span>${series.length > 1 && html`<span class="chart-name">${label}</span>`}<b ref=${(element) => { legend.current[n] = element; }}>–</b></span>`)}
      <span class="chart-when" ref=${(element) => { legend.current.when = element; }}></span></div>
    <p class="sr-only" id=${`${id}-words`}>${words(series, format)}</p>
    ${asTable ? html`<${Figures} ...${{ title, at, series, format, height }} />` : html`<div class="chart-box" ref=${box} style=${{ height: `${height}px` }}></div>`}
  </figure>`;
}

const bounds = ({ at, from, to }) => ({ min: (from ?? at[0] ?? Date.now() - 60_000) / 1000, max: (to ?? at.at(-1) ?? Date.now()) / 1000 });

/** Writes the values at `index`, or the last ones, into the legend, without drawing anything again. */
function say(legend, { at, series, format }, index) {
  series.forEach(({ values }, n) => {
    const value = index === null || index === undefined ? lastOf(values) : values[index];
    if (legend[n]) legend[n].textContent = value === null || value === undefined ? '–' : format(value);
  });
  if (legend.when) legend.when.textContent = index === null || index === undefined ? '' : clock(at[index]);
}

function lastOf(values) {
  for (let n = values.length - 1; n >= Math.max(0, values.length - 60); n -= 1) if (values[n] !== null && values[n] !== undefined) return values[n];
  return null;
}

function words(series, format) {
  return series.map(({ label, values }) => {
    const known = values.filter((value) => value !== null && value !== undefined);
    if (!known.length) return `${label}: nothing yet.`;
    const sum = known.reduce((total, value) => total + value, 0);
    const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return `${label}: last ${format(known.at(-1))}, lowest ${format(low)}, mean ${format(sum / known.length)}, highest ${format(high)}.`;
  }).join(' ');
}

/** The newest values as a table: the last sixty points, and then each sixtieth. */
function Figures({ title, at, series, format, height }) {
  const rows = [];
  for (let n = at.length - 1; n >= 0 && rows.length < 120; n -= rows.length < 60 ? 1 : 60) rows.push(n);
  return html`<div class="chart-table" tabindex="0" role="group" aria-label=${title} style=${{ height: `${height}px` }}><table class="table">
    <thead><tr><th scope="col">Time</th>${series.map(({ label }) => html`<th scope="col" class="num" key=${label}>${label}</th>`)}</tr></thead>
    <tbody>${rows.map((n) => html`<tr key=${at[n]}><td>${clock(at[n])}</td>${series.map(({ label, values }) => html`<td class="num" key=${label}>${values[n] === null || values[n] === undefined ? '–' : format(values[n])}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function optionsOf(latest, { width, height, sync, onCursor }) {
  const line = color('--chart-grid');
  const font = `11px ${color('--font')}`;
  const axis = { stroke: color('--text-3'), font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const { series, range } = latest.current;
  return {
    width, height, padding: [8, 16, 0, 0], legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, ...(sync ? { sync: { key: sync, setSeries: false } } : {}) },
    scales: {
      x: { time: true, range: () => { const { min, max } = bounds(latest.current); return [min, max]; } },
      y: { range: range ? () => range : (_, low, high) => [Math.min(0, low ?? 0), nice(high)] },
    },
    axes: [
      { ...axis, space: 72, size: 26, gap: 6, values: (_, ticks) => ticks.map((s, n) => (ticks.length > 1 && ticks[1] - ticks[0] < 60 ? clock(s * 1000) : minute(s * 1000))) },
      { ...axis, size: 52, space: 34, gap: 6, values: (_, ticks) => ticks.map((value) => latest.current.axis(value)) },
    ],
    series: [{}, ...series.map(({ label, tone = 1, area, dash }) => ({
      label, stroke: color(`--chart-${tone}`), width: 1.5, dash: dash ? [4, 3] : undefined, spanGaps: false, points: { show: false, filter: alone, size: 3, fill: color(`--chart-${tone}`) },
      ...(area ? { fill: color(`--chart-${tone}-area`) } : {}),
    }))],
    hooks: { setCursor: [(self) => onCursor(self.cursor.left < 0 ? null : self.cursor.idx)] },
  };
}

const nice = (high) => (high === null || high === undefined || high <= 0 ? 1 : high * 1.08);

/** Returns which points are drawn: only those whose neighbors are missing, which a line cannot show. */
function alone(self, series) {
  const values = self.data[series];
  const found = [];
  for (let n = 0; n < values.length; n += 1) {
    if ((values[n] ?? null) !== null && (values[n - 1] ?? null) === null && (values[n + 1] ?? null) === null) found.push(n);
  }
  return found.length ? found : null;
}
