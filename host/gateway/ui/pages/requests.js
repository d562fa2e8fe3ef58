// The log of requests to models, live; and one request with its details.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { clock, day, duration, iso, minute, number, short, time } from '../lib/format.js';
import { useDebounced, useResource, useStream } from '../lib/hooks.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { paths, setQuery } from '../lib/router.js';
import { Button, Code, Empty, ErrorNote, Note, Page, Skeleton, Table, Toggle, toast } from '../parts/index.js';
import { Choice, Live, save, Search, usePaged } from '../parts/paged.js';
import { costOf, RequestDetail, RequestState, TimeBar } from '../parts/request-detail.js';

const LIMIT = 200;
const KEPT = 5000;
const STATES = [['', 'Any result'], ['ok', 'Answered'], ['failed', 'Failed'], ['cancelled', 'Cancelled']];
const DAY_MS = 86_400_000;
const SETTING = '[requests]\nlog = "metadata"   # or "full": the messages and the answers as well\nretention_days = 7';

/** The clock for what is not older than a day, otherwise the day too. */
const Moment = ({ ms }) => html`<time datetime=${iso(ms)} title=${`${time(ms)} · ${iso(ms)}`}>${Date.now() - ms < DAY_MS ? clock(ms) : `${day(ms)}, ${minute(ms)}`}</time>`;

const hrefOf = ({ id }) => paths.request(id);

const COLUMNS = [
  { key: 'at', label: 'Time', width: '8rem', render: ({ at_ms: ms }) => Moment({ ms }) },
  { key: 'from', label: 'From', render: ({ agent, surface, tenant }) => (agent ? html`${agent.name} <span class="muted small optional">${agent.session}</span>` : html`${tenant} <span class="muted small">${surface}</span>`) },
  { key: 'model', label: 'Model', optional: true, render: ({ model }) => html`<span title=${model.asked === model.answered ? undefined : `asked for ${model.asked}`}>${model.answered}</span>` },
  { key: 'result', label: 'Result', render: RequestState },
  { key: 'tokens', label: 'Tokens', align: 'right', optional: true, render: ({ usage }) => (usage ? html`<span title=${`${number(usage.prompt_tokens)} in the prompt, ${number(usage.cached_tokens)} of them cached; ${number(usage.completion_tokens)} generated`}>${short(usage.prompt_tokens)} + ${short(usage.completion_tokens)}</span>` : '–') },
  { key: 'first', label: 'First', align: 'right', optional: true, render: ({ timing }) => (timing.first_token_ms === null ? '–' : duration(timing.first_token_ms)) },
  { key: 'total', label: 'Total', align: 'right', render: ({ timing }) => duration(timing.total_ms) },
  { key: 'bar', label: html`<span class="sr-only">Parts of the time</span>`, width: '96px', optional: true, render: ({ timing }) => TimeBar({ timing, small: true }) },
  { key: 'cost', label: 'Cost', align: 'right', optional: true, render: (row) => costOf(row) },
];

export default function Requests({ params, query, caller }) {
  return params.id ? html`<${RequestDetail} id=${params.id} caller=${caller} />` : html`<${Log} query=${query} caller=${caller} />`;
}

function Log({ query, caller }) {
  const isAdmin = may(caller, 'admin');
  const [typed, type] = useState({ q: query.q ?? '', model: query.model ?? '', agent: query.agent ?? '', tenant: query.tenant ?? '' });
  const settled = useDebounced(typed, 250);
  const [isLive, setLive] = useState(true);
  const filter = { model: settled.model.trim(), agent: settled.agent.trim(), tenant: settled.tenant.trim(), q: settled.q.trim(), status: query.status ?? '', session: query.session ?? '', key: query.key ?? '' };
  const shape = JSON.stringify(filter);
  const list = usePaged(async ({ signal, page }) => {
    const { data, next } = await api.get('/v1/requests', { signal, query: { ...filter, limit: LIMIT, cursor: page?.next } });
    return { data, next, has_more: next !== null };
  }, [shape]);
  useEffect(() => setQuery({ q: filter.q, model: filter.model, agent: filter.agent, tenant: filter.tenant }), [shape]);
  const config = useResource((signal) => (isAdmin ? api.get('/v1/config', { signal }) : null), [isAdmin]);

  // Records come one by one; they are put on top a few times a second. They wait while a page loads, because its answer replaces the rows
  // or follows the last one, and while the newest records are read, because those are older.
  const feed = useRef(null);
  useEffect(() => {
    const own = { fresh: [], timer: null, reads: 0, stop: new AbortController() };
    feed.current = own;
    return () => { own.stop.abort(); clearTimeout(own.timer); };
  }, [shape]);
  const flush = (own) => {
    own.timer = null;
    if (own.reads > 0 || list.isBusy()) { soon(own); return; }
    const newest = own.fresh.splice(0).reverse();
    list.setRows((rows) => {
      const known = new Set(rows.slice(0, 500).map(({ id }) => id));
      const added = newest.filter(({ id }) => !known.has(id) && known.add(id));
      if (!added.length) return rows;
      const next = [...added, ...rows];
      return next.length > Math.max(KEPT, rows.length) ? next.slice(0, Math.max(KEPT, rows.length)) : next;
    // The cursor of the next page belongs to the end that fell off.
    }, { hasMore: (was, rows) => was && rows.length < KEPT });
  };
  const soon = (own) => { own.timer ??= setTimeout(flush, 300, own); };
  const status = useStream(isLive && list.rows ? '/v1/requests' : null, {
    query: { ...filter, follow: true },
    // The stream begins with the next record. Those since the list was read, or since it was followed, are read again.
    async onOpen() {
      const { current: own } = feed;
      own.reads += 1;
      try {
        const { data } = await api.get('/v1/requests', { signal: own.stop.signal, query: { ...filter, limit: LIMIT } });
        own.fresh.unshift(...data.reverse());
      } catch { /* The page shows the records of the stream alone. */ }
      own.reads -= 1;
      if (!own.stop.signal.aborted) soon(own);
    },
    onEvent: ({ event, data }) => {
      if (event !== 'request') return;
      const { current: own } = feed;
      own.fresh.push(JSON.parse(data));
      if (own.fresh.length > KEPT) own.fresh.shift();
      soon(own);
    },
  });
  const exports = async () => {
    try { await save('requests.jsonl', await api.raw('GET', '/v1/requests', { query: { ...filter, format: 'jsonl' } })); } catch (error) { toast(error.message, { tone: 'bad' }); }
  };
  const field = (name, label) => html`<div class="filter-search narrow"><input type="text" aria-label=${label} placeholder=${label} value=${typed[name]} autocomplete="off" spellcheck=${false}
    onInput=${(event) => { const { value } = event.currentTarget; type((was) => ({ ...was, [name]: value })); }} /></div>`;
  const { rows, hasMore, loading, error } = list;
  const isFiltered = Object.values(filter).some(Boolean);
  const isOff = isAdmin && config.data && !isOn(config.data);
  return html`<${Page} title="Requests" wide about="Each request to a model: who asked, how it ended, how long it took and what it cost." actions=${html`
      <${Live} status=${!isLive ? { state: 'off' } : list.rows ? status : { state: list.error ? 'failed' : 'connecting' }} /><${Toggle} label="Follow" checked=${isLive} onChange=${setLive} /><${Button} small icon="download" onClick=${exports}>Export<//>`}>
    ${isOff && html`<${Off} />`}
    <div class="filters">
      ${caller.reads_bodies && html`<${Search} label="Search in the texts" value=${typed.q} onInput=${(text) => type((was) => ({ ...was, q: text }))} />`}
      ${field('model', 'Model')}${field('agent', 'Agent')}${isAdmin && field('tenant', 'Tenant')}
      <${Choice} label="Result" value=${filter.status} options=${STATES} onChange=${(value) => setQuery({ status: value })} />
      ${(filter.session || filter.key) && html`<${Button} small icon="close" onClick=${() => setQuery({ session: '', key: '' })}>${filter.session ? `Session ${filter.session}` : `Key ${filter.key}`}<//>`}
      <span class="filter-count muted small" role="status">${rows && `${number(rows.length)}${hasMore ? '+' : ''} ${rows.length === 1 ? 'request' : 'requests'}`}</span>
    </div>
    <${ErrorNote} error=${error} onRetry=${list.retry} />
    ${rows ? html`<div class="card flush"><${Table} key=${shape} label="Requests" columns=${COLUMNS} rows=${rows} rowKey=${({ id }) => id} hrefOf=${hrefOf} onEnd=${hasMore ? list.more : undefined} max="max(320px, calc(100dvh - 190px))"
        empty=${isFiltered ? html`<${Empty} icon="search" title="No request matches">Requests that match show up here as they end.<//>`
          : isOff ? html`<${Empty} icon="requests" title="The log is off">Once it is on, requests show up here as they end.<//>`
          : html`<${Empty} icon="requests" title="No requests yet">${isAdmin ? 'Requests to models show up here as they end.' : html`Requests to models show up here as they end, if the operator has switched the log on: <code>log</code> under <code>[requests]</code> in skep.toml.`}<//>`} />
        ${loading && rows.length > 0 && hasMore && html`<p class="loading-more" role="status">Loading more…</p>`}</div>`
      : !error && html`<${Skeleton} lines=${9} />`}
  <//>`;
}

/** Whether the settings log requests, of the host or of a tenant. */
const isOn = ({ settings }) => settings.some(({ section, key, value }) => (section === '[requests]' && key === 'log' && !/"?off"?/.test(value)) || (section.startsWith('[tenants.') && key === 'requests' && !/off/.test(value)));

const Off = () => html`<${Note} tone="info"><p><strong>The log of requests is off.</strong> To switch it on, write this to skep.toml, then start the host with <code>--config skep.toml</code>, or run <code>skep config reload</code> if it was started with one.</p>
  <${Code} text=${SETTING} lang="toml" /><//>`;
