// Listings that load page by page as one scrolls, and small parts around them.
import { returned } from '../lib/connection.js';
import { ago, iso, time } from '../lib/format.js';
import { html, useCallback, useEffect, useRef, useState } from '../lib/html.js';
import { useSearchField } from '../lib/keys.js';
import { Icon } from './icon.js';

/**
 * Loads a listing page by page: `load({signal, last, page})` returns `{data, has_more}`; `last` is the last row so far, `page` the answer that it was in.
 * Returns `{rows, hasMore, loading, error, more, reload, retry, setRows, isBusy}`; the rows stay while a changed filter loads. `retry` does again what failed.
 * `setRows(change, {hasMore})` changes the rows in place, and with `hasMore(was, rows)` whether there are more. `isBusy()` says whether a page loads now,
 * which will follow the last row: rows at the end must not go meanwhile.
 */
export function usePaged(load, deps = []) {
  const [state, set] = useState({ rows: null, hasMore: false, loading: true, error: null });
  const [round, again] = useState(0);
  const latest = useRef();
  latest.current = { load, state };
  const run = useRef({ stop: null, page: null, busy: false, hasBegun: false });

  const step = useCallback(async (isFirst) => {
    const { current } = run;
    if (!isFirst && current.busy) return;
    if (isFirst) { current.stop?.abort(); current.stop = new AbortController(); current.page = null; current.hasBegun = false; }
    const { signal } = current.stop;
    current.busy = true;
    set((was) => ({ ...was, loading: true, error: null }));
    const last = isFirst ? null : latest.current.state.rows?.at(-1) ?? null;
    try {
      const page = await latest.current.load({ signal, last, page: current.page });
      if (signal.aborted) return;
      current.page = page;
      current.hasBegun = true;
      set((was) => ({ rows: isFirst ? page.data : [...(was.rows ?? []), ...page.data], hasMore: !!page.has_more, loading: false, error: null }));
    } catch (error) {
      if (signal.aborted) return;
      set((was) => ({ ...was, loading: false, error }));
      if (error.isAway) returned(signal).then(() => { if (!signal.aborted) again((n) => n + 1); });
    } finally {
      if (current.stop.signal === signal) current.busy = false;
    }
  }, []);

  useEffect(() => { step(true); }, [...deps, round]);
  useEffect(() => () => run.current.stop?.abort(), []);
  const more = useCallback(() => step(false), []);
  const reload = useCallback(() => again((n) => n + 1), []);
  // The rows of another filter are no beginning that one could continue.
  const retry = useCallback(() => (run.current.hasBegun ? more() : reload()), []);
  const setRows = useCallback((change, { hasMore } = {}) => set((was) => {
    const rows = change(was.rows ?? []);
    return rows === was.rows ? was : { ...was, rows, hasMore: hasMore ? hasMore(was.hasMore, rows) : was.hasMore };
  }), []);
  const isBusy = useCallback(() => run.current.busy, []);
  return { ...state, data: state.rows, more, reload, retry, setRows, isBusy };
}

/** Says whether a stream is open, for pages that change by themselves. */
export function Live({ status, word = 'Live' }) {
  const text = { open: word, connecting: 'Connecting…', waiting: 'Reconnecting…', failed: 'Not live', ended: 'Ended', off: 'Paused' }[status.state] ?? status.state;
  return html`<span class=${`live-mark is-${status.state}`} role="status"><span class="live-dot" aria-hidden="true"></span>${text}</span>`;
}

/** A search field for a bar of filters. */
export function Search({ label, value, onInput, placeholder }) {
  const field = useSearchField();
  return html`<div class="filter-search"><${Icon} name="search" />
    <input ref=${field} type="search" aria-label=${label} placeholder=${placeholder ?? label} value=${value} autocomplete="off" spellcheck=${false} onInput=${(event) => onInput(event.currentTarget.value)} /></div>`;
}

/** A choice for a bar of filters; `options` is `[[value, text], …]`. */
export const Choice = ({ label, value, options, onChange }) => html`<select class="filter-choice" aria-label=${label} value=${value} onChange=${(event) => onChange(event.currentTarget.value)}>
  ${options.map(([id, text]) => html`<option key=${id} value=${id} selected=${id === value}>${text}</option>`)}</select>`;

/** Segments of which one is chosen; `options` is `[[value, text], …]`. */
export const Segments = ({ label, name, value, options, onChange }) => html`<div class="segments" role="radiogroup" aria-label=${label}>${options.map(([id, text]) => html`
  <label key=${id}><input class="sr-only" type="radio" name=${name} checked=${id === value} onChange=${() => onChange(id)} /><span>${text}</span></label>`)}</div>`;

/** The name of a session; an admin sees those of other tenants as `TENANT/ID`. */
export function SessionName({ id }) {
  const at = String(id).indexOf('/');
  return at < 0 ? html`<span class="session-name">${id}</span>`
    : html`<span class="session-name"><span class="session-tenant">${id.slice(0, at)}/</span>${id.slice(at + 1)}</span>`;
}

/** How long ago it was. It has no clock of its own, which hundreds of rows need not have: the page draws them again now and then. */
export const Ago = ({ ms }) => html`<time datetime=${iso(ms)} title=${`${time(ms)} · ${iso(ms)}`}>${ago(ms)}</time>`;

/** Saves a response or a text as a file. */
export async function save(name, content) {
  const blob = content instanceof Response ? await content.blob() : new Blob([content]);
  const address = URL.createObjectURL(blob);
  const link = document.createElement('a');
  link.href = address;
  link.download = name.replace(/[^\w.-]+/g, '-');
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
