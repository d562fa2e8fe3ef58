// A turn as it happens: its events gathered into text, reasoning, calls and approvals, and how they look.
import { api, errorOf, url } from '../lib/api.js';
import { useStream } from '../lib/hooks.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { Markdown } from '../lib/markdown.js';
import { Badge, Note } from './basics.js';
import { Call, Reasoning } from './message.js';
import { ApprovalCard } from './approval.js';

const FLUSH_MS = 40;
const nothing = () => ({ parts: [], usage: [], from: 0, turn: null, end: null, done: null, error: null });

/**
 * Follows a turn to its end: `{parts, usage, turn, end: null | 'done' | 'error', done, error, status}`. A turn that has ended answers with what is stored.
 * `turn` null follows nothing.
 */
export function useTurnFeed(agent, session, turn, { onEnd } = {}) {
  const feed = useRef(nothing());
  const [shown, show] = useState(feed.current);
  const timer = useRef(null);
  const path = turn ? url`/v1/agents/${agent}/sessions/${session}/turns/${turn}/events` : null;
  const flush = () => { timer.current = null; show({ ...feed.current, parts: [...feed.current.parts] }); };
  useEffect(() => {
    feed.current = nothing();
    show(feed.current);
    return () => { clearTimeout(timer.current); timer.current = null; };
  }, [path]);
  const status = useStream(path, {
    onEvent: ({ event, data }) => {
      take(feed.current, event, JSON.parse(data));
      if (feed.current.end) { clearTimeout(timer.current); flush(); onEnd?.(feed.current); return true; }
      timer.current ??= setTimeout(flush, FLUSH_MS);
      return false;
    },
  });
  return { ...shown, status };
}

function take(feed, event, data) {
  const { parts } = feed;
  const last = parts.at(-1);
  switch (event) {
    case 'turn': feed.turn = data.turn; break;
    case 'delta': case 'thinking': {
      const kind = event === 'delta' ? 'text' : 'thinking';
      if (last?.kind === kind) parts[parts.length - 1] = { ...last, text: last.text + data.text };
      else parts.push({ kind, text: data.text });
      break;
    }
    case 'tool_call': parts.push({ kind: 'call', ...data }); break;
    case 'tool_result': {
      const at = parts.findIndex(({ kind, id }) => kind === 'call' && id === data.id);
      const ended = { hasResult: data.error === undefined, isOver: true, result: data.result, error: data.error };
      if (at >= 0) parts[at] = { ...parts[at], ...ended }; else parts.push({ kind: 'call', arguments: null, ...data, ...ended });
      feed.from = parts.length;
      break;
    }
    case 'approval_required': parts.push({ kind: 'approval', ...data }); break;
    case 'approval_decided': {
      const at = parts.findIndex(({ kind, id }) => kind === 'approval' && id === data.id);
      if (at >= 0) parts[at] = { ...parts[at], decision: data.decision, reason: data.reason };
      break;
    }
    case 'model_changed': parts.push({ kind: 'note', text: `The conversation ${data.conversation} continues with ${data.to} instead of ${data.from}.` }); break;
    case 'model_chosen': parts.push({ kind: 'note', text: `${data.model} answers${data.attempts > 1 ? `, after ${data.attempts - 1} other ${data.attempts === 2 ? 'model' : 'models'} failed` : ''}.` }); break;
    case 'generation_restarted': parts.length = Math.min(feed.from, parts.length); parts.push({ kind: 'note', text: 'The answer was cut off, and begins again.' }); break;
    case 'usage': feed.usage.push(data); feed.from = parts.length; break;
    case 'done': feed.end = 'done'; feed.done = data; if (!parts.some(({ kind }) => kind === 'text') && data.text) parts.push({ kind: 'text', text: data.text }); break;
    case 'error': feed.end = 'error'; feed.error = errorOf(data); break;
    default:
  }
}

/** The call that waits for a person, or undefined. */
export const openApproval = (feed) => (feed.end ? undefined : feed.parts.find(({ kind, decision }) => kind === 'approval' && !decision));

/** Draws what a turn said and did. Arguments are unfolded as far as on the card of an approval, which leaves them out if they are above it. */
export function TurnOutput({ feed, caller }) {
  const last = feed.parts.length - 1;
  return html`<div class="turn-output">${feed.parts.map((part, n) => {
    if (part.kind === 'text') return html`<${Markdown} key=${n} text=${part.text} class=${!feed.end && n === last ? 'growing' : ''} />`;
    if (part.kind === 'thinking') return html`<${Reasoning} key=${n} text=${part.text} isOpen=${!feed.end && n === last} words=${!feed.end && n === last ? 'Thinking…' : 'Reasoning'} />`;
    if (part.kind === 'call') return html`<${Call} key=${n} name=${part.name} args=${part.arguments} argsOpen=${2} result=${part.result} error=${part.error} hasResult=${part.hasResult} waiting=${!part.isOver && !feed.end && (openApproval(feed) ? 'waits for a decision' : 'runs')} />`;
    if (part.kind === 'approval') return html`<${ApprovalPart} key=${n} part=${part} isOver=${!!feed.end} caller=${caller} isShown=${feed.parts.slice(0, n).some((call) => call.kind === 'call' && !call.isOver && call.name === part.tool && JSON.stringify(call.arguments) === JSON.stringify(part.arguments))} />`;
    return html`<${Note} key=${n}>${part.text}<//>`;
  })}</div>`;
}

/** The reason of a refusal is the sentence that the agent reads, with the words of the person in it. `isShown`: the call is above it, with its arguments. */
function ApprovalPart({ part, isOver, caller, isShown }) {
  const { id, tool, arguments: args, expires_at_ms: until, decision, reason } = part;
  if (!decision && !isOver) return html`<${ApprovalCard} approval=${{ id, tool, arguments: args, expires_at_ms: until }} caller=${caller} isShown=${isShown} />`;
  return html`<div class="decided"><${Badge} tone=${decision === 'approve' ? 'ok' : 'bad'} dot>${decision === 'approve' ? 'Approved' : decision === 'deny' ? 'Denied' : 'Not decided'}<//>
    <code>${tool}</code>${reason && html`<span class="muted">${decision === 'approve' ? `“${reason}”` : reason}</span>`}</div>`;
}

/** The name under which this browser keeps what it sent, until the turn is among the messages. */
export const sentKey = (turn) => `sent-${turn}`;

/** The state of a turn for people: one that somebody cancelled has not failed by itself, and one that waits for a person does not compute. */
export function stateOf(state, code, feed) {
  if (state === 'failed' && code === 'cancelled') return 'cancelled';
  return state === 'running' && feed && openApproval(feed) ? 'asking' : state;
}

/** Asks the host to stop a turn. */
export const cancelTurn = (agent, session, turn) => api.del(url`/v1/agents/${agent}/sessions/${session}/turns/${turn}`);
