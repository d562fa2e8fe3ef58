// The playground: one or two conversations with models or agents, and everything that a request can hold.
import { api } from '../lib/api.js';
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { useMedia, usePolled } from '../lib/hooks.js';
import { usePageKeys } from '../lib/keys.js';
import { setQuery } from '../lib/router.js';
import { Button, CodeTabs, Dialog, ErrorNote, Page, Toggle } from '../parts/index.js';
import { Options } from './playground/options.js';
import { Pane } from './playground/pane.js';
import { run, running, stopAll } from './playground/run.js';
import { samples } from './playground/samples.js';
import { append, calm, change, chooseModel, clearAll, isAgent, newId, newPane, playground, userMessage } from './playground/state.js';

export default function Playground({ caller, query }) {
  const state = playground.use();
  const catalog = usePolled((signal) => api.get('/v1/models', { signal }), [], { everyMs: 15_000 });
  const models = catalog.data?.data ?? [];
  const [showsCode, showCode] = useState(false);
  const [showsOptions, showOptions] = useState(false);
  const isNarrow = useMedia('(max-width: 1080px)');
  useChoice(models, query);
  const actions = useMemo(() => ({
    clear: () => { stopAll(); clearAll(); document.getElementById('composer')?.focus(); },
    compare: () => change(({ panes }) => ({ panes: panes.length > 1 ? panes.slice(0, 1) : [...panes, { ...panes[0], ...newPane(otherModel(models, panes[0].model)), messages: copyOf(panes[0]) }] })),
  }), [models]);
  usePageKeys(useMemo(() => [
    { keys: 'n', does: 'New conversation', run: actions.clear },
    { keys: 'c', does: 'Show as code', run: () => showCode(true) },
    { keys: 'i', does: 'Write a message', run: () => document.getElementById('composer')?.focus() },
    { keys: 'Enter', does: 'Send; Shift Enter begins a line' },
  ], [actions]));
  const first = models.find(({ id }) => id === state.panes[0].model);
  const options = html`<${Options} state=${state} defaults=${first?.skep?.sampling} onlyAgents=${state.panes.every(({ model }) => isAgent(model))} />`;
  return html`<${Page} title="Playground" fill actions=${html`
      <${Toggle} label="Two models" checked=${state.panes.length > 1} onChange=${actions.compare} />
      <${Button} class="slim" icon="code" onClick=${() => showCode(true)} disabled=${!state.panes[0].model}>Code<//>
      ${isNarrow && html`<${Button} icon="columns" aria-expanded=${showsOptions ? 'true' : 'false'} onClick=${() => showOptions(true)}>Options<//>`}
      <${Button} class="slim" icon="plus" onClick=${actions.clear}>New<//>`}>
    <div class="playground">
      <div class="talk">
        <${ErrorNote} error=${catalog.error} onRetry=${catalog.reload} />
        <div class=${state.panes.length > 1 ? 'panes two' : 'panes'}>${state.panes.map((pane, n) => html`<${Pane} key=${pane.id} ...${{ pane, models, caller, plain: state.plain, isOnly: state.panes.length === 1 }}
          onClose=${n > 0 ? () => change(({ panes }) => ({ panes: panes.filter(({ id }) => id !== pane.id) })) : null} />`)}</div>
        <${Composer} state=${state} ready=${models.length > 0} error=${catalog.error} />
      </div>
      ${!isNarrow && html`<aside class="playground-side" aria-label="Options">${options}</aside>`}
    </div>
    ${isNarrow && showsOptions && html`<${Dialog} title="Options" onClose=${() => showOptions(false)}>${options}<//>`}
    ${showsCode && html`<${CodeDialog} state=${state} caller=${caller} onClose=${() => showCode(false)} />`}
  <//>`;
}

const copyOf = (pane) => (isAgent(pane.model) ? [] : pane.messages.map((message) => ({ ...calm(message), id: newId() })));
const otherModel = (models, model) => (models.find(({ id }) => id !== model && !isAgent(id)) ?? models[0])?.id ?? model;

/** Chooses a model for panes that have none, and the one that the address asks for (`?model=`), before a person can choose another one. */
function useChoice(models, query) {
  useLayoutEffect(() => {
    if (!models.length) return;
    const standard = (models.find(({ skep }) => skep?.is_default) ?? models[0]).id;
    const { panes } = playground.get();
    for (const pane of panes) if (!pane.model) chooseModel(pane.id, standard);
    if (query.model) { chooseModel(panes[0].id, query.model); setQuery({ model: null }); }
  }, [models.length, query.model]);
}

/** The field in which messages are written. One message goes to every side. */
function Composer({ state, ready, error }) {
  const area = useRef();
  const busy = running.use().size > 0;
  const [role, setRole] = useState('user');
  const { draft, panes } = state;
  const onlyModels = panes.every(({ model }) => !isAgent(model));
  useLayoutEffect(() => {
    area.current.style.height = 'auto';
    area.current.style.height = `${Math.min(area.current.scrollHeight + 2, innerHeight * 0.4)}px`;
  }, [draft]);
  useEffect(() => { if (matchMedia('(min-width: 861px)').matches) area.current.focus(); }, []);
  const send = () => {
    if (busy || !draft.trim()) return;
    change({ draft: '' });
    for (const pane of panes) append(pane.id, { ...userMessage(draft), role: onlyModels ? role : 'user' });
    if (role === 'user' || !onlyModels) for (const pane of panes) run(pane.id);
  };
  const key = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === 'Escape' && busy) stopAll();
  };
  return html`<form class="chat-composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <textarea id="composer" ref=${area} rows="1" aria-label="Message" value=${draft} onKeyDown=${key} onInput=${(event) => change({ draft: event.currentTarget.value })}
      placeholder=${ready ? `Message ${[...new Set(panes.map(({ model }) => (model ?? '').replace(/^agent:/, '')))].filter(Boolean).join(' and ')}` : error ? 'The models could not be loaded' : 'Loading the models…'} />
    <div class="chat-composer-foot">
      ${onlyModels && html`<div class="segments" role="radiogroup" aria-label="Role of the message">${[['user', 'User'], ['assistant', 'Assistant']].map(([id, label]) => html`
        <label key=${id} title=${id === 'user' ? 'Send it and let the model answer' : 'Add it as if the model had written it'}><input class="sr-only" type="radio" name="role" checked=${role === id} onChange=${() => setRole(id)} /><span>${label}</span></label>`)}</div>`}
      <span class="optional-wide"><${Toggle} label="Markdown" checked=${!state.plain} onChange=${(on) => change({ plain: !on })} /></span>
      <span class="grow"></span>
      <span class="muted small optional-wide">Enter sends</span>
      ${busy ? html`<${Button} icon="stop" onClick=${stopAll}>Stop<//>` : html`<${Button} kind="primary" type="submit" icon=${role === 'user' || !onlyModels ? 'up' : 'plus'} disabled=${!draft.trim() || !ready}>${role === 'user' || !onlyModels ? 'Send' : 'Add'}<//>`}
    </div>
  </form>`;
}

function CodeDialog({ state, caller, onClose }) {
  const [side, choose] = useState(0);
  const pane = state.panes[side] ?? state.panes[0];
  const all = samples(state, pane, caller.keys_required);
  return html`<${Dialog} title="This request as code" wide onClose=${onClose}>
    ${state.panes.length > 1 && html`<div class="segments" role="radiogroup" aria-label="Side">${state.panes.map(({ id, model }, n) => html`
      <label key=${id}><input class="sr-only" type="radio" name="side" checked=${side === n} onChange=${() => choose(n)} /><span>${model}</span></label>`)}</div>`}
    <p class="muted">What the console does goes through the same HTTP API. ${caller.keys_required ? 'Put your key into the environment variable SKEP_API_KEY.' : 'This host asks for no key.'}</p>
    <${CodeTabs} samples=${all} />
  <//>`;
}
