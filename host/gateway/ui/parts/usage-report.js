// The report of the use of models: by day as bars, and by agent, model, tenant, key or session as a table.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { count, money, number, percent, short } from '../lib/format.js';
import { useResource } from '../lib/hooks.js';
import { html, useMemo } from '../lib/html.js';
import { Link, paths, setQuery } from '../lib/router.js';
import { Bars } from './bars.js';
import { Button, Empty, Figure, Loaded, Note, Section, Table, toast } from './index.js';
import { Choice, save, Segments, SessionName } from './paged.js';

const RANGES = [['7d', '7 days'], ['31d', '31 days'], ['90d', '90 days'], ['365d', 'a year']];
const GROUPS = [['agent', 'Agent'], ['model', 'Model'], ['tenant', 'Tenant'], ['key', 'Key'], ['session', 'Session']];
const DAY_MS = 86_400_000;
const shortDay = new Intl.DateTimeFormat(undefined, { month: 'short', day: 'numeric', timeZone: 'UTC' });
const longDay = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeZone: 'UTC' });

const costOf = ({ cost }, currency) => Number(cost.find((each) => each.currency === currency)?.amount ?? 0);
const savedOf = ({ cost }, currency) => Number(cost.find((each) => each.currency === currency)?.saved_by_cache ?? 0);

export function UsageReport({ caller, query }) {
  const isAdmin = may(caller, 'admin');
  const since = RANGES.some(([id]) => id === query.since) ? query.since : '31d';
  const by = GROUPS.some(([id]) => id === query.by) ? query.by : 'agent';
  const tenant = query.tenant ?? '';
  const unit = query.unit === 'money' ? 'money' : 'tokens';
  const asked = { since, tenant };
  const days = useResource((signal) => api.get('/v1/usage', { signal, query: { ...asked, by: 'day' } }), [since, tenant], { keep: true });
  const groups = useResource((signal) => api.get('/v1/usage', { signal, query: { ...asked, by } }), [since, tenant, by], { keep: true });
  const tenants = useResource((signal) => (isAdmin ? api.get('/v1/usage', { signal, query: { by: 'tenant', since } }) : { data: [] }), [since, isAdmin], { keep: true });
  const csv = async () => {
    try { await save(`usage-${by}.csv`, await api.raw('GET', '/v1/usage', { query: { ...asked, by, format: 'csv' } })); } catch (error) { toast(error.message, { tone: 'bad' }); }
  };
  return html`<div class="stack wide-gap">
    <div class="filters"><${Segments} label="Days" name="since" value=${since} options=${RANGES} onChange=${(id) => setQuery({ since: id === '31d' ? '' : id })} />
      ${isAdmin && (tenants.data?.data.length > 1 || tenant) && html`<${Choice} label="Tenant" value=${tenant} options=${[['', 'All tenants'], ...(tenants.data?.data ?? []).filter(({ name }) => name).map(({ name }) => [name, name])]} onChange=${(name) => setQuery({ tenant: name })} />`}
      <span class="muted small filter-count">Days are in UTC</span></div>
    <${Loaded} resource=${days} lines=${8}>${(report) => html`<${Days} report=${report} unit=${unit} />`}<//>
    <${Section} title="In detail" flush actions=${html`<${Segments} label="Group by" name="by" value=${by} options=${GROUPS.filter(([id]) => isAdmin || id !== 'tenant')} onChange=${(id) => setQuery({ by: id === 'agent' ? '' : id })} /><${Button} small icon="download" onClick=${csv}>CSV<//>`}>
      <${Loaded} resource=${groups}>${(report) => html`<${Groups} report=${report} />`}<//><//>
  </div>`;
}

function Days({ report, unit }) {
  const { total, data } = report;
  const currencies = total.cost.map(({ currency }) => currency);
  const currency = currencies[0] ?? 'USD';
  const showsMoney = unit === 'money' && currencies.length > 0;
  const bars = useMemo(() => {
    const known = new Map(data.map((line) => [line.name, line]));
    const all = [];
    for (let at = Date.parse(report.since); at <= Date.parse(report.until); at += DAY_MS) {
      const line = known.get(new Date(at).toISOString().slice(0, 10));
      const values = !line ? (showsMoney ? [0] : [0, 0, 0])
        : showsMoney ? [costOf(line, currency)] : [line.cached_input_tokens, line.input_tokens - line.cached_input_tokens, line.output_tokens];
      all.push({ label: shortDay.format(at), title: longDay.format(at), values });
    }
    return all;
  }, [report, showsMoney, currency]);
  if (!total.requests) return html`<div class="card"><${Empty} icon="usage" title="Nothing was used in this time">What models are asked for is counted here, by day, agent, model and tenant.<//></div>`;
  return html`<div class="figures">
      <${Figure} label="Requests" value=${short(total.requests)} hint=${number(total.requests)} />
      <${Figure} label="Prompt tokens" value=${short(total.input_tokens)} hint=${number(total.input_tokens)} />
      <${Figure} label="From the cache" value=${total.input_tokens ? percent(total.cached_input_tokens / total.input_tokens) : '–'} hint=${`${number(total.cached_input_tokens)} tokens`} />
      <${Figure} label="Generated tokens" value=${short(total.output_tokens)} hint=${number(total.output_tokens)} />
      <${Figure} label="Cost" value=${total.cost.length ? total.cost.map((each) => money(Number(each.amount), each.currency)).join(' + ') : '–'} hint=${total.cost.length ? undefined : 'No model has a price'} />
      <${Figure} label="Saved by the cache" value=${total.cost.length ? total.cost.map((each) => money(Number(each.saved_by_cache), each.currency)).join(' + ') : '–'} hint="Cached tokens times the difference of the prices" />
    </div>
    ${total.unknown_cost && html`<${Note}>The cost does not include ${total.unknown_cost.requests ? count(total.unknown_cost.requests, 'request') : count(total.unknown_cost.cache_write_input_tokens, 'token')} to ${total.unknown_cost.requests ? '' : 'the cache of '}${total.unknown_cost.models.join(', ')}, which had no price then. Prices stand in skep.toml; see <${Link} href=${paths.docs('host/usage')}>Usage and prices<//>.<//>`}
    <div class="card"><${Bars} title=${showsMoney ? `${currency} by day` : 'Tokens by day'} bars=${bars} format=${showsMoney ? (value) => money(value, currency) : number} axis=${showsMoney ? (value) => money(value, currency) : short}
      series=${showsMoney ? [{ label: 'Cost', tone: 1 }] : [{ label: 'Prompt, cached', tone: 3 }, { label: 'Prompt, computed', tone: 2 }, { label: 'Generated', tone: 1 }]} />
      ${currencies.length > 0 && html`<div class="bars-unit"><${Segments} label="Unit" name="unit" value=${showsMoney ? 'money' : 'tokens'} options=${[['tokens', 'Tokens'], ['money', 'Money']]} onChange=${(id) => setQuery({ unit: id === 'tokens' ? '' : id })} /></div>`}</div>`;
}

const NOBODY = { agent: 'requests without an agent', key: 'requests without a key', session: 'older sessions', model: 'unknown', tenant: 'unknown' };

function Groups({ report: { by, data } }) {
  const rows = useMemo(() => [...data].sort((a, b) => b.input_tokens + b.output_tokens - a.input_tokens - a.output_tokens), [data]);
  const top = rows.length ? rows[0].input_tokens + rows[0].output_tokens : 1;
  const currencies = [...new Set(data.flatMap(({ cost }) => cost.map(({ currency }) => currency)))];
  const name = (line) => {
    if (line.name === null) return html`<span class="muted">${NOBODY[by]}</span>`;
    if (by === 'agent') return html`<${Link} href=${paths.agent(line.name)}>${line.name}<//>`;
    if (by === 'session' && line.agent) return html`<${Link} href=${paths.session(line.agent, line.name)}><${SessionName} id=${line.name} /><//> <span class="muted small">${line.agent}</span>`;
    return html`<span>${line.name}</span>`;
  };
  const columns = [
    { key: 'name', label: GROUPS.find(([id]) => id === by)?.[1], render: name },
    { key: 'bar', label: 'Share', width: '22%', optional: true, render: (line) => html`<span class="share" aria-hidden="true"><span class="tone-3" style=${{ width: `${(line.cached_input_tokens / top) * 100}%` }}></span><span class="tone-2" style=${{ width: `${((line.input_tokens - line.cached_input_tokens) / top) * 100}%` }}></span><span class="tone-1" style=${{ width: `${(line.output_tokens / top) * 100}%` }}></span></span>` },
    { key: 'requests', label: 'Requests', align: 'right', optional: true, render: ({ requests }) => number(requests) },
    { key: 'input', label: 'Prompt', align: 'right', render: ({ input_tokens: n }) => html`<span title=${number(n)}>${short(n)}</span>` },
    { key: 'cached', label: 'Cached', align: 'right', optional: true, render: ({ input_tokens: n, cached_input_tokens: k }) => (n ? percent(k / n, 0) : '–') },
    { key: 'output', label: 'Generated', align: 'right', render: ({ output_tokens: n }) => html`<span title=${number(n)}>${short(n)}</span>` },
    ...currencies.flatMap((currency) => [
      { key: `cost ${currency}`, label: currencies.length > 1 ? `Cost, ${currency}` : 'Cost', align: 'right', render: (line) => (line.cost.some((each) => each.currency === currency) ? html`<span title=${line.unknown_cost ? 'More, of models without a price' : undefined}>${money(costOf(line, currency), currency)}${line.unknown_cost ? '+' : ''}</span>` : '–') },
      { key: `saved ${currency}`, label: 'Saved', align: 'right', optional: true, render: (line) => money(savedOf(line, currency), currency) }]),
  ];
  return html`<${Table} label="Usage in detail" columns=${columns} rows=${rows} rowKey=${(line) => `${line.agent ?? ''} ${line.name}`} empty=${html`<${Empty} icon="usage" title="Nothing was used in this time" />`} />`;
}
