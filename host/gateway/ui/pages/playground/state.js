// The state of the playground. It lives outside of the page, so that an answer continues while another page is in view, and it is kept in the tab's
// session storage, so that a reload keeps it.
import { createStore, recall, remember } from '../../lib/store.js';

const KEPT = 'playground';
let lastId = 0;

/** Makes an id that no other message, pane or tool of this tab has. */
export const newId = () => `${Date.now().toString(36)}-${(lastId += 1).toString(36)}`;

export const newPane = (model = null) => ({ id: newId(), model, session: newSession(), messages: [] });
export const newSession = () => `console-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
export const isAgent = (model) => !!model?.startsWith('agent:');

const EMPTY = () => ({
  system: '', draft: '', panes: [newPane()], tab: 'settings',
  options: {}, tools: [], toolChoice: 'auto', output: { kind: 'text', texts: {} },
});

/** Returns the message as it is where nothing writes it: an answer that was being written has stopped. */
export const calm = (message) => (message.state === 'streaming' ? { ...message, state: 'stopped' } : message);

/** `{system, draft, panes: [{id, model, session, messages}], options, tools, toolChoice, output, tab}`. */
export const playground = createStore(restored());

function restored() {
  const kept = recall(KEPT, null);
  if (!kept?.panes?.length) return EMPTY();
  return { ...EMPTY(), ...kept, panes: kept.panes.map((pane) => ({ ...pane, messages: pane.messages.map(calm) })) };
}

let timer = null;
const keep = () => { clearTimeout(timer); timer = null; remember(KEPT, playground.get()); };
playground.listen(() => { timer ??= setTimeout(keep, 400); });
addEventListener('pagehide', keep);

/** Changes members of the state. */
export const change = (part) => playground.set((was) => ({ ...was, ...(typeof part === 'function' ? part(was) : part) }));

/** Changes one pane: `part` is an object, or a function of the pane. */
export const changePane = (paneId, part) => change(({ panes }) => ({
  panes: panes.map((pane) => (pane.id === paneId ? { ...pane, ...(typeof part === 'function' ? part(pane) : part) } : pane)),
}));

/** Changes one message. */
export const changeMessage = (paneId, messageId, part) => changePane(paneId, ({ messages }) => ({
  messages: messages.map((message) => (message.id === messageId ? { ...message, ...(typeof part === 'function' ? part(message) : part) } : message)),
}));

/** Adds messages to the end of a pane. */
export const append = (paneId, ...more) => changePane(paneId, ({ messages }) => ({ messages: [...messages, ...more] }));

export const removeMessage = (paneId, messageId) => changePane(paneId, ({ messages }) => ({ messages: messages.filter(({ id }) => id !== messageId) }));

export const userMessage = (text) => ({ id: newId(), role: 'user', text, state: 'done' });
export const paneOf = (paneId) => playground.get().panes.find(({ id }) => id === paneId);
export const messageOf = (paneId, messageId) => paneOf(paneId)?.messages.find(({ id }) => id === messageId);

/** Empties the conversations and keeps models, options, tools and format. */
export const clearAll = () => change(({ panes }) => ({ panes: panes.map((pane) => ({ ...pane, messages: [], session: newSession() })) }));

/** Chooses the model of a pane. An agent's conversation is the agent's own, so it starts again. */
export function chooseModel(paneId, model) {
  changePane(paneId, (pane) => (isAgent(model) || isAgent(pane.model)
    ? { model, messages: model === pane.model ? pane.messages : [], session: newSession() } : { model }));
}
