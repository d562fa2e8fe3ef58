// Tables and lists of any length. Only the rows in view, and some around them, are in the document.
import { html, cx, useEffect, useLayoutEffect, useRef, useState } from '../lib/html.js';
import { Link, navigate } from '../lib/router.js';

const AROUND = 12;
/** Number of rows by which the window moves, so that not every step of the wheel draws. */
const STEP = 4;
const VIRTUAL_FROM = 100;

/**
 * A table. `columns` is `[{key, label, render?(row), align: 'right', width: '8rem', optional: true}]`; an `optional` column is left out
 * on narrow windows. `rowKey(row)` names a row, `hrefOf(row)` makes its first cell a link and the row clickable, `empty` is shown
 * without rows. `height` is that of a row in pixels, `max` that of the whole table; from 100 rows on the table scrolls within it.
 * `onEnd()` is called when the end comes into view, to load more.
 */
export function Table(props) {
  const { label, columns, rows, rowKey, hrefOf, onRow, empty, height = 36, max = 'min(70vh, 720px)', onEnd, selected } = props;
  const box = useRef();
  const isVirtual = rows.length >= VIRTUAL_FROM;
  const [from, to] = useWindow(box, rows.length, height, isVirtual);
  const drawn = useDrawn(props);
  useEnd(onEnd, isVirtual && to >= rows.length - 1, rows.length && `${rows.length} ${rowKey?.(rows.at(-1))}`);
  if (!rows.length && empty) return empty;
  const shown = isVirtual ? rows.slice(from, to) : rows;
  const first = isVirtual ? from : 0;
  const space = (count) => count > 0 && html`<tr class="table-space" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${count * height}px` }}></td></tr>`;
  return html`<div class=${cx('table-box', isVirtual && 'scrolls')} ref=${box} tabindex="0" role="group" aria-label=${label} style=${isVirtual ? { maxHeight: max } : undefined}>
    <table class=${cx('table', (hrefOf || onRow) && 'clickable')} aria-rowcount=${rows.length + 1} style=${{ '--row': `${height}px` }}>
      <caption class="sr-only">${label}</caption>
      <thead><tr aria-rowindex="1">${columns.map((column) => html`<th scope="col" key=${column.key} class=${cellClass(column)} style=${column.width ? { width: column.width } : undefined}>${column.label}</th>`)}</tr></thead>
      <tbody>
        ${space(first)}
        ${drawn(shown, first, (row, index, key) => html`<${Row} key=${key} ...${{ row, columns, hrefOf, onRow, index: index + 2, isSelected: selected !== undefined && key === selected }} />`)}
        ${space(isVirtual ? rows.length - to : 0)}
      </tbody>
    </table>
  </div>`;
}

/**
 * Keeps the drawn rows as long as the table has the same properties: a step of scrolling draws only the rows that come into view. A row that is the
 * same object as before is not compared again.
 */
function useDrawn(props) {
  const kept = useRef({ props: null, rows: new Map() });
  return (rows, first, draw) => {
    const known = kept.current.props === props ? kept.current.rows : new Map();
    const next = new Map();
    const all = rows.map((row, n) => {
      const key = props.rowKey ? props.rowKey(row) : first + n;
      const vnode = known.get(key) ?? draw(row, first + n, key);
      next.set(key, vnode);
      return vnode;
    });
    kept.current = { props, rows: next };
    return all;
  };
}

const cellClass = ({ align, optional }) => cx(align === 'right' && 'num', optional && 'optional');

function Row({ row, columns, hrefOf, onRow, index, isSelected }) {
  const href = hrefOf?.(row);
  const click = (event) => {
    if (event.defaultPrevented || event.target.closest('a, button, input, select, label') || getSelection().toString()) return;
    if (onRow) onRow(row);
    else if (href) navigate(href);
  };
  const content = (column) => (column.render ? column.render(row) : row[column.key] ?? '–');
  return html`<tr aria-rowindex=${index} aria-selected=${isSelected ? 'true' : undefined} onClick=${href || onRow ? click : undefined}>
    ${columns.map((column, n) => html`<td key=${column.key} class=${cellClass(column)}>${n === 0 && href ? html`<${Link} href=${href}>${content(column)}<//>` : content(column)}</td>`)}
  </tr>`;
}

/** Returns which rows are in view, `[from, to)`, and follows the scrolling. */
function useWindow(box, count, height, isOn) {
  const [range, set] = useState([0, 60]);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element || !isOn) return undefined;
    let frame = 0;
    const measure = () => {
      frame = 0;
      const above = Math.floor(element.scrollTop / height) - AROUND;
      const below = Math.ceil((element.scrollTop + element.clientHeight) / height) + AROUND;
      const first = Math.max(0, Math.floor(above / STEP) * STEP);
      const last = Math.min(count, Math.ceil(below / STEP) * STEP);
      set((was) => (was[0] === first && was[1] === last ? was : [first, last]));
    };
    const soon = () => { frame ||= requestAnimationFrame(measure); };
    measure();
    element.addEventListener('scroll', soon, { passive: true });
    const size = new ResizeObserver(soon);
    size.observe(element);
    return () => { cancelAnimationFrame(frame); element.removeEventListener('scroll', soon); size.disconnect(); };
  }, [count, height, isOn]);
  return [Math.min(range[0], count), Math.min(range[1], count)];
}

/** Reports each end of the rows once. Rows of another filter may be as many, but they end with another row. */
function useEnd(onEnd, atEnd, end) {
  const reported = useRef(null);
  useEffect(() => {
    if (!onEnd || !atEnd || reported.current === end) return;
    reported.current = end;
    onEnd();
  }, [onEnd, atEnd, end]);
}

/**
 * A long list of items of different heights, such as the messages of a session. `render(item, index)` draws one; heights are measured as they
 * come into view. `follow` keeps the end in view while it grows, if it was in view. It scrolls in its own box, of the height that CSS gives it.
 */
export function VirtualList({ items, itemKey, render, estimate = 96, label, follow, class: name, role = 'list' }) {
  const box = useRef();
  const heights = useRef(new Map());
  const [view, setView] = useState({ top: 0, height: 800 });
  const [, remeasured] = useState(0);
  const atEnd = useRef(!!follow);
  const keys = items.map(itemKey);
  const tops = new Float64Array(items.length + 1);
  for (let n = 0; n < items.length; n += 1) tops[n + 1] = tops[n] + (heights.current.get(keys[n]) ?? estimate);
  const first = Math.max(0, position(tops, view.top) - 6);
  const last = Math.min(items.length, position(tops, view.top + view.height) + 7);

  useLayoutEffect(() => {
    const element = box.current;
    let frame = 0;
    const look = () => {
      frame = 0;
      atEnd.current = element.scrollTop + element.clientHeight >= element.scrollHeight - 40;
      setView((was) => (was.top === element.scrollTop && was.height === element.clientHeight ? was : { top: element.scrollTop, height: element.clientHeight }));
    };
    const soon = () => { frame ||= requestAnimationFrame(look); };
    setView({ top: element.scrollTop, height: element.clientHeight });
    element.addEventListener('scroll', soon, { passive: true });
    const size = new ResizeObserver(soon);
    size.observe(element);
    return () => { cancelAnimationFrame(frame); element.removeEventListener('scroll', soon); size.disconnect(); };
  }, []);

  useLayoutEffect(() => {
    let changed = false;
    for (const child of box.current.querySelectorAll(':scope > .vlist-space > .vlist-item')) {
      const key = keys[Number(child.dataset.index)];
      const height = child.offsetHeight;
      if (heights.current.get(key) !== height) { heights.current.set(key, height); changed = true; }
    }
    // A list that stays open for long does not keep the heights of what has left it.
    if (heights.current.size > 2 * items.length + 500) {
      const known = new Set(keys);
      for (const key of heights.current.keys()) if (!known.has(key)) heights.current.delete(key);
    }
    if (changed) remeasured((n) => n + 1);
    if (follow && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });

  const shown = items.slice(first, last);
  return html`<div class=${cx('vlist', name)} ref=${box} tabindex="0" role="group" aria-label=${label}>
    <div class="vlist-space" role=${role} aria-label=${label} style=${{ height: `${tops[items.length]}px` }}>
      ${shown.map((item, n) => html`<div class="vlist-item" role=${role === 'list' ? 'listitem' : undefined} key=${keys[first + n]} data-index=${first + n} aria-setsize=${items.length} aria-posinset=${first + n + 1}
        style=${{ transform: `translateY(${tops[first + n]}px)` }}>${render(item, first + n)}</div>`)}
    </div>
  </div>`;
}

/** Returns the index of the item that covers the position `y`. */
function position(tops, y) {
  let low = 0;
  let high = tops.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (tops[middle] <= y) low = middle; else high = middle - 1;
  }
  return low;
}
