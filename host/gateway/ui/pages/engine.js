// The engine: what every model computes, as curves over the last hour, live; how evenly experts and ranks work; whose pages fill the KV cache; and where
// the memory goes.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { decimal, duration, number, percent, short } from '../lib/format.js';
import { html, useEffect, useMemo, useState } from '../lib/html.js';
import { usePolled, useResource } from '../lib/hooks.js';
import { usePageKeys } from '../lib/keys.js';
import { setQuery } from '../lib/router.js';
import { Badge, Empty, ErrorNote, Figure, Page, Section, Skeleton, Tabs } from '../parts/index.js';
import { Chart } from '../parts/chart.js';
import { Experts } from './engine/experts.js';
import { Memory, Pages } from './engine/memory.js';
import { cutOut, newest, recent, useHistory } from './engine/history.js';
import { Replicas } from './engine/replicas.js';

const SPANS = [[300, '5 min'], [900, '15 min'], [3600, '1 h']];
const perSecond = (value) => `${short(value)}/s`;
const ms = (value) => duration(value);
const axisMs = (value) => (value >= 1000 ? `${short(value / 1000)} s` : `${short(value)} ms`);
const whole = (value) => number(Math.round(value));
const quantiles = (name, ...all) => all.map((quantile, n) => ({ column: `${name}_${quantile}`, label: quantile, tone: [3, 1, 4][all.length === 2 && n === 1 ? 2 : n] }));

/** The curves: title, columns with their tones, and how values are written. */
const CHARTS = [
  { title: 'Tokens', about: 'a second', format: perSecond, axis: short, series: [
    { column: 'generated_tokens_s', label: 'generated', tone: 1, area: true }, { column: 'prompt_tokens_s', label: 'prompt', tone: 2 }, { column: 'cached_tokens_s', label: 'from the cache', tone: 3 }] },
  { title: 'Sequences', about: 'running and waiting', format: whole, axis: short, series: [
    { column: 'running', label: 'running', tone: 1, area: true }, { column: 'waiting', label: 'waiting', tone: 4 }] },
  { title: 'Time to the first token', format: ms, axis: axisMs, series: quantiles('first_token_ms', 'p50', 'p90', 'p99') },
  { title: 'Time between tokens', format: ms, axis: axisMs, series: quantiles('inter_token_ms', 'p50', 'p90', 'p99') },
  { title: 'Time of a step', format: ms, axis: axisMs, series: quantiles('step_ms', 'p50', 'p99') },
  { title: 'Time in the queue', format: ms, axis: axisMs, series: quantiles('queue_ms', 'p50', 'p99') },
  { title: 'Batch', about: 'sequences in a step, mean', format: (value) => decimal(value), axis: short, series: [{ column: 'batch_sequences', label: 'sequences', tone: 2, area: true }] },
  { title: 'Steps', about: 'a second', format: perSecond, axis: short, series: [
    { column: 'steps_s', label: 'steps', tone: 5, area: true }, { column: 'preemptions_s', label: 'preemptions', tone: 4 }] },
  { title: 'Cache hits', about: 'share of prompt tokens', format: (value) => percent(value), axis: (value) => percent(value, 0), range: [0, 1], series: [{ column: 'cache_hit', label: 'hits', tone: 3, area: true }] },
  { title: 'KV pages', format: whole, axis: short, series: [
    { column: 'pages_used', label: 'used', tone: 1, area: true }, { column: 'pages_cached', label: 'cached', tone: 3 }, { column: 'pages_total', label: 'all', tone: 6, dash: true }] },
];

export default function Engine({ caller, query }) {
  const [chosenS, setSpan] = useState(null);
  const { history, error, reload, live } = useHistory();
  // A host that has just started has only a few minutes to show.
  const spanS = chosenS ?? (history?.at.length > 450 ? 900 : 300);
  usePageKeys(useMemo(() => SPANS.map(([seconds, label], n) => ({ keys: String(n + 1), does: `Show ${label}`, run: () => setSpan(seconds) })), []));
  const models = history?.models ?? [];
  const model = models.find(({ name }) => name === query.model) ?? models[0];
  return html`<${Page} title="Engine" wide about="What the models of this host compute, second by second." actions=${html`
      <span class="live" role="status">${live === 'open' ? html`<span class="pulse" aria-hidden="true"></span>Live` : live === 'failed' ? 'Not live' : html`<span class="spinner" aria-hidden="true"></span>Reconnecting…`}</span>
      <div class="segments" role="radiogroup" aria-label="Time span">${SPANS.map(([seconds, label]) => html`<label key=${seconds}><input class="sr-only" type="radio" name="span" checked=${spanS === seconds} onChange=${() => setSpan(seconds)} /><span>${label}</span></label>`)}</div>`}>
    <${ErrorNote} error=${error} onRetry=${reload} />
    ${!history && !error && html`<${Placeholder} />`}
    ${history && !models.length && html`<${Empty} icon="engine" title="No model computes on this host">A model shows here once it is loaded: <code>skep up --model NAME</code>, or a request to a model that loads by itself. Models of other servers compute elsewhere.<//>`}
    ${model && (models.length > 1
      ? html`<${Tabs} label="Models" tabs=${models.map(({ name }) => ({ id: name, label: name }))} active=${model.name} onSelect=${(name) => setQuery({ model: name })}><${Model} key=${model.name} ...${{ model, history, spanS, caller }} /><//>`
      : html`<${Model} key=${model.name} ...${{ model, history, spanS, caller }} />`)}
  <//>`;
}

const Placeholder = () => html`<div class="chart-grid">${CHARTS.slice(0, 6).map(({ title }) => html`<div class="card" key=${title}><${Skeleton} lines=${6} height="216px" /></div>`)}</div>`;

function Model({ model, history, spanS, caller }) {
  const [replica, setReplica] = useState(null);
  const columns = model.each_replica[replica] ?? model.columns;
  const load = useLoad(model.name);
  const now = history.at.at(-1);
  const from = now - spanS * 1000;
  const cut = useMemo(() => cutOut(history, columns, spanS, spanS > 900 ? 5 : 1), [history.version, model.name, replica, spanS]);
  return html`<div class="engine-model">
    <p class="row engine-facts"><strong>${model.name}</strong><${Badge}>${model.device}<//>${model.each_replica.length > 1 && html`<select aria-label="Replica" value=${replica ?? ''} onChange=${({ currentTarget: { value } }) => setReplica(value === '' ? null : Number(value))}>
        <option value="">All ${model.each_replica.length} replicas</option>${model.each_replica.map((_, n) => html`<option key=${n} value=${n}>Replica ${n + 1}</option>`)}</select>`}
      <${Badge}>context ${number(model.context_length)}<//><${Badge}>${number(model.page_tokens)} tokens a page<//></p>
    <${Now} columns=${columns} />
    <div class="chart-grid">${CHARTS.map(({ title, series, ...chart }) => html`<div class="card" key=${title}><${Chart} title=${title} sync="engine" at=${cut.at} from=${from} to=${now} ...${chart}
      series=${series.map(({ column, ...line }) => ({ ...line, values: cut.columns[column] ?? [] }))} /></div>`)}</div>
    <${Replicas} model=${model} times=${load?.ranks ?? []} />
    ${load?.experts.length > 0 && html`<${Experts} layers=${load.experts} />`}
    <div class="engine-memory">
      ${may(caller, 'admin') && html`<${PagesOf} model=${model.name} />`}
      <${Section} title="Memory" about="By kind, when the model was loaded"><${Memory} memory=${model.memory ?? []} /><//>
    </div>
  </div>`;
}

/** Returns the work of a model's experts and ranks since it was loaded, or null. A model that has neither is asked for once. */
function useLoad(model) {
  const [polls, setPolls] = useState(true);
  const { data, error } = usePolled((signal) => api.get('/v1/engine/load', { query: { model }, signal }), [model], { everyMs: 3000, when: polls, keep: false });
  useEffect(() => {
    if (data) setPolls(data.experts.length + data.ranks.length > 0);
    else if (error && !error.isAway) setPolls(false);
  }, [data, error]);
  return data;
}

/** The newest values in words. */
function Now({ columns }) {
  const last = (name) => newest(columns, name);
  const share = last('pages_total') ? last('pages_used') / last('pages_total') : null;
  return html`<div class="figures">
    <${Figure} label="Generated" value=${short(last('generated_tokens_s') ?? 0)} unit="tokens/s" />
    <${Figure} label="Running" value=${number(last('running') ?? 0)} hint="Sequences" />
    <${Figure} label="Waiting" value=${number(last('waiting') ?? 0)} tone=${last('waiting') > 0 ? 'warn' : ''} hint="Sequences" />
    <${Figure} label="First token, p50" value=${duration(recent(columns, 'first_token_ms_p50'))} hint="Mean of the last minute" />
    <${Figure} label="Inter-token, p50" value=${duration(recent(columns, 'inter_token_ms_p50'))} hint="Mean of the last minute" />
    <${Figure} label="Cache hits" value=${percent(recent(columns, 'cache_hit'), 0)} hint="Mean of the last minute" />
    <${Figure} label="KV pages used" value=${percent(share, 0)} tone=${share > 0.95 ? 'bad' : share > 0.8 ? 'warn' : ''} hint=${`${number(last('pages_used'))} of ${number(last('pages_total'))}`} />
  </div>`;
}

function PagesOf({ model }) {
  const pages = useResource((signal) => api.get('/v1/engine/pages', { query: { model }, signal }), [model]);
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) pages.reload(); }, 3000);
    return () => clearInterval(timer);
  }, [model]);
  return html`<${Section} title="KV pages by owner" about="Each square is a share of the cache; the same color is the same owner">
    <${ErrorNote} error=${pages.error} onRetry=${pages.reload} />
    ${pages.data ? html`<${Pages} pages=${pages.data} />` : !pages.error && html`<${Skeleton} lines=${5} />`}
  <//>`;
}
