// Knows whether the host answers. While it does not, the host is asked again with back-off, and a banner says so.
import { createStore } from './store.js';

/** `{away: bool, since: ms or null, tries: n}`; `away` turns false as soon as the host answers again. */
export const connection = createStore({ away: false, since: null, tries: 0 });

let timer = null;

async function ask() {
  timer = null;
  try {
    const response = await fetch('/healthz', { cache: 'no-store' });
    if (response.status < 500) return answered();
  } catch { /* The host is still away. */ }
  connection.set((was) => ({ ...was, tries: was.tries + 1 }));
  wait();
}

function wait() {
  const { tries } = connection.get();
  timer ??= setTimeout(ask, Math.min(500 * 2 ** tries, 5000));
}

/** Notes that a request failed with the network. */
export function lost() {
  if (!connection.get().away) connection.set({ away: true, since: Date.now(), tries: 0 });
  wait();
}

/** Notes that the host answered. */
export function answered() {
  clearTimeout(timer);
  timer = null;
  if (connection.get().away) connection.set({ away: false, since: null, tries: 0 });
}

/** Asks the host at once; for a button. */
export function askNow() {
  clearTimeout(timer);
  ask();
}

/** Resolves when the host answers again; at once if it is not away. */
export function returned(signal) {
  return new Promise((resolve) => {
    if (!connection.get().away) return resolve();
    const stop = connection.listen(({ away }) => {
      if (away) return;
      stop();
      resolve();
    });
    signal?.addEventListener('abort', () => { stop(); resolve(); });
  });
}
