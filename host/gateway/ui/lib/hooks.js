// Loading with hooks: a resource, a polled resource, a stream, and small things that pages share.
import { api } from './api.js';
import { connection, lost, returned } from './connection.js';
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from './html.js';

/**
 * Loads something: `load(signal)` is called when `deps` change and by `reload()`.
 * Returns `{data, error, loading, reload, setData}`. While the host is away the old data stay, and it is loaded again when the host is back.
 * With `keep`, the old data stay also when `deps` change, for lists that are filtered.
 */
export function useResource(load, deps = [], { keep = false } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const [round, setRound] = useState(0);
  const known = useRef(null);
  useEffect(() => {
    const stop = new AbortController();
    const isNew = known.current === null || known.current.some((value, n) => !Object.is(value, deps[n]));
    known.current = deps;
    setState((was) => ({ data: isNew && !keep ? null : was.data, error: isNew ? null : was.error, loading: true }));
    const attempt = () => Promise.resolve().then(() => load(stop.signal)).then(
      (data) => { if (!stop.signal.aborted) setState({ data, error: null, loading: false }); },
      async (error) => {
        if (stop.signal.aborted) return;
        if (error.isAway) {
          setState((was) => ({ ...was, error: was.data === null ? error : null, loading: true }));
          await returned(stop.signal);
          if (!stop.signal.aborted) await attempt();
          return;
        }
        setState((was) => ({ ...was, error, loading: false }));
      },
    );
    attempt();
    return () => stop.abort();
  }, [...deps, round]);
  const reload = useCallback(() => setRound((n) => n + 1), []);
  const setData = useCallback((data) => setState((was) => ({
    ...was, data: typeof data === 'function' ? data(was.data) : data,
  })), []);
  return { ...state, reload, setData };
}

/** Loads something again and again while the page is visible and `when` is true. */
export function usePolled(load, deps = [], { everyMs = 5000, when = true, keep = true } = {}) {
  const resource = useResource(load, deps, { keep });
  const { reload, loading } = resource;
  useEffect(() => {
    if (!when || loading) return undefined;
    const again = () => { if (!document.hidden && !connection.get().away) reload(); };
    const timer = setInterval(again, everyMs);
    document.addEventListener('visibilitychange', again);
    return () => { clearInterval(timer); document.removeEventListener('visibilitychange', again); };
  }, [when, everyMs, loading]);
  return resource;
}

/**
 * Follows a stream of events and opens it again with back-off when it breaks; with the last event's id, if events have one.
 * `onEvent({event, data, id})` gets data as text; return `true` from it after the last event. `path` null follows nothing.
 * Returns `{state: 'off' | 'connecting' | 'open' | 'waiting' | 'ended' | 'failed', error}`.
 */
export function useStream(path, { onEvent, onOpen, query, deps = [] }) {
  const [status, setStatus] = useState({ state: 'off', error: null });
  const handlers = useRef();
  handlers.current = { onEvent, onOpen };
  useEffect(() => {
    if (!path) { setStatus({ state: 'off', error: null }); return undefined; }
    const stop = new AbortController();
    const { signal } = stop;
    let lastId = null;
    let isOver = false;
    const follow = async () => {
      for (let tries = 0; !signal.aborted && !isOver; tries += 1) {
        setStatus({ state: tries ? 'waiting' : 'connecting', error: null });
        try {
          await api.stream(path, {
            query, signal, lastId,
            onOpen: () => { tries = 0; setStatus({ state: 'open', error: null }); handlers.current.onOpen?.(); },
            onEvent: (event) => {
              lastId = event.id ?? lastId;
              if (handlers.current.onEvent(event) === true) { isOver = true; stop.abort(); }
            },
          });
        } catch (error) {
          if (signal.aborted) break;
          if (error.status && error.status !== 429 && error.status < 500) { setStatus({ state: 'failed', error }); return; }
          if (error.isAway) { lost(); setStatus({ state: 'waiting', error }); await returned(signal); }
        }
        if (!signal.aborted) await new Promise((resume) => { setTimeout(resume, Math.min(500 * 2 ** tries, 8000)); });
      }
      if (isOver) setStatus({ state: 'ended', error: null });
    };
    follow();
    return () => stop.abort();
  }, [path, JSON.stringify(query), ...deps]);
  return status;
}

/** Returns the value after it has not changed for `ms`; for searches while one types. */
export function useDebounced(value, ms = 250) {
  const [settled, settle] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => settle(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return settled;
}

/** Draws again every `ms`, for clocks and durations that grow. Returns the time. */
export function useNow(ms = 1000, when = true) {
  const [now, tick] = useState(Date.now());
  useEffect(() => {
    if (!when) return undefined;
    const timer = setInterval(() => tick(Date.now()), ms);
    return () => clearInterval(timer);
  }, [ms, when]);
  return now;
}

/**
 * Does something that changes the host: `[run, {busy, error, clear}]`. `run(...args)` returns the result, or `undefined` after an
 * error, which is kept for an `ErrorNote`.
 */
export function useAction(act) {
  const [state, setState] = useState({ busy: false, error: null });
  const latest = useRef(act);
  latest.current = act;
  const run = useCallback(async (...args) => {
    setState({ busy: true, error: null });
    try {
      const result = await latest.current(...args);
      setState({ busy: false, error: null });
      return result ?? null;
    } catch (error) {
      setState({ busy: false, error });
      return undefined;
    }
  }, []);
  const clear = useCallback(() => setState({ busy: false, error: null }), []);
  return [run, { ...state, clear }];
}

/** Returns a reference that is true while the component is drawn: an answer that comes after a person has closed a dialog must not close or open anything. */
export function useIsDrawn() {
  const isDrawn = useRef(true);
  useLayoutEffect(() => {
    isDrawn.current = true;
    return () => { isDrawn.current = false; };
  }, []);
  return isDrawn;
}

/** Whether a media query holds. */
export function useMedia(query) {
  const [holds, set] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const changed = () => set(list.matches);
    changed();
    list.addEventListener('change', changed);
    return () => list.removeEventListener('change', changed);
  }, [query]);
  return holds;
}
