// Whether the host says which hosts share its database. The navigation has the page only where it does.
import { api } from './api.js';
import { may } from './caller.js';
import { useEffect } from './html.js';
import { createStore } from './store.js';

/** `null` until it is known. */
export const hasCluster = createStore(null);

/** Asks once for each caller, and returns whether the page has anything to show. */
export function useHasCluster(caller) {
  const isAsked = may(caller, 'admin') && !caller.agents;
  useEffect(() => {
    if (!isAsked) { hasCluster.set(false); return undefined; }
    const stop = new AbortController();
    api.get('/v1/cluster', { signal: stop.signal }).then(
      () => hasCluster.set(true),
      (error) => { if (!stop.signal.aborted && !error.isAway) hasCluster.set(false); },
    );
    return () => stop.abort();
  }, [caller, isAsked]);
  return hasCluster.use() === true;
}
