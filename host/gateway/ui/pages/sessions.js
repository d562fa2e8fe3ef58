// All sessions, the newest first, or those in which words were said.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { number } from '../lib/format.js';
import { useDebounced, useNow, useResource } from '../lib/hooks.js';
import { html, useCallback, useEffect, useMemo, useState } from '../lib/html.js';
import { Link, paths, setQuery } from '../lib/router.js';
import { Button, Empty, ErrorNote, Page, Skeleton, Table } from '../parts/index.js';
import { Ago, Choice, Search, SessionName, usePaged } from '../parts/paged.js';

const LIMIT = 200;
const HEAD = 50;
const KEPT = 2000;
const AGAIN_MS = 4000;
/** Maximum number of requests of one search, unless it has found a screenful before. */
const SEARCHES = 5;
const ENOUGH = 30;
const keyOf = ({ agent, id }) => `${agent} ${id}`;

const COLUMNS = [
  { key: 'id', label: 'Session', render: SessionName },
  { key: 'agent', label: 'Agent', render: ({ agent }) => html`<${Link} class="plain" href=${paths.agent(agent)}>${agent}<//>` },
  { key: 'turns', label: 'Turns', align: 'right', width: '6rem', optional: true, render: ({ turns }) => number(turns) },
  { key: 'created', label: 'Begun', width: '9rem', optional: true, render: ({ created_at_ms: ms }) => Ago({ ms }) },
  { key: 'updated', label: 'Last turn', width: '7rem', render: ({ updated_at_ms: ms }) => Ago({ ms }) },
];

/** The columns of a search: what was said takes the room of the numbers. */
const foundColumns = (words) => [
  COLUMNS[0],
  { ...COLUMNS[1], optional: true },
  { key: 'said', label: 'Said', render: ({ said }) => said && html`<span title=${`${said.role}, message ${said.number} of ${said.conversation}: ${said.excerpt}`}><${Marked} text=${said.excerpt} words=${words} /></span>` },
  { ...COLUMNS.at(-1), optional: true },
];

/** Searches until there is a screenful, a few requests at most: with each one, the host searches a part of the sessions. */
async function searched(query, signal, page) {
  const data = [];
  let before = page?.searched_to;
  for (let n = 1; ; n += 1) {
    const next = await api.get('/v1/sessions', { signal, query: { ...query, limit: LIMIT, before } });
    data.push(...next.data);
    before = next.searched_to;
    if (!next.has_more || data.length >= ENOUGH || n === SEARCHES) return { data, has_more: next.has_more, searched_to: before };
  }
}

export default function Sessions({ caller, query }) {
  const [typed, type] = useState({ search: query.search ?? '', text: query.text ?? '', tenant: query.tenant ?? '' });
  const { search, text, tenant } = useDebounced(typed, 300);
  const agent = query.agent ?? '';
  const agents = useResource((signal) => api.get('/v1/agents', { signal }));
  const filter = { search: search.trim(), text: text.trim(), agent, tenant: tenant.trim() };
  const isSearch = filter.text !== '';
  const sessions = usePaged(({ signal, last, page }) => (isSearch ? searched(filter, signal, page) : api.get('/v1/sessions', { signal, query: { ...filter, limit: LIMIT, before: last?.cursor } })), [filter.search, filter.text, agent, filter.tenant]);
  useEffect(() => setQuery({ search: filter.search, text: filter.text, tenant: filter.tenant }), [filter.search, filter.text, filter.tenant]);

  // Sessions that had a turn since then come to the top, without losing one's place in the list. A search is not repeated.
  useEffect(() => {
    if (isSearch) return undefined;
    const stop = new AbortController();
    const timer = setInterval(async () => {
      if (document.hidden) return;
      try {
        const { data } = await api.get('/v1/sessions', { signal: stop.signal, query: { ...filter, limit: HEAD } });
        // A page that is open for long does not grow: what falls off the end is loaded again when one gets there. A page that loads now follows the last row.
        sessions.setRows((rows) => { const all = merged(rows, data); return all.length > Math.max(KEPT, rows.length) && !sessions.isBusy() ? all.slice(0, Math.max(KEPT, rows.length)) : all; },
          { hasMore: (was, rows) => was || rows.length >= KEPT });
      } catch { /* The next round asks again. */ }
    }, AGAIN_MS);
    return () => { stop.abort(); clearInterval(timer); };
  }, [filter.search, isSearch, agent, filter.tenant]);

  useNow(10_000);
  const hrefOf = useCallback((row) => paths.session(row.agent, row.id), []);
  const { rows, hasMore, loading, error } = sessions;
  const isFiltered = filter.search || isSearch || agent || filter.tenant;
  const words = useMemo(() => filter.text.split(/\s+/).filter(Boolean), [filter.text]);
  const columns = useMemo(() => (isSearch ? foundColumns(words) : COLUMNS), [words, isSearch]);
  const all = html`<${Button} onClick=${() => { type({ search: '', text: '', tenant: '' }); setQuery({ agent: '' }); }}>Show all<//>`;
  const older = html`<${Button} small busy=${loading} onClick=${sessions.more}>Search older sessions<//>`;
  const seesTenants = may(caller, 'admin') && !caller.agents;
  return html`<${Page} title="Sessions" about="Every conversation with an agent, the newest first." wide>
    <div class="filters">
      <${Search} label="Search by id" value=${typed.search} onInput=${(value) => type((was) => ({ ...was, search: value }))} />
      <${Search} label="Search what was said" value=${typed.text} onInput=${(value) => type((was) => ({ ...was, text: value }))} />
      <${Choice} label="Agent" value=${agent} options=${[['', 'All agents'], ...names(agents.data, agent)]} onChange=${(name) => setQuery({ agent: name })} />
      ${seesTenants && html`<div class="filter-search narrow"><input type="text" aria-label="Tenant" placeholder="Tenant" value=${typed.tenant} autocomplete="off" spellcheck=${false}
        onInput=${(event) => { const { value } = event.currentTarget; type((was) => ({ ...was, tenant: value })); }} /></div>`}
      <span class="filter-count muted small" role="status">${loading && isSearch ? 'Searching…' : rows && `${number(rows.length)}${hasMore ? '+' : ''} ${rows.length === 1 ? 'session' : 'sessions'}`}</span>
    </div>
    <${ErrorNote} error=${error} onRetry=${sessions.retry} />
    ${rows ? html`<div class="card flush"><${Table} key=${JSON.stringify(filter)} label="Sessions" columns=${columns} rows=${rows} rowKey=${keyOf} hrefOf=${hrefOf} onEnd=${hasMore && !isSearch ? sessions.more : undefined} max="max(320px, calc(100dvh - 190px))"
        empty=${isSearch ? html`<${Empty} icon="search" title=${loading ? 'Searching…' : hasMore ? 'Nothing found in the newer sessions' : 'No session has these words'} action=${!loading && (hasMore ? older : all)}>One message has to have all of the words, in upper or lower case. Messages of people, models and tools are searched.<//>`
          : isFiltered ? html`<${Empty} icon="search" title="No session matches" action=${all}>The search looks for a part of the session’s id.<//>`
          : html`<${Empty} icon="sessions" title="No sessions yet" action=${html`<${Button} href=${paths.agents()}>Go to the agents<//>`}>A session begins with the first message to an agent.<//>`} />
        ${isSearch && rows.length > 0 && hasMore && html`<div class="more"><span class="muted">Older sessions were not searched yet</span>${older}</div>`}
        ${!isSearch && loading && rows.length > 0 && hasMore && html`<p class="loading-more" role="status">Loading more…</p>`}</div>`
      : !error && html`<${Skeleton} lines=${9} />`}
  <//>`;
}

/** A text in which words are marked, in upper or lower case. */
function Marked({ text, words }) {
  const literal = (word) => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
  const parts = text.split(new RegExp(`(${words.map(literal).join('|')})`, 'iu'));
  return parts.map((part, n) => (n % 2 ? html`<mark key=${n}>${part}</mark>` : part));
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
