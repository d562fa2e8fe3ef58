// The page of use and its cost, the host's limits, keys and secrets.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { bytes, duration, number } from '../lib/format.js';
import { usePolled } from '../lib/hooks.js';
import { html } from '../lib/html.js';
import { setQuery } from '../lib/router.js';
import { Facts, Loaded, Meter, Note, Page, Section, Tabs } from '../parts/index.js';
import { Keys } from '../parts/keys-panel.js';
import { Secrets } from '../parts/secrets-panel.js';
import { UsageReport } from '../parts/usage-report.js';

export default function Usage({ caller, query }) {
  const isAdmin = may(caller, 'admin');
  const tabs = [{ id: 'usage', label: 'Usage' }, ...(isAdmin ? [{ id: 'limits', label: 'Limits' }, { id: 'keys', label: 'Keys' }, { id: 'secrets', label: 'Secrets' }] : [])];
  const wanted = ['limits', 'keys', 'secrets'].includes(query.tab) ? query.tab : 'usage';
  const tab = tabs.some(({ id }) => id === wanted) ? wanted : 'usage';
  return html`<${Page} title="Usage" wide about=${isAdmin ? 'What models were used for and what it cost, and who may use them.' : `What the models were used for by the tenant ${caller.tenant}, and what it cost.`}>
    ${wanted !== tab && html`<${Note}>Limits, keys and secrets concern all tenants: a key with the role “admin” sees them.<//>`}
    ${tabs.length > 1 ? html`<${Tabs} label="Parts of the usage" tabs=${tabs} active=${tab} onSelect=${(id) => setQuery({ tab: id === 'usage' ? '' : id, since: '', by: '', unit: '', tenant: '' }, { replace: false })}>
      ${tab === 'usage' && html`<${UsageReport} caller=${caller} query=${query} />`}
      ${tab === 'limits' && html`<${Limits} />`}
      ${tab === 'keys' && html`<${Keys} caller=${caller} />`}
      ${tab === 'secrets' && html`<${Secrets} />`}<//>` : html`<${UsageReport} caller=${caller} query=${query} />`}
  <//>`;
}

const WORDS = {
  max_agents: 'Agents', max_waiting_bytes: 'Messages that wait', max_instances: 'Instances at the same time', deliveries: 'Deliveries in flight', max_queue: 'Requests that wait for a model', kv_pages: 'KV pages', max_connections: 'Connections',
};
const format = (name) => (name.endsWith('bytes') ? bytes : number);

function Limits() {
  const status = usePolled((signal) => api.get('/v1/status', { signal }), [], { everyMs: 3000 });
  return html`<${Loaded} resource=${status}>${({ limits, sessions, queues, data, disk, uptime_s: up, version }) => html`<div class="stack wide-gap">
    <${Section} title="Limits of the host" about="How much of each is used now.">
      <div class="limit-meters">${limits.map(({ name, used, limit }) => html`<div key=${name} title=${name}><${Meter} label=${WORDS[name] ?? name} used=${used} limit=${limit} format=${format(name)} /></div>`)}</div><//>
    <${Section} title="Work"><${Facts} rows=${[['Sessions', number(sessions.total)], ['Turns that run', number(sessions.active_turns)], ['Wait for an approval', number(sessions.waiting_for_approval)], ['Messages in the queue', number(queues.messages)],
      ['Events', number(queues.events)], ['Webhooks', number(queues.webhooks)], ['Dead letters', number(queues.dead_letters)], ['Batches', number(queues.batches)], ['Requests of batches', number(queues.batch_requests)], ['Schedules and timers', number(queues.alarms)]]} /><//>
    <${Section} title="Host"><${Facts} rows=${[['Version', version], ['Up for', duration(up * 1000)], ['Database', disk ? bytes(disk.database_bytes + disk.wal_bytes) : data === 'postgres' ? 'PostgreSQL' : 'in memory'], ['Free on the disk', disk?.free_bytes !== null && disk?.free_bytes !== undefined ? html`<span class=${disk.is_low ? 'bad-text' : ''}>${bytes(disk.free_bytes)}</span>` : null]]} /><//>
  </div>`}<//>`;
}
