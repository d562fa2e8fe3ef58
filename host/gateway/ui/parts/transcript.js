// A conversation of any length. Messages are loaded in chunks as they come into view; only those in view are in the document, and what one
// reads stays where it is while heights above it become known.
import { Component, html, useEffect, useLayoutEffect, useRef, useState } from '../lib/html.js';
import { ErrorNote } from './basics.js';

const CHUNK = 100;
const ESTIMATE = 92;
const AROUND = 5;

/**
 * `load(after, limit)` returns the messages that follow the one with the number `after`; `render(message, find)` draws one, and `find(id)` is the tool call
 * with an id. `tail` stands below the last message. `handle.current.refresh(total)` loads what is new before the transcript draws it.
 */
export function Transcript({ total, load, render, tail, label, handle, empty }) {
  const box = useRef();
  const chunks = useRef(new Map());
  const calls = useRef(new Map());
  const heights = useRef(new Map());
  const shift = useRef(0);
  const atEnd = useRef(true);
  const [view, setView] = useState({ top: Infinity, height: 800 });
  const [error, setError] = useState(null);
  const [, redraw] = useState(0);

  const tops = new Float64Array(total + 1);
  for (let n = 0; n < total; n += 1) tops[n + 1] = tops[n] + (heights.current.get(n) ?? ESTIMATE);
  const top = Math.min(view.top, Math.max(0, tops[total] - view.height));
  const first = Math.max(0, covering(tops, top) - AROUND);
  const last = Math.min(total, covering(tops, top + view.height) + AROUND + 1);

  const fetchChunk = async (chunk, known) => {
    const was = chunks.current.get(chunk);
    const expected = Math.min(CHUNK, known - chunk * CHUNK);
    if ((was?.messages?.length ?? 0) >= expected) return;
    if (was?.loading) {
      // The answer that is on its way may not have the last message that is known.
      await was.loading.catch(() => {});
      await fetchChunk(chunk, known);
      return;
    }
    const loading = load(chunk * CHUNK, CHUNK);
    chunks.current.set(chunk, { ...was, loading });
    try {
      const messages = await loading;
      for (const message of messages) for (const call of message.tool_calls ?? []) calls.current.set(call.id, call);
      chunks.current.set(chunk, { messages });
      setError(null);
    } catch (cause) {
      chunks.current.set(chunk, { ...was });
      setError(cause);
      throw cause;
    } finally {
      redraw((n) => n + 1);
    }
  };
  if (handle) handle.current = { refresh: (known) => (known ? fetchChunk(Math.floor((known - 1) / CHUNK), known) : Promise.resolve()) };

  useEffect(() => {
    if (!total || error) return undefined;
    const timer = setTimeout(() => {
      for (let chunk = Math.floor(first / CHUNK); chunk <= Math.floor(Math.max(first, last - 1) / CHUNK); chunk += 1) fetchChunk(chunk, total).catch(() => {});
    }, chunks.current.size ? 60 : 0);
    return () => clearTimeout(timer);
  }, [Math.floor(first / CHUNK), Math.floor((last - 1) / CHUNK), total, error]);

  useLayoutEffect(() => {
    const element = box.current;
    let frame = 0;
    const look = () => {
      frame = 0;
      atEnd.current = element.scrollTop + element.clientHeight >= element.scrollHeight - 48;
      setView((was) => (was.top === element.scrollTop && was.height === element.clientHeight ? was : { top: element.scrollTop, height: element.clientHeight }));
    };
    const soon = () => { frame ||= requestAnimationFrame(look); };
    setView({ top: atEnd.current ? Infinity : element.scrollTop, height: element.clientHeight });
    element.addEventListener('scroll', soon, { passive: true });
    const size = new ResizeObserver(() => { if (atEnd.current) element.scrollTop = element.scrollHeight; soon(); });
    size.observe(element);
    size.observe(element.lastElementChild);
    return () => { cancelAnimationFrame(frame); element.removeEventListener('scroll', soon); size.disconnect(); };
  }, []);

  useLayoutEffect(() => {
    const element = box.current;
    if (shift.current) { element.scrollTop += shift.current; shift.current = 0; }
    const from = element.scrollTop;
    let changed = false;
    for (const child of element.querySelectorAll(':scope > .transcript-space > .transcript-item')) {
      const index = Number(child.dataset.index);
      const known = heights.current.get(index) ?? ESTIMATE;
      const height = child.offsetHeight;
      if (known === height) continue;
      heights.current.set(index, height);
      changed = true;
      if (tops[index] + known <= from + 1) shift.current += height - known;
    }
    if (atEnd.current) { shift.current = 0; element.scrollTop = element.scrollHeight; }
    if (changed) redraw((n) => n + 1);
  });

  const shown = Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
  const find = (id) => calls.current.get(id);
  return html`<div class="transcript" ref=${box} tabindex="0" role="group" aria-label=${label}>
    <${ErrorNote} error=${error} onRetry=${() => setError(null)} />
    ${!total && !tail && empty}
    <div class="transcript-space" role=${total ? 'list' : undefined} aria-label=${total ? label : undefined} style=${{ height: `${tops[total]}px` }}>
      ${shown.map((index) => {
        const message = chunks.current.get(Math.floor(index / CHUNK))?.messages?.[index % CHUNK];
        return html`<div class="transcript-item" role="listitem" key=${index} data-index=${index} aria-setsize=${total} aria-posinset=${index + 1} style=${{ transform: `translateY(${tops[index]}px)` }}>
          ${message ? html`<${Kept} message=${message} render=${render} find=${find} />` : html`<div class="transcript-wait"><div class="skeleton-line"></div><div class="skeleton-line"></div></div>`}</div>`;
      })}
    </div>
    <div class="transcript-tail">${tail}</div>
  </div>`;
}

/** A message that is drawn once, and not again with each step of the scrolling. */
class Kept extends Component {
  shouldComponentUpdate(next) { return next.message !== this.props.message; }

  render({ message, render, find }) { return render(message, find); }
}

/** Returns the index of the item that covers the position `y`. */
function covering(tops, y) {
  let low = 0;
  let high = tops.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (tops[middle] <= y) low = middle; else high = middle - 1;
  }
  return low;
}
