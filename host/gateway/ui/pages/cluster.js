// The hosts that share a database: what each has loaded and how busy it is, how many sessions it owns, when it was last heard, and the KV pages that they
// gave each other. An admin drains them.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { hasCluster, isCluster } from '../lib/cluster.js';
import { bytes, count, duration, number, percent, time } from '../lib/format.js';
import { usePolled } from '../lib/hooks.js';
import { html, useEffect, useState } from '../lib/html.js';
import { Link, paths } from '../lib/router.js';
import { Badge, Button, Confirm, Empty, Facts, Figure, Loaded, Note, Page, Section, Table, Time, toast } from '../parts/index.js';

const AGAIN_MS = 2000;
const LEASE_MS = 10_000;
const STATES = { serving: ['ok', 'Serving'], draining: ['warn', 'Draining'] };
/** The roles of hosts; one that has none does everything. */
const ROLES = { all: ['Everything', 'Runs agents and computes models'], gateway: ['Gateway', 'Runs agents and takes requests; other hosts compute its models'], prefill: ['Prefill', 'Computes prompts for decode hosts'], decode: ['Decode', 'Runs agents and computes models; prefill hosts compute long prompts'], balancer: ['Balancer', 'Passes all requests on to other hosts'] };

const sum = (hosts, member) => hosts.reduce((all, host) => all + host[member], 0);

export default function Cluster({ caller }) {
  const cluster = usePolled((signal) => api.get('/v1/cluster', { signal }), [], { everyMs: AGAIN_MS });
  const { data } = cluster;
  useEffect(() => { if (data) hasCluster.set(isCluster(data)); }, [data]);
  return html`<${Page} title="Cluster" wide about="The hosts that share this host’s database, and the work of each.">
    <${Loaded} resource=${cluster} lines=${6}>${(answer) => html`<${Hosts} hosts=${answer.hosts} isAlone=${!isCluster(answer)} caller=${caller} onDrained=${cluster.reload} />`}<//>
  <//>`;
}

function Hosts({ hosts, isAlone, caller, onDrained }) {
  const [doomed, drain] = useState(null);
  const serving = hosts.filter(({ state }) => state === 'serving').length;
  const versions = [...new Set(hosts.map(({ version }) => version))].sort();
  const mayDrain = !isAlone && may(caller, 'admin');
  const columns = [
    { key: 'name', label: 'Host', render: (host) => html`<${Name} host=${host} />` },
    { key: 'state', label: 'State', width: '7rem', render: ({ state, started_at: at }) => html`<${State} state=${state} title=${`started ${time(Date.parse(at))}`} />` },
    ...(!isAlone && hosts.some(({ role }) => role) ? [{ key: 'role', label: 'Role', width: '7rem', optional: true, render: ({ role }) => html`<${Role} role=${role} />` }] : []),
    { key: 'version', label: 'Version', width: '6rem', optional: true },
    { key: 'models', label: 'Models', optional: true, render: ({ models }) => (models.length ? html`<span class="host-words" title=${models.join(', ')}>${models.join(', ')}</span>` : html`<span class="muted">none loaded</span>`) },
    { key: 'sessions', label: 'Sessions', align: 'right', width: '6rem', render: ({ sessions }) => number(sessions) },
    { key: 'turns', label: 'Turns', align: 'right', width: '5rem', optional: !isAlone, render: ({ running_turns: turns }) => html`<span title="Turns that run">${number(turns)}</span>` },
    ...(hosts.some(({ load_percent: load }) => load !== undefined) ? [
      { key: 'load', label: 'Load', align: 'right', optional: true, render: ({ load_percent: load, waiting_requests: waiting }) => html`<span class=${load >= 100 ? 'bad-text' : ''} title="Share of its capacity for turns, or of the KV pages of its models, whichever is higher">${load === undefined ? '–' : percent(load / 100, 0)}</span>${waiting > 0 && html`<span class="muted small" title="Requests that wait for its models"> +${number(waiting)}</span>`}` }] : []),
    { key: 'heard', label: 'Heard', align: 'right', width: '7rem', optional: mayDrain || isAlone, render: ({ seen_ms_ago: ms }) => html`<${Heard} ms=${ms} />` },
    ...(isAlone ? [{ key: 'started', label: 'Started', align: 'right', width: '8rem', optional: true, render: ({ started_at: at }) => html`<${Time} ms=${Date.parse(at)} relative />` }] : []),
    ...(mayDrain ? [{ key: 'do', label: html`<span class="sr-only">Actions</span>`, align: 'right', width: '6rem', render: (host) => host.state === 'serving' && html`<${Button} small label=${`Drain ${host.name}`} onClick=${() => drain(host)}>Drain<//>` }] : []),
  ];
  return html`<div class="figures">
      <${Figure} label="Hosts that serve" value=${number(serving)} unit=${hosts.length > serving ? `of ${number(hosts.length)}` : undefined} tone=${serving ? '' : 'bad'} />
      <${Figure} label="Sessions" value=${number(sum(hosts, 'sessions'))} hint=${isAlone ? 'Sessions that are loaded' : 'Sessions that a host owns'} />
      <${Figure} label="Turns that run" value=${number(sum(hosts, 'running_turns'))} />
    </div>
    ${isAlone && html`<${Note} action=${html`<${Button} small href=${paths.docs('host/cluster')}>Read about clusters<//>`}>This host is not part of a cluster. Hosts that share a PostgreSQL database show up here.<//>`}
    ${versions.length > 1 && html`<${Note} tone="warn">The hosts run ${count(versions.length, 'version')}: ${versions.join(', ')}. This is normal only during an upgrade.<//>`}
    <${Section} title="Hosts" flush><${Table} label="Hosts" columns=${columns} rows=${hosts} rowKey=${({ number: id }) => id} height=${44}
      empty=${html`<${Empty} icon="cluster" title="No host is known">A host shows up here once it has written to the database.<//>`} /><//>
    ${!isAlone && may(caller, 'admin') && html`<${Transfers} />`}
    ${doomed && html`<${Confirm} title=${`Drain ${doomed.name}?`} action="Drain" onClose=${() => drain(null)} confirm=${async () => { await api.post(url`/v1/cluster/hosts/${doomed.number}/drain`); toast(`${doomed.name} drains`); onDrained(); }}>
      <p>It hands its sessions over to the other hosts, waits for turns that run, and then its process ends. Nothing is lost.</p>
      ${doomed.this && html`<p>It is the host that shows you this page: open the console of another one to see the rest.</p>`}
      ${serving < 2 && html`<${Note} tone="warn">No other host serves. Its sessions wait in the database until one does.<//>`}<//>`}`;
}

/** The KV pages that this host got from the others and gave them. A host whose pages are not shared has none. */
function Transfers() {
  const disk = usePolled((signal) => api.get('/v1/kv', { signal }), [], { everyMs: 2 * AGAIN_MS });
  return html`<${Section} title="Transfers of KV pages" about="Between this host and the others since it started.">
    <${Loaded} resource=${disk} lines=${2}>${({ peers }) => (peers ? html`<${Facts} rows=${[
      ['Prompts asked about', number(peers.questions)], ['Not found, or not whole', number(peers.missed)],
      ['Fetched from others', `${count(peers.fetched_pages, 'page')}, ${bytes(peers.fetched_bytes)}`], ['Given to others', `${count(peers.given_pages, 'page')}, ${bytes(peers.given_bytes)}`]]} />`
      : html`<p class="muted">This host shares no pages: it keeps none on disk, or <code>peers</code> under <code>[kv]</code> in skep.toml is off. See <${Link} href=${paths.docs('host/kv-on-disk')}>KV pages on disk<//>.</p>`)}<//>
  <//>`;
}

const Name = ({ host: { name, url: address, this: isThis } }) => html`${isThis || !isAddress(address) ? html`<strong class="host-words" title=${address}>${name || 'This host'}</strong>`
  : html`<a class="host-words" href=${`${address.replace(/\/+$/, '')}/ui/cluster`} target="_blank" rel="noreferrer" title=${`Open the console of ${name}, ${address}`}>${name}</a>`}
  ${isThis && name && html` <${Badge} tone="accent">this host<//>`}`;

const isAddress = (text) => /^https?:\/\//.test(text);

function State({ state, title }) {
  const [tone, text] = STATES[state] ?? [null, state];
  return html`<${Badge} tone=${tone} title=${title} dot>${text}<//>`;
}

/** A host renews its lease with each word to the database. */
const Heard = ({ ms }) => html`<span class=${ms > LEASE_MS / 2 ? 'bad-text' : ''} title=${`A host that has not been heard from for ${duration(LEASE_MS)} loses its lease, and the others take its sessions over.`}>${ms < 2000 ? 'now' : `${duration(ms)} ago`}</span>`;

function Role({ role }) {
  const [text, about] = ROLES[role ?? 'all'] ?? [role, ''];
  return html`<span title=${about}>${text}</span>`;
}
