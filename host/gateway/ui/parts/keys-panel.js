// API keys: who may use the host, and what for.
import { api, url } from '../lib/api.js';
import { callerStore } from '../lib/caller.js';
import { day, number } from '../lib/format.js';
import { useIsDrawn, useResource } from '../lib/hooks.js';
import { html, useState } from '../lib/html.js';
import { createStore } from '../lib/store.js';
import { Badge, Button, Confirm, Copy, Dialog, Empty, ErrorNote, Field, Loaded, Note, Section, Table, Time, toast, Toggle } from './index.js';

const ROLES = [['invoke', 'invoke: uses models and agents'], ['read', 'read: sees everything, changes nothing'], ['admin', 'admin: may do everything'], ['metrics', 'metrics: reads /metrics']];
/** The tenant of the operator. */
const HOST_TENANT = 'local';
const LIFETIMES = [['', 'never'], ['604800', 'in 7 days'], ['2592000', 'in 30 days'], ['7776000', 'in 90 days'], ['31536000', 'in a year']];

/** The keys that were made and that nobody has confirmed to have kept. Whoever closes the dialog or leaves the page before the host answers still sees them. */
const newKeys = createStore([]);
callerStore.listen(({ state }) => { if (state === 'signed-out') newKeys.set([]); });
const drop = () => newKeys.set((was) => was.slice(1));

const isOver = ({ revoked_at_ms: revoked, expires_at_ms: expires }) => revoked !== null || (expires !== null && expires < Date.now());

function KeyState({ row }) {
  if (row.revoked_at_ms !== null) return html`<${Badge}>Revoked<//>`;
  if (isOver(row)) return html`<${Badge} tone="warn">Expired<//>`;
  return html`<${Badge} tone="ok" dot title=${row.expires_at_ms ? `until ${day(row.expires_at_ms)}` : 'does not expire'}>In use<//>`;
}

export function Keys({ caller }) {
  const keys = useResource((signal) => api.get('/v1/keys', { signal }));
  const [isMaking, make] = useState(false);
  const [made] = newKeys.use();
  const [doomed, revoke] = useState(null);
  const columns = [
    { key: 'name', label: 'Key', render: ({ name, id }) => html`${name || html`<span class="muted">no name</span>`} <code class="muted small optional">${id}</code>` },
    { key: 'tenant', label: 'Tenant', optional: true },
    { key: 'role', label: 'Role', render: ({ role, agents, bodies }) => html`<${Badge}>${role}<//>${agents && html` <span class="muted small" title=${agents.join(', ')}>${agents.length === 1 ? agents[0] : `${agents.length} agents`}</span>`}${bodies && html` <span class="muted small" title="May read what was said in requests to models">+ texts</span>`}` },
    { key: 'state', label: 'State', render: (row) => html`<${KeyState} row=${row} />` },
    { key: 'limit', label: 'A minute', align: 'right', optional: true, render: ({ requests_per_minute: n }) => (n === null ? html`<span class="muted">–</span>` : number(n)) },
    { key: 'used', label: 'Last used', optional: true, render: ({ last_used_at_ms: ms }) => (ms === null ? html`<span class="muted">never</span>` : html`<span title="Precise to the day">${day(ms)}</span>`) },
    { key: 'created', label: 'Made', optional: true, render: ({ created_at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
    { key: 'do', label: html`<span class="sr-only">Actions</span>`, align: 'right', render: (row) => !isOver(row) && html`<${Button} small onClick=${() => revoke(row)}>Revoke<//>` },
  ];
  return html`<${Section} title="API keys" about=${caller.keys_required ? 'Who may use this host, and what for.' : 'This host asks for no key: anyone who can reach it is an admin. Start it with --auth required to ask for one.'} flush
      actions=${html`<${Button} kind="primary" small icon="plus" onClick=${() => make(true)}>New key<//>`}>
      <${Loaded} resource=${keys}>${({ data }) => html`<${Table} label="API keys" columns=${columns} rows=${[...data].sort((a, b) => isOver(a) - isOver(b) || b.created_at_ms - a.created_at_ms)} rowKey=${({ id }) => id} height=${40}
        empty=${html`<${Empty} icon="key" title="No keys yet">Make one here, or with <code>skep key create</code>.<//>`} />`}<//><//>
    ${isMaking && html`<${NewKey} caller=${caller} onClose=${() => make(false)} onMade=${(key) => { newKeys.set((was) => [...was, key]); keys.reload(); }} />`}
    ${made && html`<${Dialog} title="The new key" onClose=${drop} actions=${html`<${Button} kind="primary" onClick=${drop}>I have kept it<//>`}>
      <${Note} tone="warn">It is shown this once. The host keeps only a hash of it.<//>
      <div class="new-key"><code>${made.key}</code><${Copy} text=${made.key} label="Copy the key">Copy<//></div>
      ${(made.warnings ?? []).map((text) => html`<${Note} key=${text} tone="warn">${text}<//>`)}<//>`}
    ${doomed && html`<${Confirm} title="Revoke this key?" action="Revoke" onClose=${() => revoke(null)} confirm=${async () => { await api.del(url`/v1/keys/${doomed.id}`); toast('The key is revoked'); keys.reload(); }}>
      <p><strong>${doomed.name || doomed.id}</strong> of ${doomed.tenant}, role ${doomed.role}: requests with it are refused from now on. This cannot be undone.</p><//>`}`;
}

function NewKey({ caller, onClose, onMade }) {
  const [form, set] = useState({ tenant: caller.tenant, role: 'invoke', name: '', agents: '', lifetime: '', limit: '', bodies: false });
  const [state, setState] = useState({ busy: false, error: null });
  const isDrawn = useIsDrawn();
  const ofHost = form.role === 'admin' || form.role === 'metrics';
  const text = (name) => (event) => { const { value } = event.currentTarget; set((was) => ({ ...was, [name]: value })); };
  const save = async (event) => {
    event?.preventDefault();
    setState({ busy: true, error: null });
    const agents = form.agents.split(/[\s,]+/).filter(Boolean);
    try {
      onMade(await api.post('/v1/keys', {
        tenant: ofHost ? HOST_TENANT : form.tenant.trim(), role: form.role, name: form.name.trim(), ...(agents.length ? { agents } : {}), ...(form.lifetime ? { expires_in_s: Number(form.lifetime) } : {}),
        ...(form.limit ? { requests_per_minute: Number(form.limit) } : {}), ...(form.bodies ? { bodies: true } : {}),
      }));
      if (isDrawn.current) onClose();
    } catch (error) { setState({ busy: false, error }); }
  };
  const options = (list, value) => list.map(([id, words]) => html`<option key=${id} value=${id} selected=${id === value}>${words}</option>`);
  return html`<${Dialog} title="New API key" onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} kind="primary" icon="key" busy=${state.busy} disabled=${!form.tenant.trim()} onClick=${save}>Create the key<//>`}>
    <form class="stack" onSubmit=${save}>
      <${Field} label="Name" hint="For people, such as “shop” or “Ada’s laptop”.">${(id, note) => html`<input id=${id} aria-describedby=${note} value=${form.name} autocomplete="off" autofocus onInput=${text('name')} />`}<//>
      <div class="columns"><${Field} label="Tenant" hint=${ofHost ? 'This role reaches all tenants, so its keys belong to the host.' : null}>${(id, note) => html`<input id=${id} aria-describedby=${note} disabled=${ofHost} value=${ofHost ? HOST_TENANT : form.tenant} autocomplete="off" spellcheck=${false} onInput=${text('tenant')} />`}<//>
        <${Field} label="Role">${(id) => html`<select id=${id} value=${form.role} onChange=${text('role')}>${options(ROLES, form.role)}</select>`}<//></div>
      <${Field} label="Agents" hint="Names, separated by commas. Empty: all agents, and the models.">${(id, note) => html`<input id=${id} aria-describedby=${note} value=${form.agents} autocomplete="off" spellcheck=${false} onInput=${text('agents')} />`}<//>
      <div class="columns"><${Field} label="Expires">${(id) => html`<select id=${id} value=${form.lifetime} onChange=${text('lifetime')}>${options(LIFETIMES, form.lifetime)}</select>`}<//>
        <${Field} label="Requests per minute">${(id) => html`<input id=${id} type="number" min="1" placeholder="the tenant’s limit" value=${form.limit} onInput=${text('limit')} />`}<//></div>
      ${caller.reads_bodies && html`<${Toggle} label="May read what was said in requests to models" checked=${form.bodies} onChange=${(bodies) => set((was) => ({ ...was, bodies }))} />`}
      <button type="submit" hidden></button>
    </form>
    <${ErrorNote} error=${state.error} />
  <//>`;
}
