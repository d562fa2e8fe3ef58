// One message of a conversation: its text, the reasoning before it, the calls in it, and its figures.
import { api, url } from '../../lib/api.js';
import { may } from '../../lib/caller.js';
import { decimal, duration, number } from '../../lib/format.js';
import { Component, html, cx, useEffect, useRef, useState } from '../../lib/html.js';
import { useAction } from '../../lib/hooks.js';
import { Markdown } from '../../lib/markdown.js';
import { Link, paths } from '../../lib/router.js';
import { Badge, Button, Code, Copy, ErrorNote, Field, Icon } from '../../parts/index.js';
import { changeMessage, isAgent, removeMessage } from './state.js';

/** Draws a message only when something of it changed, because a stream changes one of them each frame. */
export class MessageItem extends Component {
  shouldComponentUpdate(next) {
    const { props } = this;
    return ['message', 'isLast', 'isEdited', 'busy', 'editable', 'plain', 'session'].some((name) => next[name] !== props[name]);
  }

  render(props) {
    return html`<${Message} ...${props} />`;
  }
}

const WHO = { user: 'You', system: 'System', assistant: 'Assistant' };

function Message({ message, paneId, isLast, isEdited, busy, editable, plain, session, caller, onEdit, onRun, onRunFrom }) {
  const edit = (isOn) => onEdit(message.id, isOn);
  const { role, text, state } = message;
  const isStreaming = state === 'streaming';
  const who = role === 'assistant' && message.model ? message.model.replace(/^agent:/, '') : WHO[role];
  // An agent calls its tools before it answers; a model's calls are the end of its answer.
  const calls = (byAgent) => message.calls?.filter((call) => !!call.byAgent === byAgent).map((call) => html`<${Call} key=${call.id} ...${{ call, paneId, message, caller, busy }} />`);
  return html`<article class=${cx('chat-message', role)} aria-label=${`${who}: message`} aria-busy=${isStreaming ? 'true' : undefined}>
    <header class="chat-message-head">
      <span class="chat-message-who">${who}</span>
      ${state === 'stopped' && html`<${Badge} tone="warn">Stopped<//>`}
      ${message.finish === 'length' && html`<${Badge} tone="warn" title="The limit of tokens was reached">Cut at the limit<//>`}
      ${message.chosen && html`<${Badge} title="The model that a route chose">${message.chosen}<//>`}
      <span class="chat-message-tools">
        ${!isStreaming && html`<${Copy} text=${text} label="Copy the message" />`}
        ${editable && !busy && html`<${Button} kind="quiet" small icon="edit" label="Edit the message" onClick=${() => edit(true)} />
          <${Button} kind="quiet" small icon="retry" label=${role === 'user' ? 'Answer again from here' : 'Write this answer again'} onClick=${() => onRunFrom(message)} />
          <${Button} kind="quiet" small icon="trash" label="Delete the message" onClick=${() => removeMessage(paneId, message.id)} />`}
      </span>
    </header>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} live=${isStreaming && !text} />`}
    ${calls(true)}
    ${isEdited ? html`<${Editor} text=${text} onClose=${() => edit(false)} onSave=${(changed) => { changeMessage(paneId, message.id, { text: changed }); edit(false); }} />`
      : html`<${Text} ...${{ text, role, plain, isStreaming, message }} />`}
    ${calls(false)}
    ${message.calls?.some(({ byAgent }) => !byAgent) && isLast && !busy && html`<div class="row"><${Button} kind="primary" icon="play" onClick=${onRun}
        disabled=${message.calls.some(({ result }) => !result?.trim())}>Send the results<//><span class="muted small">The model continues with them.</span></div>`}
    ${message.data !== undefined && message.data !== null && html`<${Code} text=${JSON.stringify(message.data, null, 2)} lang="json" label="Data of the answer" />`}
    <${ErrorNote} error=${message.error} onRetry=${isLast && !busy ? () => onRunFrom(message) : undefined} />
    ${message.ignored && html`<p class="muted small">The host ignored: ${message.ignored}</p>`}
    ${role === 'assistant' && !isStreaming && html`<${Figures} message=${message} session=${session} />`}
  </article>`;
}

function Text({ text, role, plain, isStreaming, message }) {
  if (!text) return isStreaming && !message.calls?.length ? html`<p class="chat-waiting" role="status"><span class="sr-only">Waiting for the first token</span><i></i><i></i><i></i></p>` : null;
  if (role !== 'assistant' || plain) return html`<div class="chat-message-text pre">${text}</div>`;
  const json = !isStreaming && asJson(text);
  if (json) return html`<${Code} text=${json} lang="json" />`;
  return html`<${Markdown} class="chat-message-text" text=${text} />`;
}

function asJson(text) {
  if (!/^\s*[{[]/.test(text) || text.length > 100_000) return null;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return null; }
}

/** The reasoning, folded once the answer begins. */
function Reasoning({ text, live }) {
  const [choice, choose] = useState(null);
  const isOpen = choice ?? live;
  return html`<div class="chat-reasoning"><button type="button" class="chat-reasoning-fold" aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => choose(!isOpen)}>
    <${Icon} name=${isOpen ? 'down' : 'right'} size=${12} />${live ? 'Reasoning…' : 'Reasoning'}<span class="muted">${number(text.split(/\s+/).filter(Boolean).length)} words</span></button>
    ${isOpen && html`<div class="chat-reasoning-text pre">${text}</div>`}</div>`;
}

function Editor({ text, onSave, onClose }) {
  const [draft, set] = useState(text);
  const area = useRef();
  useEffect(() => { area.current.focus(); }, []);
  const key = (event) => {
    if (event.key === 'Escape') onClose();
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) onSave(draft);
  };
  return html`<div class="stack tight"><textarea ref=${area} class="grows" aria-label="Text of the message" value=${draft} onInput=${(event) => set(event.currentTarget.value)} onKeyDown=${key} />
    <div class="row"><${Button} small kind="primary" onClick=${() => onSave(draft)}>Save<//><${Button} small onClick=${onClose}>Cancel<//></div></div>`;
}

function Call({ call, paneId, message, caller, busy }) {
  const set = (result) => changeMessage(paneId, message.id, ({ calls }) => ({ calls: calls.map((each) => (each.id === call.id ? { ...each, result } : each)) }));
  const result = call.byAgent && call.result !== undefined ? pretty(call.result) : null;
  return html`<div class="chat-call" role="group" aria-label=${`Call of ${call.name}`}>
    <header class="chat-call-head"><${Icon} name="tool" size=${14} /><code>${call.name}</code>${call.failure && html`<${Badge} tone="bad">Failed<//>`}</header>
    <${Code} text=${pretty(call.text)} label="Arguments of the call" />
    ${call.approval && html`<${Approval} approval=${call.approval} caller=${caller} />`}
    ${call.byAgent ? html`${result !== null && html`<p class="muted small">Result</p><${Code} text=${result} label="Result of the call" />`}${call.failure && html`<p class="chat-call-failure pre">${call.failure}</p>`}`
      : html`<${Field} label=${`Result of ${call.name}`}>${(id) => html`<textarea id=${id} class="mono" rows="2" disabled=${busy} placeholder=${'Type what the tool answers, for example {"degrees": 21}'} value=${call.result ?? ''} onInput=${(event) => set(event.currentTarget.value)} />`}<//>`}
  </div>`;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** A call that waits for a person, with the buttons that decide if the key may. */
function Approval({ approval, caller }) {
  const [reason, setReason] = useState('');
  const [decide, { busy, error }] = useAction((decision) => api.post(url`/v1/approvals/${approval.id}`, { decision, reason: reason.trim() || null }));
  if (approval.decision) return html`<p><${Badge} tone=${approval.decision === 'approve' ? 'ok' : 'bad'}>${approval.decision === 'approve' ? 'Approved' : 'Denied'}<//> ${approval.reason ?? ''}</p>`;
  return html`<div class="note warn"><${Icon} name="clock" /><div class="note-body stack tight"><p><strong>This call waits for a decision.</strong>${may(caller, 'admin') ? '' : ' An operator decides in the inbox.'}</p>
    ${may(caller, 'admin') && html`<${Field} label="Reason, which the model reads">${(id) => html`<input id=${id} value=${reason} onInput=${(event) => setReason(event.currentTarget.value)} />`}<//>
      <div class="row"><${Button} small kind="primary" icon="check" busy=${busy} onClick=${() => decide('approve')}>Approve<//><${Button} small icon="close" busy=${busy} onClick=${() => decide('deny')}>Deny<//></div>`}
    <${ErrorNote} error=${error} /></div></div>`;
}

/** The figures of the answer. */
function Figures({ message, session }) {
  const { usage, first_token_ms: first, tokens_s: speed, total_ms: total } = message.figures ?? {};
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const reasoning = usage?.completion_tokens_details?.reasoning_tokens;
  const takenBack = usage?.completion_tokens_details?.taken_back_tokens;
  const all = [
    usage && ['in', `${number(usage.prompt_tokens)}`, 'Tokens of the prompt'],
    cached !== undefined && ['cached', number(cached), 'Tokens of the prompt that did not have to be computed'],
    usage && ['out', number(usage.completion_tokens), 'Tokens that were generated'],
    reasoning > 0 && ['reasoning', number(reasoning), 'Generated tokens of the reasoning'],
    takenBack > 0 && ['taken back', number(takenBack), 'Tokens that were rolled back because a value did not satisfy its schema'],
    first !== undefined && ['first token', duration(first), 'Time until the first token'],
    speed !== undefined && ['tokens/s', decimal(speed), 'Tokens a second after the first one'],
    total !== undefined && ['total', duration(total), 'Time of the whole answer'],
  ].filter(Boolean);
  const agent = isAgent(message.model) && message.turn && message.model.slice('agent:'.length);
  if (!all.length && !agent) return null;
  return html`<footer class="chat-figures">${all.map(([label, value, about]) => html`<span key=${label} title=${about}><b>${value}</b> ${label}</span>`)}
    ${agent && html`<${Link} href=${paths.turn(agent, session, message.turn)}>Timeline of the turn<//>`}</footer>`;
}
