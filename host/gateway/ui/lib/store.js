// A value outside of the tree of components that components can listen to.
import { useEffect, useState } from './html.js';

/** Makes a store: `get`, `set` (a value or a function of the old one), `listen` and the hook `use`. */
export function createStore(initial) {
  let value = initial;
  const listeners = new Set();
  const store = {
    get: () => value,
    set(next) {
      const changed = typeof next === 'function' ? next(value) : next;
      if (Object.is(changed, value)) return;
      value = changed;
      for (const listener of [...listeners]) listener(value);
    },
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    use() {
      const [seen, show] = useState(value);
      useEffect(() => {
        show(value);
        return store.listen(show);
      }, []);
      return seen;
    },
  };
  return store;
}

/** Reads JSON that this browser kept; `fallback` where there is none or storage is forbidden. */
export function recall(key, fallback, storage = 'sessionStorage') {
  try {
    const text = window[storage].getItem(`skep-${key}`);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Keeps JSON in this browser. A full or forbidden storage is not an error: the page works without it. */
export function remember(key, value, storage = 'sessionStorage') {
  try {
    if (value === undefined || value === null) window[storage].removeItem(`skep-${key}`);
    else window[storage].setItem(`skep-${key}`, JSON.stringify(value));
  } catch { /* The page works without it. */ }
}
