// All sessions, the newest first.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { number } from '../lib/format.js';
import { useDebounced, useNow, useResource } from '../lib/hooks.js';
import { html, useCallback, useEffect, useState } from '../lib/html.js';
import { Link, paths, setQuery } from '../lib/router.js';
import { Button, Empty, ErrorNote, Page, Skeleton, Table } from '../parts/index.js';
import { Ago, Choice, Search, SessionName, usePaged } from '../parts/paged.js';

const LIMIT = 200;
const HEAD = 50;
const KEPT = 2000;
const AGAIN_MS = 4000;
const keyOf = ({ agent, id }) => `${agent} ${id}`;

const COLUMNS = [
  { key: 'id', label: 'Session', render: SessionName },
  { key: 'agent', label: 'Agent', render: ({ agent }) => html`<${Link} class="plain" href=${paths.agent(agent)}>${agent}<//>` },
  { key: 'turns', label: 'Turns', align: 'right', width: '6rem', optional: true, render: ({ turns }) => number(turns) },
  { key: 'created', label: 'Begun', width: '9rem', optional: true, render: ({ created_at_ms: ms }) => Ago({ ms }) },
  { key: 'updated', label: 'Last turn', width: '7rem', render: ({ updated_at_ms: ms }) => Ago({ ms }) },
];

export default function Sessions({ caller, query }) {
  const [typed, type] = useState({ search: query.search ?? '', tenant: query.tenant ?? '' });
  const { search, tenant } = useDebounced(typed, 200);
  const agent = query.agent ?? '';
  const agents = useResource((signal) => api.get('/v1/agents', { signal }));
  const filter = { search: search.trim(), agent, tenant: tenant.trim() };
  const sessions = usePaged(({ signal, last }) => api.get('/v1/sessions', { signal, query: { ...filter, limit: LIMIT, before: last?.cursor } }), [search, agent, tenant]);
  useEffect(() => setQuery({ search: filter.search, tenant: filter.tenant }), [search, tenant]);

  // Sessions that had a turn since then come to the top, without losing one's place in the list.
  useEffect(() => {
    const stop = new AbortController();
    const timer = setInterval(async () => {
      if (document.hidden) return;
      try {
        const { data } = await api.get('/v1/sessions', { signal: stop.signal, query: { ...filter, limit: HEAD } });
        // A page that is open for long does not grow: what falls off the end is loaded again when one gets there.
        sessions.setRows((rows) => { const all = merged(rows, data); return all.length > Math.max(KEPT, rows.length) ? all.slice(0, Math.max(KEPT, rows.length)) : all; },
          { hasMore: (was, rows) => was || rows.length >= KEPT });
      } catch { /* The next round asks again. */ }
    }, AGAIN_MS);
    return () => { stop.abort(); clearInterval(timer); };
  }, [search, agent, tenant]);

  useNow(10_000);
  const hrefOf = useCallback((row) => paths.session(row.agent, row.id), []);
  const { rows, hasMore, loading, error } = sessions;
  const isFiltered = filter.search || agent || filter.tenant;
  const seesTenants = may(caller, 'admin') && !caller.agents;
  return html`<${Page} title="Sessions" about="Every conversation with an agent, the newest first." wide>
    <div class="filters">
      <${Search} label="Search by id" value=${typed.search} onInput=${(text) => type((was) => ({ ...was, search: text }))} />
      <${Choice} label="Agent" value=${agent} options=${[['', 'All agents'], ...names(agents.data, agent)]} onChange=${(name) => setQuery({ agent: name })} />
      ${seesTenants && html`<div class="filter-search narrow"><input type="text" aria-label="Tenant" placeholder="Tenant" value=${typed.tenant} autocomplete="off" spellcheck=${false}
        onInput=${(event) => { const { value } = event.currentTarget; type((was) => ({ ...was, tenant: value })); }} /></div>`}
      <span class="filter-count muted small" role="status">${rows && `${number(rows.length)}${hasMore ? '+' : ''} ${rows.length === 1 ? 'session' : 'sessions'}`}</span>
    </div>
    <${ErrorNote} error=${error} onRetry=${rows ? sessions.more : sessions.reload} />
    ${rows ? html`<div class="card flush"><${Table} label="Sessions" columns=${COLUMNS} rows=${rows} rowKey=${keyOf} hrefOf=${hrefOf} onEnd=${hasMore ? sessions.more : undefined} max="max(320px, calc(100dvh - 190px))"
        empty=${isFiltered ? html`<${Empty} icon="search" title="No session matches" action=${html`<${Button} onClick=${() => { type({ search: '', tenant: '' }); setQuery({ agent: '' }); }}>Show all<//>`}>The search looks for a part of the session’s id.<//>`
          : html`<${Empty} icon="sessions" title="No sessions yet" action=${html`<${Button} href=${paths.agents()}>Go to the agents<//>`}>A session begins with the first message to an agent.<//>`} />
        ${loading && rows.length > 0 && hasMore && html`<p class="loading-more" role="status">Loading more…</p>`}</div>`
      : !error && html`<${Skeleton} lines=${9} />`}
  <//>`;
}

const names = (agents, chosen) => {
  const known = (agents?.data ?? []).map(({ name }) => name).sort();
  return (chosen && !known.includes(chosen) ? [...known, chosen] : known).map((name) => [name, name]);
};

/** Puts the newest rows on top; rows that did not change stay the same objects, so that nothing is drawn again. */
function merged(rows, head) {
  const known = new Map(rows.map((row) => [keyOf(row), row]));
  const isSame = (a, b) => a && a.updated_at_ms === b.updated_at_ms && a.turns === b.turns;
  if (head.every((row, n) => rows[n] && keyOf(rows[n]) === keyOf(row) && isSame(rows[n], row))) return rows;
  const fresh = new Set(head.map(keyOf));
  return [...head.map((row) => (isSame(known.get(keyOf(row)), row) ? known.get(keyOf(row)) : row)), ...rows.filter((row) => !fresh.has(keyOf(row)))];
}
