// Shortcuts: `g` and a letter go to a page, `?` shows them all, and pages may add their own.
import { useEffect, useLayoutEffect, useRef } from './html.js';
import { createStore } from './store.js';

/** The longest time between the two keys of a shortcut. */
const PAIR_MS = 2000;
/** For so long, a page that is still loading may bring the field that `/` leads to. */
const FIELD_MS = 30_000;

/** The shortcuts of the page in view, for the help: `[{keys, does}]`. */
export const pageKeys = createStore([]);

/** A person who writes, or chooses in a list by its first letters, does not mean shortcuts. One who has clicked a switch or a segment does. */
const isTyping = ({ target }) => target.closest?.('input:not([type=radio], [type=checkbox], [type=file], [type=range]), textarea, select, [contenteditable], dialog');

/** Listens for keys from the first drawing on: `bindings` is `{key: action}`; two keys in a row are written `g p`. The first key is kept while the component is drawn again. */
export function useKeys(bindings) {
  const latest = useRef(bindings);
  latest.current = bindings;
  useLayoutEffect(() => {
    let first = null;
    const press = (event) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
      const known = latest.current;
      const isPair = first && event.timeStamp - first.at < PAIR_MS;
      const action = (isPair && known[`${first.key} ${event.key}`]) || known[event.key];
      first = null;
      if (action) { event.preventDefault(); action(); return; }
      if (Object.keys(known).some((keys) => keys.startsWith(`${event.key} `))) first = { key: event.key, at: event.timeStamp };
    };
    addEventListener('keydown', press);
    return () => removeEventListener('keydown', press);
  }, []);
}

/** Adds shortcuts of a page: `[{keys: 'n', does: 'New chat', run}]`. They are listed in the help while the page is in view. */
export function usePageKeys(list) {
  useEffect(() => {
    pageKeys.set(list);
    return () => pageKeys.set([]);
  }, [list]);
  useKeys(Object.fromEntries(list.filter(({ run }) => run).map(({ keys, run }) => [keys, run])));
}

let wanted = null;

/** Leads to the search of the page: at once, or as soon as the page that is loading has one, unless another key or a click comes before. */
export function goToSearch() {
  const field = document.querySelector('main input[type=search]');
  if (field) { field.focus(); return; }
  wanted?.abort();
  wanted = new AbortController();
  const { signal } = wanted;
  const timer = setTimeout(() => wanted?.abort(), FIELD_MS);
  signal.addEventListener('abort', () => { clearTimeout(timer); wanted = null; });
  // The key that asked for it is still on its way.
  setTimeout(() => { for (const event of ['keydown', 'pointerdown']) addEventListener(event, () => wanted?.abort(), { signal, capture: true }); });
}

/** Returns a reference for a search field, which takes the focus if somebody has asked for it before it was there. */
export function useSearchField() {
  const field = useRef();
  useLayoutEffect(() => {
    if (!wanted || !field.current) return;
    wanted.abort();
    field.current.focus();
  }, []);
  return field;
}
