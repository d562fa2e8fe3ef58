// The number in the navigation: what waits for a person.
import { api } from './api.js';
import { may } from './caller.js';
import { usePolled } from './hooks.js';
import { createStore } from './store.js';

/** `{approvals, deadLetters, more}`; the inbox page sets it too when it knows better. */
export const inboxCount = createStore({ approvals: 0, deadLetters: 0, more: false });

/** Keeps the number fresh while the shell is drawn. */
export function useInboxCount(caller) {
  const canSee = may(caller, 'read') && !caller.agents;
  usePolled(async (signal) => {
    if (!canSee) return null;
    const [approvals, letters] = await Promise.all([
      api.get('/v1/approvals', { signal }),
      may(caller, 'admin') ? api.get('/v1/webhooks/dead-letters', { signal }) : null,
    ]);
    inboxCount.set((was) => {
      const next = { approvals: approvals.data.length, deadLetters: letters?.data.length ?? 0, more: !!(approvals.has_more || letters?.has_more) };
      return JSON.stringify(was) === JSON.stringify(next) ? was : next;
    });
    return null;
  }, [caller], { everyMs: 5000, when: canSee });
  return inboxCount.use();
}
