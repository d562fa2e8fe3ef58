// Limits with what is used of them: those of an agent, of a turn, of a tenant and of the host.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { bytes, duration, money, number } from '../lib/format.js';
import { usePolled, useResource } from '../lib/hooks.js';
import { html } from '../lib/html.js';
import { Link, paths, setQuery } from '../lib/router.js';
import { Badge, Facts, Loaded, Meter, Note } from './basics.js';
import { Section } from './page.js';
import { Choice } from './paged.js';

const POLL_MS = 3000;

/** The limits of an agent, by what each is counted for. The use of a session is shown on its page. */
const OF_AGENT = [
  ['All sessions together', { tokens_per_day: 'Tokens today (UTC)', concurrent_turns: 'Turns that run or wait' }],
  ['Each session', { state_kb: 'State', session_kb: 'Stored in all', schedules: 'Schedules' }],
  ['Each turn', {
    tokens_per_turn: 'Tokens', turn_ms: 'Duration', cpu_ms: 'CPU time', approval_ms: 'Wait for a person', host_calls: 'Calls of the host', host_call_kb: 'Data of these calls',
    fetches: 'HTTP requests', fetch_kb: 'Data of these requests', log_kb: 'Log', events: 'Events',
  }],
  ['Each instance', { memory_mb: 'Memory', tables: 'Tables', table_elements: 'Entries of a table', instances: 'Core instances' }],
];
const KNOWN = new Set(OF_AGENT.flatMap(([, words]) => Object.keys(words)));

function quantity(name, value) {
  if (name.endsWith('_ms')) return duration(value);
  if (name.endsWith('_mb')) return bytes(value * 2 ** 20);
  return name.endsWith('_kb') ? bytes(value * 2 ** 10) : number(value);
}

/**
 * `asked` is what the manifest asks for; a limit below it is the host's. `used` is what the host tells an admin, `today` the tokens that the caller's tenant used, and
 * `recent` what the latest turns used, if the caller may know it.
 */
export function AgentLimits({ limits, asked, used, today, recent }) {
  const rest = Object.keys(limits).filter((name) => !KNOWN.has(name));
  const groups = rest.length ? [...OF_AGENT, ['Others', Object.fromEntries(rest.map((name) => [name, name]))]] : OF_AGENT;
  const ofHost = (name) => asked[name] > limits[name] && html` <${Badge} tone="warn" title=${`agent.toml asks for ${quantity(name, asked[name])}`}>the host’s<//>`;
  const row = (name, words) => {
    const highest = recent?.highest[name];
    if (highest !== undefined) {
      const last = `last ${quantity(name, recent.latest[name])}`;
      return html`<div key=${name} class="limit metered" title=${name}><${Meter} label=${words} note=${last} used=${highest} limit=${limits[name]} format=${(value) => quantity(name, value)} />${ofHost(name)}</div>`;
    }
    const taken = used?.[name] ?? (name === 'tokens_per_day' ? today : undefined);
    if (taken === undefined) return html`<div key=${name} class="limit" title=${name}><span>${words}</span><span class="num">${quantity(name, limits[name])}${ofHost(name)}</span></div>`;
    const label = used || name !== 'tokens_per_day' ? words : `${words}, of your tenant`;
    return html`<div key=${name} class="limit metered" title=${name}><${Meter} label=${label} used=${taken} limit=${limits[name]} format=${(value) => quantity(name, value)} />${ofHost(name)}</div>`;
  };
  return html`${groups.map(([title, words]) => html`<section key=${title} class="limit-group" aria-label=${title}><h3>${title}${recent && Object.keys(words).some((name) => recent.highest[name] !== undefined) && html`<span class="limit-about">, the highest use of ${recent.turns === 1 ? 'the last turn' : `the last ${number(recent.turns)} turns`}</span>`}</h3>
    ${Object.entries(words).map(([name, text]) => limits[name] !== undefined && row(name, text))}</section>`)}`;
}

/** The limits of a turn with what it has used of each; of a turn that runs, so far. */
export const TurnLimits = ({ limits }) => html`<div class="limit-meters turn-limits">${limits.map(({ name, used, limit }) => html`<div key=${name} title=${name}>
  <${Meter} label=${ofTurn(name)} used=${used} limit=${limit} format=${(value) => quantity(name, value)} /></div>`)}</div>`;

const ofTurn = (name) => OF_AGENT.map(([, words]) => words[name]).find(Boolean) ?? name;

const WORDS = {
  requests_per_minute: 'Requests a minute', request_burst: 'Requests at once', tokens_per_minute: 'Tokens a minute', tokens_per_day: 'Tokens today (UTC)', max_waiting_bytes_per_tenant: 'Messages that wait',
  max_agents: 'Agents', max_waiting_bytes: 'Messages that wait', max_instances: 'Instances in use', max_sessions_loaded: 'Sessions in memory', max_session_bytes: 'Memory of idle sessions',
  outbound_requests: 'Requests of agents', deliveries: 'Deliveries that wait', batches: 'Batches', batch_bytes: 'Requests and results of batches', files: 'Uploaded files', file_bytes: 'Size of uploaded files',
  response_bytes: 'Stored responses', request_log_bytes: 'Log of requests', kv_disk_bytes: 'KV pages on disk', max_queue: 'Requests that wait', kv_pages: 'KV pages in use',
};
const isBytes = (name) => /bytes/.test(name);

/** `rows` are limits as the API has them; `nameOf` names the key that a limit is of. */
const Meters = ({ rows, nameOf = (id) => id, children }) => html`<div class="limit-meters">
  ${rows.map(({ name, of, used, limit }) => html`<div key=${`${name} ${of}`} title=${name}><${Meter} label=${`${WORDS[name] ?? name}${of ? `, ${nameOf(of)}` : ''}`} used=${used} limit=${limit} format=${isBytes(name) ? bytes : number} /></div>`)}${children}</div>`;

/** The limits of the caller's tenant, or for an admin of the one that the address names. */
export function TenantLimits({ caller, tenant }) {
  const isAdmin = may(caller, 'admin');
  const shown = tenant || caller.tenant;
  const limits = usePolled((signal) => api.get('/v1/limits', { signal, query: { tenant } }), [tenant], { everyMs: POLL_MS });
  const tenants = useResource((signal) => (isAdmin ? api.get('/v1/tenants', { signal }) : { data: [] }), [isAdmin]);
  const keys = useResource((signal) => (isAdmin ? api.get('/v1/keys', { signal }) : { data: [] }), [isAdmin]);
  const names = [...new Set([caller.tenant, shown, ...(tenants.data?.data ?? []).map(({ name }) => name)])].sort();
  const nameOf = (id) => keys.data?.data.find((key) => key.id === id)?.name || id;
  return html`<${Section} title=${`Limits of the tenant ${shown}`} about="What all its keys, agents and batches use together, and how much that is now."
    actions=${names.length > 1 && html`<${Choice} label="Tenant" value=${shown} options=${names.map((name) => [name, name])} onChange=${(name) => setQuery({ tenant: name === caller.tenant ? '' : name })} />`}>
    <${Loaded} resource=${limits}>${({ data, money_per_day: budget }) => html`<div class="stack"><${Meters} rows=${data} nameOf=${nameOf}>
        ${budget && html`<div title="money_per_day"><${Meter} label="Money today (UTC)" used=${Number(budget.used)} limit=${Number(budget.limit)} format=${(value) => money(value, budget.currency)} /></div>`}<//>
      ${!budget && data.every(({ name }) => isBytes(name)) && html`<${Note}>This tenant has neither rates nor budgets. They are set under <code>[tenants.${shown}]</code> in skep.toml: see <${Link} href=${paths.docs('host/tenants-and-keys')}>Tenants and keys<//>.<//>`}</div>`}<//>
  <//>`;
}

/** The limits of the host and of each model, and the work that there is. */
export function HostLimits() {
  const status = usePolled((signal) => api.get('/v1/status', { signal }), [], { everyMs: POLL_MS });
  return html`<${Loaded} resource=${status}>${({ limits, models, sessions, queues, data, disk, uptime_s: up, version }) => html`
    <${Section} title="Limits of the host" about="What all tenants use together."><${Meters} rows=${limits.filter(({ of }) => !of)} /><//>
    ${models.map(({ name }) => html`<${Section} key=${name} title=${`Limits of ${name}`}><${Meters} rows=${limits.filter(({ of }) => of === name).map((limit) => ({ ...limit, of: undefined }))} /><//>`)}
    <${Section} title="Work"><${Facts} rows=${[['Sessions', number(sessions.total)], ['Turns that run', number(sessions.active_turns)], ['Wait for an approval', number(sessions.waiting_for_approval)], ['Messages in the queue', number(queues.messages)],
      ['Events', number(queues.events)], ['Webhooks', number(queues.webhooks)], ['Dead letters', number(queues.dead_letters)], ['Batches', number(queues.batches)], ['Requests of batches', number(queues.batch_requests)], ['Schedules and timers', number(queues.alarms)]]} /><//>
    <${Section} title="Host"><${Facts} rows=${[['Version', version], ['Up for', duration(up * 1000)], ['Database', disk ? bytes(disk.database_bytes + disk.wal_bytes) : data === 'postgres' ? 'PostgreSQL' : 'in memory'], ['Free on the disk', disk?.free_bytes !== null && disk?.free_bytes !== undefined ? html`<span class=${disk.is_low ? 'bad-text' : ''}>${bytes(disk.free_bytes)}</span>` : null]]} /><//>`}<//>`;
}
