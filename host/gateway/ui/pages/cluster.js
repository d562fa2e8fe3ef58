// The hosts that share a database: what each has loaded, how many sessions it owns, and when it was last heard.
import { api } from '../lib/api.js';
import { hasCluster } from '../lib/cluster.js';
import { count, duration, number } from '../lib/format.js';
import { usePolled } from '../lib/hooks.js';
import { html, useEffect } from '../lib/html.js';
import { paths } from '../lib/router.js';
import { Badge, Button, Empty, Figure, Loaded, Note, Page, Section, Table, Time } from '../parts/index.js';

const AGAIN_MS = 2000;
const STATES = { serving: ['ok', 'Serving'], draining: ['warn', 'Draining'], gone: ['bad', 'Gone'] };

const sum = (hosts, member) => hosts.reduce((all, host) => all + (host[member] ?? 0), 0);
const most = (hosts) => Math.max(1, ...hosts.map(({ sessions }) => sessions ?? 0));
const keyOf = ({ number: id, name, url }) => String(id ?? url ?? name);
const isAddress = (url) => /^https?:\/\//.test(url ?? '');

export default function Cluster() {
  const isKnown = hasCluster.use();
  const cluster = usePolled((signal) => api.get('/v1/cluster', { signal }), [], { everyMs: AGAIN_MS, when: isKnown !== false });
  const { data, error } = cluster;
  const isMissing = !data && error?.status === 404;
  useEffect(() => { if (data) hasCluster.set(true); else if (isMissing) hasCluster.set(false); }, [!data, isMissing]);
  return html`<${Page} title="Cluster" wide about="The hosts that share this host’s database, and the work of each.">
    ${isMissing ? html`<div class="card"><${Empty} icon="cluster" title="This host is not part of a cluster" action=${html`<${Button} href=${paths.docs('host/databases')}>Read about databases<//>`}>Hosts that share a PostgreSQL database show up here.<//></div>`
      : html`<${Loaded} resource=${cluster} lines=${6}>${({ hosts, unowned_sessions: unowned }) => html`<${Hosts} hosts=${hosts ?? []} unowned=${unowned ?? 0} />`}<//>`}
  <//>`;
}

function Hosts({ hosts, unowned }) {
  const here = hosts.filter(({ state }) => state !== 'gone');
  const serving = hosts.filter(({ state }) => state === 'serving').length;
  const versions = [...new Set(here.map(({ version }) => version).filter(Boolean))].sort();
  const top = most(hosts);
  const columns = [
    { key: 'name', label: 'Host', render: (host) => html`<${Name} host=${host} />` },
    { key: 'state', label: 'State', width: '7rem', render: ({ state }) => html`<${State} state=${state} />` },
    { key: 'version', label: 'Version', width: '6rem', optional: true, render: ({ version }) => version ?? '–' },
    { key: 'models', label: 'Models', optional: true, render: ({ models }) => (models?.length ? html`<span title=${models.join(', ')}>${models.join(', ')}</span>` : html`<span class="muted">none loaded</span>`) },
    { key: 'sessions', label: 'Sessions', width: '24%', render: ({ sessions }) => html`<${Share} value=${sessions} top=${top} />` },
    { key: 'turns', label: 'Turns', align: 'right', width: '5rem', render: ({ running_turns: turns }) => html`<span title="Turns that run">${number(turns)}</span>` },
    { key: 'heard', label: 'Heard', align: 'right', width: '7rem', render: ({ seen_ms_ago: ms }) => (ms < 2000 ? 'now' : typeof ms === 'number' ? `${duration(ms)} ago` : '–') },
    { key: 'started', label: 'Started', align: 'right', width: '8rem', optional: true, render: ({ started_at: at }) => html`<${Time} ms=${Date.parse(at ?? '') || null} relative />` },
  ];
  return html`<div class="figures">
      <${Figure} label="Hosts that serve" value=${number(serving)} unit=${hosts.length > serving ? `of ${number(hosts.length)}` : undefined} tone=${serving ? '' : 'bad'} />
      <${Figure} label="Sessions" value=${number(sum(hosts, 'sessions'))} hint="Sessions that a host owns" />
      <${Figure} label="Without a host" value=${number(unowned)} tone=${unowned > 0 ? 'warn' : ''} hint="Sessions that no host owns: the next message to one finds it a host" />
      <${Figure} label="Turns that run" value=${number(sum(hosts, 'running_turns'))} />
    </div>
    ${versions.length > 1 && html`<${Note} tone="warn">The hosts run ${count(versions.length, 'version')}: ${versions.join(', ')}. That is as it should be only during an upgrade.<//>`}
    <${Section} title="Hosts" flush><${Table} label="Hosts" columns=${columns} rows=${hosts} rowKey=${keyOf} height=${44}
      empty=${html`<${Empty} icon="cluster" title="No host is known">A host shows up here once it has written to the database.<//>`} /><//>`;
}

function Name({ host: { name, url, this: isThis, number: id } }) {
  const text = name ?? url ?? (id === undefined ? 'unknown' : `host ${id}`);
  return html`${isAddress(url) && !isThis ? html`<a href=${`${url.replace(/\/+$/, '')}/ui/cluster`} target="_blank" rel="noreferrer" title=${`Open the console of ${text}`}>${text}</a>` : html`<strong title=${url}>${text}</strong>`}
    ${isThis && html` <${Badge} tone="accent">this host<//>`}`;
}

function State({ state }) {
  const [tone, text] = STATES[state] ?? [null, state ?? '–'];
  return html`<${Badge} tone=${tone} dot>${text}<//>`;
}

/** A number with a bar, whose whole length is the largest number of all hosts. */
const Share = ({ value, top }) => html`<span class="host-share"><span class="host-track" aria-hidden="true"><span style=${{ width: `${((value ?? 0) / top) * 100}%` }}></span></span><span class="num">${number(value)}</span></span>`;
