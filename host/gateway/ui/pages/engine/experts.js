// How evenly the experts of a model work: a map of layers and experts, and a table that says the same in words.
import { decimal, number, percent } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { Section, Table } from '../../parts/index.js';
import { Segments } from '../../parts/paged.js';

const SPANS = [['loaded', 'All'], ['opened', 'Since this page was opened']];
/** Sizes of the map in pixels. */
const CELL = 24;
const ROW = 12;
const HEIGHTS = [72, 480];
/** Opacity of an expert with a single token, of 255. */
const FAINT = 24;

const sum = (tokens) => tokens.reduce((all, each) => all + each, 0);
const sumOf = (layers) => sum(layers.map(({ tokens }) => sum(tokens)));

/** `layers` is `[{layer, tokens}]` with the counts of all experts, of at least one layer. */
export function Experts({ layers }) {
  const first = useRef(layers);
  const [span, setSpan] = useState('loaded');
  // The counts of a model that was loaded again begin with zero.
  if (sumOf(layers) < sumOf(first.current)) first.current = layers;
  const shown = useMemo(() => (span === 'loaded' ? layers : since(layers, first.current)), [layers, span]);
  const rows = useMemo(() => shown.map(rowOf), [shown]);
  const experts = shown[0].tokens.length;
  return html`<${Section} title="Expert load" class="expert-load" about="A token passes through a few experts of each layer. With an even load, all experts of a layer get the same share."
    actions=${html`<${Segments} label="Time of the counts" name="expert-span" value=${span} options=${SPANS} onChange=${setSpan} />`}>
    <div class="stack">
      <${LoadMap} layers=${shown} />
      <p class="muted small">A row is a layer, and a column an expert; a stronger color means more tokens. ${number(rows[0].all)} times in each layer, a token went through one of the ${number(experts)} experts.</p>
      <${Table} label="Busiest experts" columns=${COLUMNS} rows=${rows} rowKey=${({ layer }) => layer} height=${32} max="320px" />
    </div>
  <//>`;
}

const COLUMNS = [
  { key: 'layer', label: 'Layer', render: ({ layer }) => number(layer + 1) },
  { key: 'busiest', label: 'Busiest expert', align: 'right', render: ({ busiest }) => (busiest === null ? '–' : number(busiest + 1)) },
  { key: 'share', label: 'Its share', align: 'right', render: ({ share }) => percent(share) },
  { key: 'ratio', label: 'Times the mean', align: 'right', render: ({ ratio }) => decimal(ratio, 2) },
  { key: 'unused', label: 'Without tokens', align: 'right', optional: true, render: ({ unused }) => number(unused) },
];

/** Sums up a layer. Before its first token, no expert is the busiest. */
function rowOf({ layer, tokens }) {
  const all = sum(tokens);
  const most = Math.max(...tokens);
  const share = all ? most / all : null;
  return { layer, all, share, busiest: all ? tokens.indexOf(most) : null, ratio: all ? share * tokens.length : null, unused: tokens.filter((count) => !count).length };
}

/** Returns what was added to the counts. */
const since = (layers, before) => layers.map(({ layer, tokens }, n) => ({ layer, tokens: tokens.map((count, expert) => count - (before[n]?.tokens[expert] ?? 0)) }));

/** One pixel is one expert; the browser enlarges them. */
function LoadMap({ layers }) {
  const canvas = useRef();
  const [pointed, point] = useState(null);
  const experts = layers[0].tokens.length;
  useEffect(() => {
    const element = canvas.current;
    const context = element.getContext('2d');
    const [red, green, blue] = getComputedStyle(element).color.match(/[\d.]+/g).map(Number);
    const most = Math.max(1, ...layers.map(({ tokens }) => Math.max(...tokens)));
    const image = context.createImageData(experts, layers.length);
    layers.forEach(({ tokens }, row) => tokens.forEach((count, column) => {
      image.data.set([red, green, blue, count ? Math.round(FAINT + (255 - FAINT) * (count / most)) : 0], 4 * (row * experts + column));
    }));
    context.putImageData(image, 0, 0);
  }, [layers, experts]);
  const move = ({ offsetX: x, offsetY: y, currentTarget: { clientWidth: width, clientHeight: height } }) => {
    const at = (offset, length, count) => Math.min(count - 1, Math.max(0, Math.floor((offset / length) * count)));
    point([at(y, height, layers.length), at(x, width, experts)]);
  };
  const found = pointed && layers[pointed[0]];
  const height = Math.min(HEIGHTS[1], Math.max(HEIGHTS[0], layers.length * ROW));
  return html`<div class="expert-map">
    <canvas ref=${canvas} width=${experts} height=${layers.length} role="img" aria-label=${`The tokens of ${number(experts)} experts in ${number(layers.length)} layers; the table below has the busiest expert of each layer`}
      style=${{ height: `${height}px`, maxWidth: `${experts * CELL}px` }} onMouseMove=${move} onMouseLeave=${() => point(null)}></canvas>
    <p class="small expert-pointed" aria-hidden="true">${found ? html`Layer ${number(found.layer + 1)}, expert ${number(pointed[1] + 1)}: ${number(found.tokens[pointed[1]])} tokens, ${percent(sum(found.tokens) ? found.tokens[pointed[1]] / sum(found.tokens) : 0)} of the layer` : ''}</p>
  </div>`;
}
