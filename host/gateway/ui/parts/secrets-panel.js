// Secrets of agents: their names and where they may be sent. A value is typed once and never shown again.
import { api, url } from '../lib/api.js';
import { useIsDrawn, useResource } from '../lib/hooks.js';
import { html, useState } from '../lib/html.js';
import { Link, paths } from '../lib/router.js';
import { Button, Confirm, Dialog, Empty, ErrorNote, Field, Loaded, Note, Section, Table, Time, toast } from './index.js';

export function Secrets() {
  const secrets = useResource((signal) => api.get('/v1/secrets', { signal }));
  const [doomed, remove] = useState(null);
  const [edited, edit] = useState(null);
  const columns = [
    { key: 'name', label: 'Secret', render: ({ name }) => html`<code>${name}</code>` },
    { key: 'agent', label: 'For', render: ({ agent }) => (agent === null ? 'every agent that is granted it' : html`<${Link} class="plain" href=${paths.agent(agent)}>${agent}<//>`) },
    { key: 'hosts', label: 'May be sent to', optional: true, render: ({ hosts }) => html`<span title=${hosts.join('\n')}>${hosts.join(', ')}</span>` },
    { key: 'updated', label: 'Set', optional: true, render: ({ updated_at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
    { key: 'do', label: html`<span class="sr-only">Actions</span>`, align: 'right', render: (row) => html`<span class="row end"><${Button} small onClick=${() => edit(row)}>Replace<//>
      <${Button} small icon="trash" label=${`Delete ${row.name}`} onClick=${() => remove(row)} /></span>` },
  ];
  const isKnown = ({ name, agent }) => secrets.data?.data.some((row) => row.name === name && row.agent === agent);
  return html`<${Section} title="Secrets" about="What agents may send without seeing it. The host shows only names and origins." flush
      actions=${html`<${Button} kind="primary" small icon="plus" onClick=${() => edit({ name: '', agent: null, hosts: [] })}>New secret<//>`}>
    <${Loaded} resource=${secrets}>${({ data }) => html`<${Table} label="Secrets" columns=${columns} rows=${data} rowKey=${({ name, agent }) => `${agent} ${name}`} height=${40}
      empty=${html`<${Empty} icon="lock" title="No secrets">Set one here, or with <code>skep secret set NAME --to ORIGIN</code>. Its value is sent to that origin only.<//>`} />`}<//>
    ${edited && html`<${Editor} known=${edited} isKnown=${isKnown} onClose=${() => edit(null)} onSet=${(name) => { toast(`Set ${name}`); secrets.reload(); }} />`}
    ${doomed && html`<${Confirm} title=${`Delete ${doomed.name}?`} action="Delete" onClose=${() => remove(null)} confirm=${async () => { await api.del(url`/v1/secrets/${doomed.name}`, { query: { agent: doomed.agent } }); toast(`Deleted ${doomed.name}`); secrets.reload(); }}>
      <p>Requests of ${doomed.agent ?? 'agents'} that need it fail from now on. Its value cannot be brought back.</p><//>`}<//>`;
}

/** Sets a secret. One that is replaced keeps its name and its agent; its value and its origins are those of the form. */
function Editor({ known, isKnown, onClose, onSet }) {
  const isNew = !known.name;
  const [form, set] = useState({ name: known.name, agent: known.agent ?? '', hosts: known.hosts.join('\n'), value: '' });
  const [state, setState] = useState({ busy: false, error: null });
  const isDrawn = useIsDrawn();
  const agents = useResource((signal) => (isNew ? api.get('/v1/agents', { signal }) : null), [isNew]);
  const text = (name) => (event) => { const { value } = event.currentTarget; set((was) => ({ ...was, [name]: value })); };
  const name = form.name.trim();
  const agent = form.agent || null;
  const hosts = form.hosts.split(/[\s,]+/).filter(Boolean);
  const save = async (event) => {
    event?.preventDefault();
    setState({ busy: true, error: null });
    try {
      await api.put(url`/v1/secrets/${name}`, { value: form.value, hosts, ...(agent ? { agent } : {}) });
      onSet(name);
      if (isDrawn.current) onClose();
    } catch (error) { setState({ busy: false, error }); }
  };
  const names = (agents.data?.data ?? []).map((row) => row.name).sort();
  const isReady = name && hosts.length > 0 && form.value;
  return html`<${Dialog} title=${isNew ? 'New secret' : `Replace ${known.name}`} onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} kind="primary" icon="lock" busy=${state.busy} disabled=${!isReady} onClick=${save}>Set the secret<//>`}>
    <form class="stack" onSubmit=${save}>
      ${isNew ? html`<div class="columns"><${Field} label="Name" hint="A–Z, 0–9 and _, such as STRIPE_KEY.">${(id, note) => html`<input id=${id} class="mono" aria-describedby=${note} value=${form.name} autocomplete="off" spellcheck=${false} autofocus onInput=${text('name')} />`}<//>
        <${Field} label="For">${(id) => html`<select id=${id} value=${form.agent} onChange=${text('agent')}><option value="">every agent that is granted it</option>${names.map((each) => html`<option key=${each} value=${each} selected=${each === form.agent}>${each}</option>`)}</select>`}<//></div>`
        : html`<p class="muted">For ${known.agent ?? 'every agent that is granted it'}.</p>`}
      <${Field} label="May be sent to" hint="Origins, one per line, such as https://api.stripe.com or https://*.example.com.">${(id, note) => html`<textarea id=${id} class="mono" rows="2" aria-describedby=${note} value=${form.hosts} spellcheck=${false} onInput=${text('hosts')} />`}<//>
      <${Field} label="Value" hint="It is not shown again; agents get a placeholder instead of it.">${(id, note) => html`<input id=${id} type="password" class="mono" aria-describedby=${note} value=${form.value} autocomplete="new-password" spellcheck=${false} autofocus=${!isNew} onInput=${text('value')} />`}<//>
      ${isNew && isKnown({ name, agent }) && html`<${Note} tone="warn">${name} is set already; this replaces its value and its origins.<//>`}
      <button type="submit" hidden disabled=${!isReady}></button>
    </form>
    <${ErrorNote} error=${state.error} />
  <//>`;
}
