// Shortcuts: `g` and a letter go to a page, `?` shows them all, and pages may add their own.
import { useEffect } from './html.js';
import { createStore } from './store.js';

/** The shortcuts of the page in view, for the help: `[{keys, does}]`. */
export const pageKeys = createStore([]);

const isTyping = ({ target }) => target.closest?.('input, textarea, select, [contenteditable], dialog');

/** Listens for keys while the component is drawn: `bindings` is `{key: action}`; two keys in a row are written `g p`. */
export function useKeys(bindings) {
  useEffect(() => {
    let before = null;
    let timer = null;
    const press = (event) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
      const both = before && `${before} ${event.key}`;
      const action = (both && bindings[both]) || bindings[event.key];
      before = null;
      clearTimeout(timer);
      if (action) { event.preventDefault(); action(); return; }
      if (Object.keys(bindings).some((keys) => keys.startsWith(`${event.key} `))) {
        before = event.key;
        timer = setTimeout(() => { before = null; }, 1200);
      }
    };
    addEventListener('keydown', press);
    return () => { clearTimeout(timer); removeEventListener('keydown', press); };
  }, [bindings]);
}

/** Adds shortcuts of a page: `[{keys: 'n', does: 'New chat', run}]`. They are listed in the help while the page is in view. */
export function usePageKeys(list) {
  useEffect(() => {
    pageKeys.set(list);
    return () => pageKeys.set([]);
  }, [list]);
  useKeys(Object.fromEntries(list.filter(({ run }) => run).map(({ keys, run }) => [keys, run])));
}
