// The triggers that wake an agent: its routes, its schedules and the events that it listens to.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { duration, number } from '../lib/format.js';
import { usePolled } from '../lib/hooks.js';
import { html, useState } from '../lib/html.js';
import { Link, paths } from '../lib/router.js';
import { Badge, Button, Code, Confirm, Empty, ErrorNote, Loaded, More, Note, Section, StateBadge, Table, Time, toast } from './index.js';
import { JsonTree } from './json-tree.js';
import { covers } from './grants.js';
import { SessionName, usePaged } from './paged.js';

/** A schedule's timing in words. */
function Timing({ timing }) {
  if (timing.cron !== undefined) return html`<code>${timing.cron}</code> <span class="muted">${timing.time_zone}</span>`;
  if (timing.every_ms !== undefined) return html`every ${duration(timing.every_ms)}`;
  return html`once, <${Time} ms=${timing.at_ms} />`;
}

export function Routes({ agent, routes }) {
  return html`<${Section} title="Routes" flush>${routes.length ? html`<ul class="plain-list">${routes.map((route) => {
    const [method, path] = route.split(' ');
    return html`<li key=${route}><${Badge} tone="info">${method}<//><code class="grow">${path}</code></li>`;
  })}</ul>` : html`<${Empty} title="No routes of its own">It is reached at <code>/v1/agents/${agent}/sessions/ID/messages</code>. A <code>[[trigger.http]]</code> in agent.toml adds a route.<//>`}<//>`;
}

export function Schedules({ agent, caller }) {
  const isAdmin = may(caller, 'admin');
  const schedules = usePolled((signal) => (isAdmin ? api.get('/v1/schedules', { signal, query: { agent, limit: 1000 } }) : null), [agent], { everyMs: 5000, when: isAdmin });
  const [doomed, cancel] = useState(null);
  const [error, setError] = useState(null);
  if (!isAdmin) return html`<${Section} title="Schedules"><${Note}>Schedules concern all tenants: a key with the role “admin” sees them.<//><//>`;
  const run = async (schedule) => {
    try {
      await api.post(url`/v1/agents/${agent}/schedules/${schedule.id}/run`);
      setError(null);
      toast(`“${schedule.name}” is due now`);
      schedules.reload();
    } catch (cause) { setError(cause); }
  };
  const columns = [
    { key: 'name', label: 'Schedule', render: ({ name, manifest }) => html`${name}${manifest && html` <span class="muted small">from agent.toml</span>`}` },
    { key: 'timing', label: 'When', optional: true, render: ({ timing }) => html`<${Timing} timing=${timing} />` },
    { key: 'session', label: 'Session', optional: true, render: ({ session }) => html`<${Link} class="plain" href=${paths.session(agent, session)}><${SessionName} id=${session} /><//>` },
    { key: 'state', label: 'State', render: ({ state, last_error: last, attempt, tries }) => html`<span title=${last ? `${last} (attempt ${attempt} of ${tries})` : undefined}><${StateBadge} state=${state} /></span>` },
    { key: 'due', label: 'Due', render: ({ due_at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
    { key: 'do', label: html`<span class="sr-only">Actions</span>`, align: 'right', render: (row) => html`<span class="row end nowrap-row"><${Button} small icon="play" label=${`Run ${row.name} now`} onClick=${() => run(row)} /><${Button} small icon="close" label=${`Cancel ${row.name}`} onClick=${() => cancel(row)} /></span>` },
  ];
  const failed = (rows) => rows.filter(({ last_error: last }) => last);
  return html`<${Section} title="Schedules" flush><${ErrorNote} error=${error} /><${Loaded} resource=${schedules}>${({ data }) => html`<${Table} label="Schedules" columns=${columns} rows=${data} rowKey=${({ id }) => id} height=${40}
      empty=${html`<${Empty} icon="clock" title="No schedules">A <code>[[schedule]]</code> in agent.toml or a session of the agent sets one.<//>`} />
      ${failed(data).map(({ id, name, last_error: last, attempt, tries }) => html`<p key=${id} class="table-note small"><strong>${name}</strong>, attempt ${attempt} of ${tries}: <span class="bad-text">${last}</span></p>`)}`}<//>
    ${doomed && html`<${Confirm} title=${`Cancel “${doomed.name}”?`} action="Cancel the schedule" onClose=${() => cancel(null)}
      confirm=${async () => { await api.del(url`/v1/agents/${agent}/schedules/${doomed.id}`); toast(`Cancelled “${doomed.name}”`); schedules.reload(); }}>
      <p>${doomed.manifest ? 'It is in the agent.toml, so it comes back with the next deployment.' : 'The session is no longer woken by it.'}</p><//>`}<//>`;
}

export function Events({ agent, manifest, caller }) {
  const isAdmin = may(caller, 'admin');
  const listens = manifest?.trigger?.event ?? [];
  const emits = manifest?.grants?.events ?? [];
  const topics = [...listens.map(({ topic }) => topic), ...emits];
  const events = usePaged(({ signal, last }) => (isAdmin && topics.length ? api.get('/v1/events', { signal, query: { before: last?.key, limit: 200 } }) : { data: [], has_more: false }), [agent, isAdmin]);
  const columns = [
    { key: 'topic', label: 'Topic', render: ({ topic }) => html`<code>${topic}</code>` },
    { key: 'data', label: 'Data', render: ({ data }) => html`<code class="muted">${JSON.stringify(data)?.slice(0, 160)}</code>`, optional: true },
    { key: 'source', label: 'From', optional: true },
    { key: 'state', label: 'Deliveries', render: ({ pending, dead }) => (dead ? html`<${Badge} tone="bad" dot>${number(dead)} failed<//>` : pending ? html`<${Badge} tone="info" dot>${number(pending)} pending<//>` : html`<${Badge} tone="ok" dot>Done<//>`) },
    { key: 'at', label: 'Published', align: 'right', render: ({ published_at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
  ];
  return html`<${Section} title="Events" flush>
    ${topics.length ? html`<ul class="plain-list">${listens.map(({ topic, session }) => html`<li key=${`in ${topic}`}><${Badge} tone="info">receives<//><code class="grow">${topic}</code><span class="muted small">session <code>${session}</code></span></li>`)}
      ${emits.map((topic) => html`<li key=${`out ${topic}`}><${Badge} tone="accent">emits<//><code class="grow">${topic}</code></li>`)}</ul>`
      : html`<${Empty} title="No events">A <code>[[trigger.event]]</code> in agent.toml lets events wake it, <code>[grants] events</code> lets it emit some.<//>`}
    ${topics.length > 0 && isAdmin && html`<${Loaded} resource=${events}>${(rows) => {
      const shown = rows.filter(({ topic }) => topics.some((pattern) => covers(pattern, topic)));
      return html`<${Table} label="Recent events" columns=${columns} rows=${shown} rowKey=${({ key }) => key} empty=${html`<p class="table-note muted">No event with these topics yet.</p>`} />
        ${events.hasMore && html`<${More} shown=${shown.length} noun="event" busy=${events.loading} onMore=${events.more} />`}`;
    }}<//>`}
  <//>`;
}

/** The tools that an agent offers to its model. */
export function Tools({ tools }) {
  if (!tools.length) return html`<div class="card"><${Empty} icon="tool" title="No tools of its own">Functions with <code>#[tool]</code> become tools that its model and other agents can call.<//></div>`;
  return html`<ul class="tool-list">${tools.map((tool) => html`<${Tool} key=${tool.name} tool=${tool} />`)}</ul>`;
}

function Tool({ tool: { name, description, input_schema: input, output_schema: output, hints, timeout_ms: timeout, retries, needs_approval: asks } }) {
  const words = [hints.read_only && 'read-only', hints.destructive && !hints.read_only && 'destructive', hints.idempotent && 'idempotent', hints.open_world && 'open world'].filter(Boolean);
  return html`<li class="card"><div class="tool-top"><h2 class="tool-name"><code>${name}</code></h2>
      ${asks && html`<${Badge} tone="warn">Needs approval<//>`}${words.map((word) => html`<${Badge} key=${word} tone=${word === 'destructive' ? 'bad' : null}>${word}<//>`)}
      <span class="muted small tool-numbers">${timeout !== null && timeout !== undefined ? `at most ${duration(timeout)}` : ''}${retries ? ` · ${number(retries)} retries` : ''}</span></div>
    ${description && html`<p>${description}</p>`}
    <div class="columns"><div><h3 class="schema-title">Arguments</h3><${JsonTree} value=${input} open=${2} label=${`Schema of the arguments of ${name}`} /></div>
      ${output && html`<div><h3 class="schema-title">Result</h3><${JsonTree} value=${output} open=${2} label=${`Schema of the result of ${name}`} /></div>`}</div></li>`;
}

/** A manifest; with that of the active version, what activating this one would change. */
export function Manifest({ text, inForce }) {
  if (inForce === undefined) return html`<${Code} text=${text} lang="toml" />`;
  const lines = (whole) => whole.split('\n').filter((line) => line.trim());
  const [was, is] = [new Set(lines(inForce)), new Set(lines(text))];
  const changes = [...lines(inForce).filter((line) => !is.has(line)).map((line) => ['−', 'out', line]), ...lines(text).filter((line) => !was.has(line)).map((line) => ['+', 'in', line])];
  return html`${changes.length ? html`<pre class="diff" tabindex="0" role="group" aria-label="Changes that activating this version makes">${changes.map(([sign, kind, line], n) => html`<span class=${`diff-${kind}`} key=${n}>${sign} ${line}${'\n'}</span>`)}</pre>`
    : html`<p class="muted small">The same as in the active version.</p>`}<${Code} text=${text} lang="toml" />`;
}
