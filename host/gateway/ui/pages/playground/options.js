// The column beside the conversation: settings, tools, and the format of the answer.
import { html, useState } from '../../lib/html.js';
import { Badge, Button, Empty, Field, Note, Tabs, Toggle } from '../../parts/index.js';
import { EFFORTS, OPTIONS } from './request.js';
import { SchemaEditor } from './schema-editor.js';
import { change, newId } from './state.js';

const WEATHER = {
  type: 'object', additionalProperties: false, required: ['city'],
  properties: { city: { type: 'string', description: 'Name of a city' }, unit: { enum: ['celsius', 'fahrenheit'] } },
};
const PERSON = {
  type: 'object', additionalProperties: false, required: ['name', 'age', 'skills'],
  properties: { name: { type: 'string' }, age: { type: 'integer', minimum: 0, maximum: 130 }, skills: { type: 'array', items: { type: 'string' }, maxItems: 4 } },
};
const KINDS = [['text', 'Text'], ['json_schema', 'JSON Schema'], ['json_object', 'Any JSON object'], ['regex', 'Regular expression'], ['grammar', 'Grammar (Lark)']];

/** `defaults` are the sampling defaults of the first model, `onlyAgents` says that no model of the panes takes options. */
export function Options({ state, defaults, onlyAgents }) {
  const tools = state.tools.filter(({ on }) => on).length;
  const tabs = [
    { id: 'settings', label: 'Settings' },
    { id: 'tools', label: 'Tools', count: tools || null },
    { id: 'output', label: 'Output', count: state.output.kind === 'text' ? null : 1 },
  ];
  const Panel = { settings: Settings, tools: Tools, output: Output }[state.tab] ?? Settings;
  return html`<div class="options">
    ${onlyAgents && html`<${Note}>An agent decides itself how it uses its models. These options are for models.<//>`}
    <${Tabs} label="Options" tabs=${tabs} active=${state.tab} onSelect=${(tab) => change({ tab })}><${Panel} state=${state} defaults=${defaults} /><//>
  </div>`;
}

const setOption = (name, value) => change(({ options }) => ({ options: { ...options, [name]: value } }));

function Settings({ state, defaults }) {
  const { options } = state;
  const isSet = Object.values(options).some((value) => value !== undefined && value !== '');
  return html`<div class="stack">
    <${Field} label="System prompt">${(id) => html`<textarea id=${id} rows="4" value=${state.system} placeholder="What the model should know and do"
      onInput=${(event) => change({ system: event.currentTarget.value })} />`}<//>
    <div class="option-grid">${OPTIONS.map(({ name, label, about, min, max, step }) => html`<${Field} key=${name} label=${html`<span title=${about}>${label}</span>`}>
      ${(id) => html`<input id=${id} class="num" type="number" inputmode="decimal" title=${about} ...${{ min, max, step: step < 1 ? 'any' : step }} value=${options[name] ?? ''}
        placeholder=${defaults?.[name] ?? 'default'} onInput=${(event) => setOption(name, event.currentTarget.value)} />`}<//>`)}
      <${Field} label="Reasoning effort">${(id) => html`<select id=${id} value=${options.reasoning_effort ?? ''} onChange=${(event) => setOption('reasoning_effort', event.currentTarget.value)}>
        <option value="">default</option>${EFFORTS.map((effort) => html`<option key=${effort} value=${effort}>${effort}</option>`)}</select>`}<//>
    </div>
    <${Field} label="Stop texts" hint="One per line; the answer ends before the first that appears.">${(id, note) => html`<textarea id=${id} class="mono" aria-describedby=${note} rows="2" value=${options.stop ?? ''}
      onInput=${(event) => setOption('stop', event.currentTarget.value)} />`}<//>
    ${isSet && html`<div><${Button} small icon="retry" onClick=${() => change({ options: {} })}>Reset to the model’s defaults<//></div>`}
  </div>`;
}

const setTool = (id, part) => change(({ tools }) => ({ tools: tools.map((tool) => (tool.id === id ? { ...tool, ...part } : tool)) }));
const addTool = (tool) => change(({ tools }) => ({ tools: [...tools, { id: newId(), on: true, name: '', description: '', schema: '', ...tool }] }));
const addWeather = () => addTool({ name: 'get_weather', description: 'Returns the weather of a city.', schema: JSON.stringify(WEATHER, null, 2) });

function Tools({ state }) {
  const { tools, toolChoice, panes } = state;
  if (!tools.length) {
    return html`<${Empty} icon="tool" title="No tools yet" action=${html`<div class="row"><${Button} icon="plus" onClick=${() => addTool({ name: 'my_tool', schema: JSON.stringify({ type: 'object', properties: {} }, null, 2) })}>Add a tool<//>
        <${Button} kind="quiet" onClick=${addWeather}>Use an example<//></div>`}>
      Describe a tool with a JSON Schema. When the model calls it, its arguments are constrained to the schema; you type the result, and the model continues.<//>`;
  }
  const names = tools.filter(({ on }) => on).map(({ name }) => name);
  return html`<div class="stack">
    <${Field} label="Tool choice">${(id) => html`<select id=${id} value=${toolChoice} onChange=${(event) => change({ toolChoice: event.currentTarget.value })}>
      <option value="auto">The model decides</option><option value="required">Call at least one</option><option value="none">Call none</option>
      ${names.map((name) => html`<option key=${name} value=${`tool:${name}`}>Call ${name}</option>`)}</select>`}<//>
    ${tools.map((tool) => html`<${Tool} key=${tool.id} tool=${tool} model=${panes[0].model} />`)}
    <div class="row"><${Button} small icon="plus" onClick=${() => addTool({ name: `tool_${tools.length + 1}`, schema: JSON.stringify({ type: 'object', properties: {} }, null, 2) })}>Add a tool<//></div>
  </div>`;
}

function Tool({ tool, model }) {
  const [isOpen, open] = useState(true);
  const isBadName = !/^[a-zA-Z0-9_-]{1,64}$/.test(tool.name);
  return html`<fieldset class="tool">
    <legend class="sr-only">Tool ${tool.name}</legend>
    <div class="spread"><${Toggle} label=${tool.name || 'unnamed'} checked=${tool.on} onChange=${(on) => setTool(tool.id, { on })} />
      <span class="row"><${Button} kind="quiet" small icon=${isOpen ? 'up' : 'down'} label=${isOpen ? 'Fold the tool' : 'Unfold the tool'} aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => open(!isOpen)} />
      <${Button} kind="quiet" small icon="trash" label=${`Remove the tool ${tool.name}`} onClick=${() => change(({ tools }) => ({ tools: tools.filter(({ id }) => id !== tool.id) }))} /></span></div>
    ${isOpen && html`<div class="stack">
      <${Field} label="Name" error=${isBadName && 'Letters, digits, _ and -, up to 64.'}>${(id, note) => html`<input id=${id} class="mono" aria-describedby=${note} value=${tool.name} spellcheck=${false} onInput=${(event) => setTool(tool.id, { name: event.currentTarget.value })} />`}<//>
      <${Field} label="Description">${(id) => html`<input id=${id} value=${tool.description} placeholder="Tells the model when to call it" onInput=${(event) => setTool(tool.id, { description: event.currentTarget.value })} />`}<//>
      <${SchemaEditor} label="Schema of the arguments" model=${model} value=${tool.schema} rows=${8} onChange=${(schema) => setTool(tool.id, { schema })} />
    </div>`}
  </fieldset>`;
}

function Output({ state }) {
  const { kind, texts } = state.output;
  const text = texts[kind] ?? '';
  const set = (value) => change(({ output }) => ({ output: { ...output, texts: { ...output.texts, [kind]: value } } }));
  return html`<div class="stack">
    <${Field} label="Format of the answer">${(id) => html`<select id=${id} value=${kind} onChange=${(event) => change(({ output }) => ({ output: { ...output, kind: event.currentTarget.value } }))}>
      ${KINDS.map(([value, label]) => html`<option key=${value} value=${value}>${label}</option>`)}</select>`}<//>
    ${kind === 'text' && html`<p class="muted">The model writes freely. With a format, the host allows nothing else.</p>`}
    ${kind === 'json_object' && html`<p class="muted">The answer is some JSON object.</p>`}
    ${kind === 'json_schema' && html`<${SchemaEditor} label="Schema of the answer" model=${state.panes[0].model} value=${text} onChange=${set} example=${PERSON} rows=${16} />`}
    ${kind === 'regex' && html`<${Field} label="Regular expression" hint="The whole answer matches it.">${(id, note) => html`<input id=${id} class="mono" aria-describedby=${note} spellcheck=${false} placeholder="[A-Z][a-z]+ \\d{4}" value=${text} onInput=${(event) => set(event.currentTarget.value)} />`}<//>`}
    ${kind === 'grammar' && html`<${Field} label="Grammar" hint="In llguidance’s dialect of Lark.">${(id, note) => html`<textarea id=${id} class="mono" aria-describedby=${note} rows="10" spellcheck=${false} placeholder=${'start: "yes" | "no"'} value=${text} onInput=${(event) => set(event.currentTarget.value)} />`}<//>`}
    ${kind !== 'text' && state.tools.some(({ on }) => on) && html`<p class="muted"><${Badge} tone="info">Tools<//> are on too: the format applies to the answer, not to calls.</p>`}
  </div>`;
}
