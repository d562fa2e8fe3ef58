// The caller that uses the console: the key's tenant, role and agents. Controls that the key may not use are not shown.
import { api, signedIn, signedOut } from './api.js';
import { createStore } from './store.js';

/** `{state: 'loading' | 'ready' | 'signed-out' | 'refused' | 'failed', caller, error, hasEnded}`; `hasEnded`: the host ended the sign-in, not the person. */
export const callerStore = createStore({ state: 'loading', caller: null, error: null });

const RANKS = ['metrics', 'read', 'invoke', 'admin'];

/** Whether the caller's role reaches `role`: `may(caller, 'invoke')`. */
export const may = (caller, role) => !!caller && RANKS.indexOf(caller.role) >= RANKS.indexOf(role);

/** Returns who calls; pages are drawn only once that is known. */
export function useCaller() {
  return callerStore.use().caller;
}

let asked = 0;

/** Asks the host who calls. If it is asked again before it answers, only the answer to the last question counts. */
export async function identify() {
  const own = (asked += 1);
  try {
    const caller = await api.get('/v1/caller');
    if (own !== asked) return;
    signedOut.set(false);
    callerStore.set({ state: 'ready', caller, error: null });
  } catch (error) {
    if (own !== asked) return;
    if (error.status === 401) refused();
    else if (error.status === 403) callerStore.set({ state: 'refused', caller: null, error });
    else callerStore.set((was) => (was.caller ? was : { state: 'failed', caller: null, error }));
    if (error.status !== 401) throw error;
  }
}

/** Signs in with a key; throws the host's refusal. */
export async function signIn(key) {
  await api.post('/ui/session', { key });
  signedIn();
  await identify();
}

/** Signs out and forgets who called. */
export async function signOut() {
  try { await api.del('/ui/session'); } finally {
    callerStore.set({ state: 'signed-out', caller: null, error: null });
  }
}

/** The host does not know the caller, or no longer. */
function refused() {
  callerStore.set((was) => ({ state: 'signed-out', caller: null, error: null, hasEnded: !!was.caller || !!was.hasEnded }));
}

signedOut.listen((isOut) => { if (isOut) refused(); });
