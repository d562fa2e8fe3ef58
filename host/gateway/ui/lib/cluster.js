// Whether the host is one of several that share its database. The navigation has the page only where it is.
import { api } from './api.js';
import { may } from './caller.js';
import { useEffect } from './html.js';
import { createStore } from './store.js';

/** `null` until it is known. */
export const hasCluster = createStore(null);

/** Returns whether the hosts of `/v1/cluster` are a cluster. A host that is not in one shows itself, without an address. */
export const isCluster = ({ hosts }) => hosts.some(({ url }) => url);

/** Asks once for each caller, and returns whether the page has several hosts to show. */
export function useHasCluster(caller) {
  const isAsked = may(caller, 'read') && !caller.agents;
  useEffect(() => {
    if (!isAsked) { hasCluster.set(false); return undefined; }
    const stop = new AbortController();
    api.get('/v1/cluster', { signal: stop.signal }).then(
      (answer) => hasCluster.set(isCluster(answer)),
      (error) => { if (!stop.signal.aborted && !error.isAway) hasCluster.set(false); },
    );
    return () => stop.abort();
  }, [caller, isAsked]);
  return hasCluster.use() === true;
}
