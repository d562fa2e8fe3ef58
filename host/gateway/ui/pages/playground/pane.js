// One conversation with one model or agent.
import { html, useEffect, useLayoutEffect, useRef, useState } from '../../lib/html.js';
import { Link, paths } from '../../lib/router.js';
import { Badge, Button, Empty, StateBadge } from '../../parts/index.js';
import { MessageItem } from './message.js';
import { continueLast, run, running, stop } from './run.js';
import { changePane, chooseModel, isAgent, newSession } from './state.js';

export function Pane({ pane, models, caller, plain, onClose, isOnly }) {
  const busy = running.use().has(pane.id);
  const agent = isAgent(pane.model);
  const model = models.find(({ id }) => id === pane.model);
  const last = pane.messages.at(-1);
  const [edited, setEdited] = useState([]);
  const edit = (messageId, isEdited) => setEdited((was) => [...was.filter((id) => id !== messageId), ...(isEdited ? [messageId] : [])]);
  // A message that did not change keeps this function of an older drawing, so it works on the conversation as it is now.
  const runFrom = (message) => {
    if (running.get().has(pane.id)) return;
    changePane(pane.id, ({ messages }) => {
      const at = messages.findIndex(({ id }) => id === message.id);
      return { messages: messages.slice(0, message.role === 'user' ? at + 1 : at) };
    });
    run(pane.id);
  };
  const canContinue = !busy && !agent && !edited.includes(last?.id) && last?.role === 'assistant' && (last.state === 'stopped' || last.finish === 'length') && !last.calls?.length;
  return html`<section class="pane" aria-label=${isOnly ? 'Conversation' : onClose ? 'Right conversation' : 'Left conversation'}>
    <header class="pane-head">
      <${ModelSelect} models=${models} value=${pane.model} disabled=${busy} onSelect=${(id) => chooseModel(pane.id, id)} label=${isOnly ? 'Model or agent' : `Model or agent of the ${onClose ? 'right' : 'left'} side`} />
      ${model?.skep?.state && model.skep.state !== 'loaded' && html`<${StateBadge} state=${model.skep.state} />`}
      ${model?.skep?.quantization && html`<span class="optional-wide"><${Badge} title="Format of most of the weights">${model.skep.quantization}<//></span>`}
      ${agent && html`<${Badge} title="The agent’s session of this conversation">${pane.session}<//>
        ${pane.hasTurns && html`<${Link} href=${paths.session(pane.model.slice(6), pane.session)}>Open the session<//>`}`}
      <span class="grow"></span>
      ${agent && pane.messages.length > 0 && !busy && html`<${Button} kind="quiet" small onClick=${() => changePane(pane.id, { messages: [], session: newSession(), hasTurns: false })}>New session<//>`}
      ${onClose && html`<${Button} kind="quiet" small icon="close" label="Close this side" onClick=${onClose} />`}
    </header>
    <${Scroller} length=${pane.messages.length} version=${pane.messages}>
      ${!pane.messages.length && html`<${Empty} icon="playground" title=${agent ? `Say something to ${pane.model.slice(6)}` : 'Ask something'}>
        ${agent ? model?.description || 'The agent keeps the conversation in a session of its own.' : 'Write a message below. The settings, the tools and the format of the answer are beside it.'}<//>`}
      ${pane.messages.map((message, n) => html`<${MessageItem} key=${message.id} ...${{ message, caller, plain, busy, paneId: pane.id, session: pane.session, editable: !agent, isLast: n === pane.messages.length - 1, isEdited: edited.includes(message.id), onEdit: edit, onRun: () => run(pane.id), onRunFrom: runFrom }} />`)}
      ${canContinue && html`<div class="row pane-next"><${Button} icon="play" onClick=${() => continueLast(pane.id)}>Continue<//></div>`}
      ${!busy && last?.role === 'user' && pane.messages.length > 0 && html`<div class="row pane-next"><${Button} icon="play" onClick=${() => run(pane.id)}>Answer<//></div>`}
    <//>
    <div class="sr-only" role="status" aria-live="polite">${busy ? 'The answer is being written.' : last?.role === 'assistant' && last.state === 'done' ? `The answer is complete: ${last.text.slice(0, 300)}` : ''}</div>
    ${busy && !isOnly && html`<div class="pane-stop"><${Button} small icon="stop" onClick=${() => stop(pane.id)}>Stop this side<//></div>`}
  </section>`;
}

function ModelSelect({ models, value, onSelect, disabled, label }) {
  const own = models.filter(({ id }) => !isAgent(id));
  const agents = models.filter(({ id }) => isAgent(id));
  const isKnown = models.some(({ id }) => id === value);
  return html`<select class="model-select" aria-label=${label} value=${value ?? ''} disabled=${disabled || !models.length} onChange=${(event) => onSelect(event.currentTarget.value)}>
    ${!isKnown && html`<option value=${value ?? ''}>${value ?? 'No model'}</option>`}
    ${own.length > 0 && html`<optgroup label="Models">${own.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</optgroup>`}
    ${agents.length > 0 && html`<optgroup label="Agents">${agents.map(({ id }) => html`<option key=${id} value=${id}>${id.slice(6)}</option>`)}</optgroup>`}
  </select>`;
}

/** Scrolls with what is written, unless one has scrolled up. */
function Scroller({ version, length, children }) {
  const box = useRef();
  const isAtEnd = useRef(true);
  const [isAway, setAway] = useState(false);
  const look = () => {
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    isAtEnd.current = scrollTop + clientHeight >= scrollHeight - 48;
    setAway(!isAtEnd.current);
  };
  const toEnd = () => { box.current.scrollTop = box.current.scrollHeight; };
  useEffect(() => { isAtEnd.current = true; toEnd(); }, [length]);
  useLayoutEffect(() => { if (isAtEnd.current) toEnd(); }, [version]);
  return html`<div class="pane-body"><div class="pane-scroll" ref=${box} onScroll=${look} tabindex="0" role="log" aria-live="off" aria-label="Messages">${children}</div>
    ${isAway && html`<div class="to-end"><${Button} small icon="down" onClick=${toEnd}>Latest<//></div>`}</div>`;
}
