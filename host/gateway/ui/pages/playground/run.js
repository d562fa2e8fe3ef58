// Runs a pane: sends its conversation, reads the stream, and changes the answer at most once a frame.
import { api, ApiError, errorOf, url } from '../../lib/api.js';
import { createStore } from '../../lib/store.js';
import { append, changeMessage, changePane, isAgent, messageOf, newId, paneOf, playground, userMessage } from './state.js';
import { chatBody, CONTINUES } from './request.js';

/** The ids of the panes that run. */
export const running = createStore(new Map());

const mark = (paneId, stop) => running.set((was) => {
  const next = new Map(was);
  if (stop) next.set(paneId, stop); else next.delete(paneId);
  return next;
});

/** Stops a pane; what it has written stays. */
export const stop = (paneId) => running.get().get(paneId)?.abort();
export const stopAll = () => { for (const each of running.get().values()) each.abort(); };

/** Answers the conversation of a pane as it is now. */
export async function run(paneId) {
  if (running.get().has(paneId)) return;
  const pane = paneOf(paneId);
  const id = newId();
  append(paneId, { id, role: 'assistant', text: '', reasoning: '', calls: [], model: pane.model, state: 'streaming' });
  await write(pane, id, (answer, signal) => (isAgent(pane.model) ? askAgent(pane, answer, signal) : askModel(pane, answer, signal)));
}

/** Continues the last answer of a pane where it ends. A model that cannot do that is asked to continue. */
export async function continueLast(paneId) {
  if (running.get().has(paneId)) return;
  const pane = paneOf(paneId);
  const last = pane.messages.at(-1);
  const { state, finish, figures } = last;
  changeMessage(paneId, last.id, { state: 'streaming', finish: null, error: null, figures: null });
  const refused = await write(pane, last.id, (answer, signal) => askModel(pane, answer, signal, { continues: true }),
    ({ param }) => param === CONTINUES);
  if (!refused) return;
  changeMessage(paneId, last.id, { state, finish, figures });
  append(paneId, userMessage('Continue where you stopped.'));
  await run(paneId);
}

/** Lets `ask` write the message with this id. Returns whether the host refused it with an error that `expects` names. */
async function write(pane, id, ask, expects = () => false) {
  const { id: paneId } = pane;
  const control = new AbortController();
  mark(paneId, control);
  const answer = liveMessage(paneId, id);
  try {
    await ask(answer, control.signal);
    answer.set({ state: answer.get().error ? 'failed' : 'done' });
    return false;
  } catch (error) {
    if (control.signal.aborted) answer.set({ state: 'stopped' });
    else if (expects(error)) return true;
    else answer.set({ state: 'failed', error: plainError(error) });
    return false;
  } finally {
    answer.measure();
    answer.flush();
    mark(paneId, null);
  }
}

const plainError = ({ message, hint = null, code = null, status = 0 }) => ({ message: String(message), hint, code, status });

/** An answer that grows. Changes are gathered and shown once a frame, or every 250 ms while the window is hidden. */
function liveMessage(paneId, id) {
  const began = performance.now();
  let draft = { ...messageOf(paneId, id) };
  let pending = 0;
  let firstAt = null;
  let lastAt = null;
  const flush = () => { pending = 0; const { id: _, role: __, ...part } = draft; changeMessage(paneId, id, part); };
  const soon = () => {
    if (pending) return;
    pending = 1;
    // The end of the answer shows at once what was still to be shown, and after it a person may have changed the message.
    const later = () => { if (pending) flush(); };
    if (document.hidden) setTimeout(later, 250); else requestAnimationFrame(later);
  };
  return {
    get: () => draft,
    set(part) { draft = { ...draft, ...part }; soon(); },
    /** Notes that a token came. */
    came() { lastAt = performance.now(); firstAt ??= lastAt; },
    flush,
    measure() {
      const figures = { ...draft.figures, total_ms: performance.now() - began };
      if (firstAt !== null) figures.first_token_ms ??= firstAt - began;
      const { usage, generated } = figures;
      const written = usage?.completion_tokens;
      if (generated) { if (generated.tokens && generated.ms > 0) figures.tokens_s = generated.tokens / (generated.ms / 1000); }
      else if (written > 1 && lastAt > firstAt) figures.tokens_s = (written - 1) / ((lastAt - firstAt) / 1000);
      draft = { ...draft, figures };
    },
  };
}

async function askModel(pane, answer, signal, { continues = false } = {}) {
  const { body, error } = chatBody(playground.get(), pane, { continues });
  if (error) throw new ApiError(0, 'not_sent', error);
  await api.stream('/v1/chat/completions', {
    body, signal,
    onOpen: (response) => { const ignored = response.headers.get('x-skep-ignored'); if (ignored) answer.set({ ignored }); },
    onEvent({ data }) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) { answer.set({ error: plainError(errorOf(chunk)) }); return; }
      if (chunk.usage) answer.set({ figures: { ...answer.get().figures, usage: chunk.usage } });
      const choice = chunk.choices?.[0];
      if (choice) takeDelta(choice, answer);
    },
  });
}

function takeDelta({ delta = {}, finish_reason: finish }, answer) {
  const was = answer.get();
  const part = {};
  if (delta.content) part.text = was.text + delta.content;
  if (delta.reasoning_content) part.reasoning = was.reasoning + delta.reasoning_content;
  if (delta.tool_calls?.length) {
    part.calls = [...was.calls];
    for (const { index, id, function: called } of delta.tool_calls) {
      const old = part.calls[index] ?? { id: null, name: '', text: '' };
      part.calls[index] = { ...old, id: id ?? old.id, name: called?.name ?? old.name, text: old.text + (called?.arguments ?? '') };
    }
  }
  if (finish) part.finish = finish;
  if (part.text !== undefined || part.reasoning !== undefined || part.calls) answer.came();
  if (Object.keys(part).length) answer.set(part);
}

async function askAgent(pane, answer, signal) {
  const agent = pane.model.slice('agent:'.length);
  const said = pane.messages.findLast(({ role }) => role === 'user');
  const path = url`/v1/agents/${agent}/sessions/${pane.session}/messages`;
  let isOver = false;
  await api.stream(path, {
    body: { text: said?.text ?? '' }, signal,
    onEvent({ event, data }) {
      const takes = AGENT_EVENTS[event];
      if (takes) takes(JSON.parse(data), answer, answer.get());
      if (event === 'done' || event === 'error') isOver = true;
    },
  });
  if (!isOver && !signal.aborted) throw new ApiError(0, 'stream_cut', 'The stream ended before the turn did.', { hint: 'Open the session to see how the turn ended.' });
  changePane(pane.id, { hasTurns: true });
}

const changeCall = (calls, id, part) => calls.map((call) => (call.id === id ? { ...call, ...part } : call));

const AGENT_EVENTS = {
  turn: ({ turn_id: turn }, answer) => answer.set({ turn }),
  delta({ text }, answer, was) { answer.came(); answer.set({ text: was.text + text }); },
  thinking({ text }, answer, was) { answer.came(); answer.set({ reasoning: was.reasoning + text }); },
  tool_call: ({ id, name, arguments: given }, answer, was) =>
    answer.set({ calls: [...was.calls.filter((call) => call.id !== id), { id, name, text: JSON.stringify(given), byAgent: true }] }),
  tool_result: ({ id, result, error }, answer, was) =>
    answer.set({ calls: changeCall(was.calls, id, error === undefined ? { result: JSON.stringify(result) } : { failure: error }) }),
  approval_required({ id, tool, arguments: given, expires_at_ms: expires }, answer, was) {
    const approval = { id, expires };
    const open = was.calls.findLast((call) => call.name === tool && call.result === undefined && !call.failure && !call.approval);
    answer.set({ calls: open ? changeCall(was.calls, open.id, { approval })
      : [...was.calls, { id, name: tool, text: JSON.stringify(given), byAgent: true, approval }] });
  },
  approval_decided: ({ id, decision, reason }, answer, was) => answer.set({
    calls: was.calls.map((call) => (call.approval?.id === id ? { ...call, approval: { ...call.approval, decision, reason } } : call)),
  }),
  model_chosen: ({ model }, answer) => answer.set({ chosen: model }),
  model_changed: ({ to }, answer) => answer.set({ chosen: to }),
  generation_restarted: (_, answer) => answer.set({ text: '', reasoning: '' }),
  // A turn may have several generations, with tools and people between them, so the speed is that of the generations alone.
  usage({ usage, timing }, answer, was) {
    const { tokens = 0, ms = 0 } = was.figures?.generated ?? {};
    const generated = { tokens: tokens + Math.max(0, usage.completion_tokens - 1), ms: ms + timing.total_ms - timing.first_token_ms };
    answer.set({ figures: { ...was.figures, usage, generated } });
  },
  done({ text, data, usage, timing }, answer, was) {
    answer.set({
      text: text || was.text, data: data ?? null, finish: 'stop',
      figures: { ...was.figures, usage, ...(timing.first_token_ms === null ? {} : { first_token_ms: timing.first_token_ms }) },
    });
  },
  error: (body, answer) => answer.set({ error: plainError(errorOf(body)) }),
};
