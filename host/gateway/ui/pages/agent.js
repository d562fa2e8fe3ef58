// One agent: what it may do and has used, its tools, what wakes it, its versions and its log.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { number, percent } from '../lib/format.js';
import { useIsDrawn, usePolled, useResource } from '../lib/hooks.js';
import { html, useMemo, useState } from '../lib/html.js';
import { Link, navigate, paths, setQuery } from '../lib/router.js';
import { remember } from '../lib/store.js';
import { Badge, Button, Confirm, Copy, Dialog, Empty, ErrorNote, Facts, Field, Loaded, Page, Section, Skeleton, Tabs, Time, toast } from '../parts/index.js';
import { Events, Manifest, Routes, Schedules, Tools } from '../parts/agent-triggers.js';
import { Deploy, DropHere, useDrop } from '../parts/deploy.js';
import { grantRows, Grants } from '../parts/grants.js';
import { AgentLimits } from '../parts/limits.js';
import { LogView } from '../parts/log-view.js';
import { SessionName } from '../parts/paged.js';
import { readToml } from '../parts/toml.js';
import { sentKey } from '../parts/turn-feed.js';

const TABS = ['tools', 'triggers', 'versions', 'log'];

export default function AgentPage({ params: { agent: name }, query, caller }) {
  const path = url`/v1/agents/${name}`;
  const agent = useResource((signal) => api.get(path, { signal }), [path]);
  const tab = TABS.includes(query.tab) ? query.tab : 'overview';
  const [dialog, open] = useState(null);
  const [files, deploy] = useState(null);
  const isDrawn = useIsDrawn();
  const isAdmin = may(caller, 'admin');
  const isOver = useDrop(deploy, isAdmin);
  const { data, error } = agent;
  const manifest = useMemo(() => data && readToml(data.manifest), [data]);
  const shown = { name, path, data, manifest, caller, reload: agent.reload };
  return html`<${Page} wide title=${name} trail=${[['Agents', paths.agents()]]} about=${data?.description}
    actions=${data && html`${may(caller, 'invoke') && html`<${Button} kind="primary" icon="playground" onClick=${() => open('send')}>Send a message<//>`}
      <${Button} icon="sessions" href=${`${paths.sessions()}?agent=${encodeURIComponent(name)}`}>Sessions<//>
      ${isAdmin && html`<${Button} icon="upload" onClick=${() => deploy([])}>Deploy<//><${Button} icon="trash" label="Delete the agent" onClick=${() => open('delete')} />`}`}>
    <${ErrorNote} error=${error} onRetry=${agent.reload} />
    ${!data && !error && html`<${Skeleton} lines=${8} />`}
    ${data && html`<${Tabs} label="Parts of the agent" active=${tab} onSelect=${(id) => setQuery({ tab: id === 'overview' ? '' : id })}
      tabs=${[{ id: 'overview', label: 'Overview' }, { id: 'tools', label: 'Tools', count: data.tools.length }, { id: 'triggers', label: 'Triggers' }, { id: 'versions', label: 'Versions' }, { id: 'log', label: 'Log' }]}>
      <${PANELS[tab]} ...${shown} /><//>`}
    ${isOver && html`<${DropHere} />`}
    ${files && html`<${Deploy} files=${files} manifest=${data?.manifest ?? ''} onClose=${() => deploy(null)} onDone=${agent.reload} />`}
    ${dialog === 'send' && html`<${Send} name=${name} onClose=${() => open(null)} />`}
    ${dialog === 'delete' && html`<${Confirm} title=${`Delete ${name}?`} action="Delete" type=${name} onClose=${() => open(null)} confirm=${async () => { await api.del(path); toast(`Deleted ${name}`); if (isDrawn.current) navigate(paths.agents(), { replace: true }); }}>
      <p>This deletes the agent with all its versions, sessions, schedules and log lines. It cannot be undone.</p><//>`}
  <//>`;
}

function Overview({ name, path, data, manifest, caller }) {
  const isAdmin = may(caller, 'admin');
  const now = usePolled((signal) => api.get(path, { signal }), [path], { everyMs: 5000 });
  const recent = (now.data ?? data).recent_turns;
  const rights = useResource(async (signal) => {
    if (!isAdmin) return {};
    const quietly = (path) => api.get(path, { signal }).catch((error) => { if (error.isAway || signal.aborted) throw error; return null; });
    const [config, secrets] = await Promise.all([quietly('/v1/config'), quietly('/v1/secrets')]);
    return { config, secrets: secrets?.data };
  }, [isAdmin, name]);
  // A key for some agents does not see what its tenant uses.
  const seesUse = !caller.agents;
  const today = usePolled(async (signal) => {
    if (!seesUse) return {};
    const { data: lines } = await api.get('/v1/usage', { signal, query: { by: 'agent', since: '1d' } });
    return lines.find((line) => line.name === name) ?? { output_tokens: 0, input_tokens: 0, cached_input_tokens: 0, requests: 0 };
  }, [name, seesUse], { everyMs: 10_000, when: seesUse });
  return html`<div class="agent-overview">
    <div class="stack">
      <${Section} title="Active version"><${Facts} rows=${[
        ['Version', number(data.version)], ['Deployed', html`<${Time} ms=${data.deployed_at_ms} relative />`], ['Model', html`<code>${data.model}</code>`],
        ['Component', html`<span class="row"><code title=${`SHA-256 ${data.digest}`}>${data.digest.slice(0, 12)}…</code><${Copy} text=${data.digest} label="Copy the digest" /></span>`]]} /><//>
      ${seesUse && html`<${Section} title="Used today" about=${isAdmin ? 'By all tenants, in UTC.' : `By the tenant ${caller.tenant}, in UTC.`}>
        <${Loaded} resource=${today} lines=${2}>${(used) => html`<${Facts} rows=${[['Requests', number(used.requests)], ['Prompt tokens', number(used.input_tokens)], ['From the cache', used.input_tokens ? percent(used.cached_input_tokens / used.input_tokens) : '–'], ['Generated', number(used.output_tokens)]]} />`}<//><//>`}
      <${Section} title="Grants" about=${isAdmin ? 'What its agent.toml asks for, and whether skep.toml allows it.' : 'What its agent.toml asks for. A key with the role “admin” sees what the host allows.'} flush>
        ${manifest ? html`<${Loaded} resource=${rights}>${({ config, secrets }) => html`<${Grants} rows=${grantRows(manifest, { agent: name, model: data.model, config, secrets })} />`}<//>` : html`<${Empty} title="The manifest cannot be read here">See it below.<//>`}<//>
      <${Section} title="agent.toml" flush><${Manifest} text=${data.manifest} /><//>
    </div>
    <${Section} title="Limits" about=${recent ? 'What applies, how much of it is used now, and what turns used.' : 'What applies, and how much of it is used now.'}>
      <div class="stack"><${AgentLimits} limits=${data.limits} asked=${manifest?.limits ?? {}} used=${now.data?.used ?? data.used} recent=${recent} today=${today.data?.output_tokens} /></div><//>
  </div>`;
}

const ToolsPanel = ({ data }) => html`<${Tools} tools=${data.tools} />`;

const Triggers = ({ name, data, manifest, caller }) => html`<div class="stack wide-gap"><${Routes} agent=${name} routes=${data.routes} /><${Schedules} agent=${name} caller=${caller} /><${Events} agent=${name} manifest=${manifest} caller=${caller} /></div>`;

function Versions({ name, path, caller, reload }) {
  const versions = useResource((signal) => api.get(`${path}/versions`, { signal }), [path]);
  const [target, rollBack] = useState(null);
  return html`<${Loaded} resource=${versions}>${({ data }) => {
    const current = data.find((version) => version.in_force);
    return html`<ol class="version-list">${data.map((version) => html`<li key=${version.version} class="card">
        <div class="version-head"><strong>Version ${number(version.version)}</strong>${version.in_force && html`<${Badge} tone="ok" dot>Active<//>`}
          <span class="muted small grow">deployed <${Time} ms=${version.deployed_at_ms} relative /> by ${version.deployed_by} · <code title=${version.digest}>${version.digest.slice(0, 12)}</code>${current && !version.in_force && version.digest === current.digest ? ', the same component' : ''}</span>
          ${!version.in_force && may(caller, 'admin') && html`<${Button} small icon="retry" onClick=${() => rollBack(version)}>Activate<//>`}</div>
        <details class="folded"><summary>agent.toml</summary><${Manifest} text=${version.manifest} inForce=${version.in_force ? undefined : current?.manifest} /></details></li>`)}</ol>
      ${target && html`<${Confirm} title=${`Activate version ${target.version} of ${name}?`} kind="primary" action="Activate" onClose=${() => rollBack(null)}
        confirm=${async () => { await api.post(`${path}/rollback`, { version: target.version }); toast(`Version ${target.version} is active`); versions.reload(); reload(); }}>
        <p>New turns run version ${number(target.version)}. Turns that run now end with the version that they began with, and sessions stay.</p><//>`}`;
  }}<//>`;
}

const Log = ({ name }) => html`<div class="card flush agent-log"><${LogView} agent=${name} /></div>`;

const PANELS = { overview: Overview, tools: ToolsPanel, triggers: Triggers, versions: Versions, log: Log };

function Send({ name, onClose }) {
  const [session, setSession] = useState(() => `console-${Math.random().toString(36).slice(2, 8)}`);
  const [text, setText] = useState('');
  const [state, set] = useState({ busy: false, error: null });
  const isDrawn = useIsDrawn();
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || !session.trim()) return;
    set({ busy: true, error: null });
    try {
      const { turn_id: turn } = await api.post(url`/v1/agents/${name}/sessions/${session.trim()}/messages`, { text }, { query: { detach: true } });
      remember(sentKey(turn), { text });
      if (!isDrawn.current) return;
      onClose();
      navigate(paths.session(name, session.trim()));
    } catch (error) { set({ busy: false, error }); }
  };
  return html`<${Dialog} title=${`Send a message to ${name}`} onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} kind="primary" busy=${state.busy} disabled=${!text.trim() || !session.trim()} onClick=${send}>Send<//>`}>
    <form class="stack" onSubmit=${send}>
      <${Field} label="Session" hint="An existing id continues its session; a new one starts a session.">${(id, note) => html`<input id=${id} aria-describedby=${note} value=${session} autocomplete="off" spellcheck=${false} onInput=${(event) => setSession(event.currentTarget.value)} />`}<//>
      <${Field} label="Message">${(id) => html`<textarea id=${id} rows="4" autofocus value=${text} onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${(event) => { if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) send(event); }}></textarea>`}<//>
      <p class="muted small">It opens at <${Link} href=${paths.session(name, session)}><${SessionName} id=${session} /><//>.</p>
    </form>
    <${ErrorNote} error=${state.error} />
  <//>`;
}
