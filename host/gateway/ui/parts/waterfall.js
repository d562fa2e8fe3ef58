// A turn as a waterfall: when it was accepted, how long it waited, each call of the host with its parts, and the commit.
import { duration, number, percent } from '../lib/format.js';
import { useMedia, useNow } from '../lib/hooks.js';
import { html, cx, useMemo, useState } from '../lib/html.js';
import { Badge, Facts } from './basics.js';
import { Icon } from './icon.js';
import { TokenBar } from './message.js';
import { Segments } from './paged.js';

const FIRST_ROWS = 200;
const ZOOMS = [[1, '1×'], [2, '2×'], [5, '5×'], [20, '20×']];
const LEGEND = [['wait', 'Waiting'], ['instance', 'Instance'], ['queue', 'Queue'], ['prefill', 'Prefill'], ['decode', 'Decode'], ['tool', 'Tool'], ['fetch', 'Fetch'], ['sleep', 'Sleep'], ['approval', 'Approval'], ['other', 'Other call'], ['commit', 'Commit']];
const LONG_STEPS = [0.5, 1, 2, 5, 10, 30, 60, 120, 360, 720, 1440, 2880, 10_080].map((minutes) => minutes * 60_000);
const KINDS = { fetch: 'fetch', sleep: 'sleep', 'tools.call': 'tool', 'tools.approve': 'approval', summarise: 'generate', generate: 'generate' };

/** Returns the rows of a timeline: `{id, name, label, from, to, isOpen, segments: [{kind, from, to}], call}`, times in ms since it was accepted. */
export function rowsOf(timeline, now) {
  const { accepted_at_ms: accepted, started_at_ms: started, ended_at_ms: ended, called_us: called, returned_us: returned, commit_us: commit, calls } = timeline;
  const end = ended ?? Math.max(now, started ?? accepted);
  const offset = (started ?? end) - accepted;
  const at = (us) => offset + us / 1000;
  const until = end - accepted;
  const bar = (id, name, kind, from, to, isOpen) => ({ id, name, from, to: Math.max(from, to), isOpen, segments: [{ kind, from, to: Math.max(from, to) }] });
  const rows = [bar('wait', 'Accepted, waited', 'wait', 0, offset, started === null)];
  if (started === null) return rows;
  rows.push(bar('instance', 'Instance', 'instance', offset, called === null ? (calls.length ? at(calls[0].began_us) : until) : at(called), called === null && !calls.length && !ended));
  for (const call of calls) rows.push(rowOf(call, at, until, !!ended));
  // The guest of a turn that waits for a person has returned too, but nothing is committed yet.
  const isSetAside = !ended && calls.some(({ took_us: took }) => took === null);
  if (returned !== null && returned !== undefined && !isSetAside) rows.push(bar('commit', 'Commit', 'commit', at(returned), Math.max(until, at(returned) + (commit ?? 0) / 1000), !ended));
  return rows;
}

function rowOf(call, at, until, isOver) {
  const from = at(call.began_us);
  const isOpen = call.took_us === null && !isOver;
  const to = call.took_us === null ? Math.max(from, until) : from + call.took_us / 1000;
  const kind = KINDS[call.name] ?? (call.label || call.name.includes('tool') ? 'tool' : isGeneration(call) ? 'generate' : 'other');
  const segments = [];
  if (kind === 'generate') {
    const queued = call.queue_us === null ? null : Math.min(to, from + call.queue_us / 1000);
    const first = call.first_token_us === null ? null : Math.min(to, Math.max(queued ?? from, from + call.first_token_us / 1000));
    segments.push({ kind: 'queue', from, to: queued ?? (first === null && isOpen ? to : from) });
    if (queued !== null || first !== null) segments.push({ kind: 'prefill', from: queued ?? from, to: first ?? to });
    if (first !== null) segments.push({ kind: 'decode', from: first, to });
    if (queued === null && first === null && !isOpen) segments.push({ kind: 'decode', from, to });
  } else segments.push({ kind, from, to });
  return { id: `call-${call.call}`, name: call.name, label: call.label, from, to, isOpen, call, segments: segments.filter((each) => each.to > each.from || segments.length === 1) };
}

const isGeneration = ({ usage, first_token_us: first, queue_us: queue }) => !!usage || first !== null || queue !== null;

/** Draws a timeline; while the turn is `running`, what has not ended grows with the clock. */
export function Waterfall({ timeline, running }) {
  const now = useNow(100, running);
  const [zoom, setZoom] = useState(1);
  const [chosen, choose] = useState(null);
  const [whole, showAll] = useState(false);
  const rows = rowsOf(timeline, now);
  const end = Math.max(1, ...rows.map(({ to }) => to));
  const waited = rows[0].to;
  const [withWait, setWithWait] = useState(null);
  // A long wait would leave no room for the turn itself.
  const canSkip = rows.length > 1 && waited > end * 0.25;
  const skips = canSkip && !(withWait ?? waited <= end * 0.6);
  const start = skips ? waited : 0;
  const span = Math.max(1, end - start);
  const shown = (whole ? rows : rows.slice(0, FIRST_ROWS)).filter(({ id }) => !(skips && id === 'wait'));
  const used = useMemo(() => new Set(rows.flatMap(({ segments }) => segments.map(({ kind }) => kind))), [rows.length, timeline.state]);
  const isNarrow = useMedia('(max-width: 640px)');
  const share = (ms) => `min(${Math.max(0, ((ms - start) / span) * 100)}%, 100% - 2px)`;
  return html`<div class="waterfall">
    <div class="wf-tools">
      <ul class="wf-legend" aria-label="Legend">${LEGEND.filter(([kind]) => used.has(kind)).map(([kind, text]) => html`<li key=${kind}><span class=${`wf-swatch k-${kind}`} aria-hidden="true"></span>${text}</li>`)}</ul>
      <div class="row">${canSkip && html`<${Segments} label="Begin at" name="wf-start" value=${skips ? 'start' : 'accepted'} options=${[['accepted', 'From acceptance'], ['start', 'From start']]} onChange=${(id) => setWithWait(id === 'accepted')} />`}
        <${Segments} label="Zoom" name="wf-zoom" value=${zoom} options=${ZOOMS} onChange=${setZoom} /></div>
    </div>
    <div class="wf-scroll" tabindex="0" role="group" aria-label="Timeline of the turn">
      <div class="wf-inner" style=${{ '--zoom': zoom }}>
        <div class="wf-axis" aria-hidden="true"><span class="wf-name"></span><div class="wf-track">${ticks(span, (isNarrow ? 2.6 : 5) * zoom).map((ms) => html`<span class="wf-tick" key=${ms} style=${{ left: `${(ms / span) * 100}%` }}>${ms ? duration(ms) : '0'}</span>`)}</div></div>
        <ol class="wf-rows">${shown.map((row) => html`<li key=${row.id} class=${cx('wf-row', row.isOpen && 'open', row.call?.failed && 'failed', row.call?.repeated && 'repeated')}>
          <button type="button" class="wf-button" aria-expanded=${chosen === row.id ? 'true' : 'false'} onClick=${() => choose(chosen === row.id ? null : row.id)}>
            <span class="wf-name"><${Icon} name=${chosen === row.id ? 'down' : 'right'} size=${12} /><span class="wf-words"><span class="wf-title">${row.name}</span>${row.label && row.label !== row.name && html`<span class="wf-label">${row.label}</span>`}</span>
              ${row.call?.failed && html`<${Icon} name="warning" size=${12} />`}<span class="wf-took">${row.isOpen ? '' : duration(row.to - row.from)}${row.isOpen && html`<span class="spinner"></span><span class="sr-only">running, so far ${duration(row.to - row.from)}</span>`}</span></span>
            <span class="wf-track" aria-hidden="true">${row.segments.map((part) => html`<span key=${part.kind} class=${`wf-bar k-${part.kind}`} title=${`${textOf(part.kind)}: ${duration(part.to - part.from)}`}
              style=${{ left: share(part.from), width: `${(Math.max(0, part.to - Math.max(part.from, start)) / span) * 100}%` }}></span>`)}</span>
          </button>
          ${chosen === row.id && html`<div class="wf-detail"><${Detail} row=${row} /></div>`}
        </li>`)}</ol>
      </div>
    </div>
    ${rows.length > FIRST_ROWS && !whole && html`<p class="more"><button type="button" class="link" onClick=${() => showAll(true)}>Show all ${number(rows.length)} rows</button></p>`}
    ${timeline.left_out > 0 && html`<p class="muted small wf-left-out">${number(timeline.left_out)} more calls were made than a timeline keeps.</p>`}
  </div>`;
}

const textOf = (kind) => LEGEND.find(([id]) => id === kind)?.[1] ?? kind;

function Detail({ row: { call, from, to, isOpen, segments, id } }) {
  const took = to - from;
  if (!call) {
    const about = { wait: 'From the acceptance of the message until its turn began: other turns of the session came first, or the host had no room.', instance: 'A fresh instance of the component, until the agent’s code was called.', commit: 'The messages, the state and the events of the turn, written at once.' }[id];
    return html`<p class="muted">${about} It took ${duration(took)}${isOpen ? ' so far' : ''}.</p>`;
  }
  const { usage, model, label, repeated, failed } = call;
  const length = (kind) => { const part = segments.find((each) => each.kind === kind); return part && duration(part.to - part.from); };
  const decode = segments.find(({ kind }) => kind === 'decode');
  const rate = usage && decode && decode.to > decode.from ? (usage.completion_tokens * 1000) / (decode.to - decode.from) : null;
  return html`<div class="stack tight">
    <div class="row">${repeated && html`<${Badge} tone="info">Read from the journal, not done again<//>`}${failed && html`<${Badge} tone="bad">Failed<//>`}</div>
    <${Facts} rows=${[['Began', `${duration(from)} after acceptance`], ['Took', `${duration(took)}${isOpen ? ' so far' : ''}`], ['Model', model], [call.name === 'fetch' ? 'Origin' : 'Tool', label], ['Queue', length('queue')], ['Prefill', length('prefill')], ['Decode', length('decode')],
      ['Speed', rate && `${number(rate)} tokens/s`]]} />
    ${usage && html`<${TokenBar} prompt=${usage.prompt_tokens} cached=${usage.prompt_tokens_details?.cached_tokens ?? 0} completion=${usage.completion_tokens} />`}
  </div>`;
}

/** Returns ticks at round times. */
function ticks(span, wanted) {
  const about = span / wanted;
  const power = 10 ** Math.floor(Math.log10(about));
  const step = [...[1, 2, 5, 10].map((n) => n * power).filter((each) => each <= 20_000), ...LONG_STEPS].find((each) => each >= about) ?? about;
  return Array.from({ length: Math.min(200, Math.floor(span / step) + 1) }, (_, n) => n * step).filter((ms) => ms <= span * (1 - Math.min(0.3, 0.5 / wanted)));
}

/** Sums up the tokens of a timeline, and how long its first token took. */
export function sums(timeline) {
  const all = timeline.calls.filter(({ usage }) => usage);
  const sum = (pick) => all.reduce((total, { usage }) => total + (pick(usage) ?? 0), 0);
  const first = timeline.calls.find(({ first_token_us: us }) => us !== null && us !== undefined);
  return {
    prompt: sum((usage) => usage.prompt_tokens), cached: sum((usage) => usage.prompt_tokens_details?.cached_tokens), completion: sum((usage) => usage.completion_tokens),
    firstMs: first ? (first.began_us + first.first_token_us) / 1000 : null,
  };
}

/** The share that came from the cache in words. */
export const cachedShare = ({ prompt, cached }) => (prompt ? percent(cached / prompt, 0) : '–');
