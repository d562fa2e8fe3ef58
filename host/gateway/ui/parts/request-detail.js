// One request to a model: who asked, how long each part took, which attempts were made, and what was said.
import { api, url } from '../lib/api.js';
import { duration, money, number } from '../lib/format.js';
import { useResource } from '../lib/hooks.js';
import { html } from '../lib/html.js';
import { Markdown } from '../lib/markdown.js';
import { Link, paths } from '../lib/router.js';
import { Badge, Copy, ErrorNote, Facts, Loaded, Note, Page, Section, Table, Time } from './index.js';
import { Call, MessageFrame, Reasoning, TokenBar, Value } from './message.js';
import { SessionName } from './paged.js';

const TONES = { ok: 'ok', failed: 'bad', cancelled: null };

/** How a request ended, in color. */
export const RequestState = ({ result: { status, error, finish_reason: reason } }) => Badge({ tone: TONES[status], dot: true, title: error ?? reason, children: status === 'ok' ? reason ?? 'ok' : error ?? status });

export const costOf = ({ cost }) => (cost ? money(Number(cost.amount), cost.currency) : '–');

export function RequestDetail({ id, caller }) {
  const request = useResource((signal) => api.get(url`/v1/requests/${id}`, { signal }), [id]);
  return html`<${Page} title="Request" name=${id} trail=${[['Requests', paths.requests()]]} about=${html`<span class="turn-id mono small">${id}</span><${Copy} text=${id} label="Copy the request’s id" />`}>
    <${Loaded} resource=${request} lines=${8}>${(data) => html`<${Detail} request=${data} caller=${caller} />`}<//>
  <//>`;
}

function Detail({ request, caller }) {
  const { at_ms: at, tenant, key, agent, surface, model, result, usage, attempts, timing, has_body: hasBody, body } = request;
  const speed = usage && timing.first_token_ms !== null && timing.total_ms > timing.first_token_ms ? (usage.completion_tokens * 1000) / (timing.total_ms - timing.first_token_ms) : null;
  return html`
    ${result.status === 'failed' && html`<${ErrorNote} error=${{ message: body?.error ?? 'The request failed.', code: result.error }} />`}
    <${Section} title="What and who"><${Facts} rows=${[
      ['Result', html`<${RequestState} result=${result} />`], ['At', html`<${Time} ms=${at} />`], ['Model', html`<code>${model.answered}</code>${model.asked !== model.answered && html` <span class="muted small">asked for ${model.asked}</span>`}`],
      ['Tenant', tenant], ['Key', key && html`<code>${key}</code>`], ['Came by', html`${surface}${result.streamed ? ', streamed' : ''}`],
      ['Agent', agent && html`<${Link} href=${paths.agent(agent.name)}>${agent.name}<//>`], ['Session', agent && html`<${Link} href=${paths.session(agent.name, agent.session)}><${SessionName} id=${agent.session} /><//>`],
      ['Turn', agent && html`<${Link} href=${paths.turn(agent.name, agent.session, agent.turn)}>Timeline of the turn<//>`], ['Cost', costOf(request)]]} /><//>
    <${Section} title="Time"><${TimeBar} timing=${timing} />
      <${Facts} rows=${[...partsOf(timing).map(([name, ms]) => [html`<span class=${`wf-swatch k-${name}`} aria-hidden="true"></span> ${PARTS[name]}`, duration(ms)]), ['First token', timing.first_token_ms !== null && duration(timing.first_token_ms)], ['In all', duration(timing.total_ms)], ['Speed', speed && `${number(speed)} tokens/s`]]} />
      ${usage && html`<${TokenBar} prompt=${usage.prompt_tokens} cached=${usage.cached_tokens} completion=${usage.completion_tokens} />`}
      ${usage?.estimated && html`<p class="muted small">The tokens are an estimate, because the request was cut off.</p>`}<//>
    ${attempts.length > 0 && html`<${Section} title="Attempts" flush><${Table} label="Attempts" rows=${attempts.map((attempt, n) => ({ ...attempt, n }))} rowKey=${({ n }) => n} columns=${[
      { key: 'upstream', label: 'Upstream', render: ({ upstream }) => upstream ?? 'this host' }, { key: 'model', label: 'Model' }, { key: 'outcome', label: 'Outcome', render: ({ outcome }) => html`<${Badge} tone=${outcome === 'ok' ? 'ok' : outcome === 'cancelled' ? null : 'bad'}>${outcome}<//>` },
      { key: 'status', label: 'HTTP', align: 'right', render: ({ status }) => status ?? '–' }, { key: 'ms', label: 'Took', align: 'right', render: ({ ms }) => duration(ms) }]} /><//>`}
    <${Section} title="What was said" flush>${body ? html`<${Texts} body=${body} />` : html`<div class="section-note"><${Note}>${hasBody ? html`The texts are stored. ${caller.reads_bodies ? 'They could not be read.' : 'Only a key that was made with --bodies reads them.'}`
      : html`The texts were not stored. <code>log = "full"</code> under <code>[requests]</code> in skep.toml stores them.`}<//></div>`}<//>`;
}

const PARTS = { queue: 'Queue', prefill: 'Prefill', decode: 'Decode', other: 'Until it ended' };

/** Returns the parts of a request’s time: `[[name, ms], …]`. One without a first token has no prefill and no decoding. */
function partsOf({ queue_ms: queue, first_token_ms: first, total_ms: total }) {
  const waited = queue ?? 0;
  const rest = first === null ? [['other', total - waited]] : [['prefill', first - waited], ['decode', total - first]];
  return [...(queue === null ? [] : [['queue', queue]]), ...rest].map(([name, ms]) => [name, Math.max(0, ms)]);
}

/** Queue, time to the first token and decoding as parts of one bar. */
export function TimeBar({ timing, small }) {
  const all = Math.max(1, timing.total_ms);
  const parts = partsOf(timing).filter(([, ms]) => ms > 0);
  return html`<div class=${small ? 'time-bar small' : 'time-bar'} role="img" aria-label=${parts.map(([name, ms]) => `${PARTS[name]} ${duration(ms)}`).join(', ')}>
    ${parts.map(([name, ms]) => html`<span key=${name} class=${`wf-swatch k-${name}`} title=${`${PARTS[name]} ${duration(ms)}`} style=${{ width: `${(ms / all) * 100}%` }}></span>`)}</div>`;
}

function Texts({ body }) {
  return html`<div class="said-list">
    ${body.omitted_messages > 0 && html`<p class="table-note muted small">${number(body.omitted_messages)} older messages were left out.</p>`}
    ${body.request_truncated && html`<p class="table-note muted small">The first message was cut.</p>`}
    ${body.messages.map((message, n) => html`<${Said} key=${n} message=${message} />`)}
    <${Said} message=${body.answer} />
    ${body.answer_truncated && html`<p class="table-note muted small">The answer was cut.</p>`}</div>`;
}

const Said = ({ message: { role, text, reasoning, name, calls = [] } }) => html`<${MessageFrame} role=${role} name=${name} copy=${text || undefined}>
  <${Reasoning} text=${reasoning} />
  ${text && (role === 'assistant' ? html`<${Markdown} text=${text} />` : role === 'tool' ? html`<${Value} value=${text} label="Result of a tool" />` : html`<p class="pre">${text}</p>`)}
  ${calls.map((call) => html`<${Call} key=${call.id} name=${call.name} args=${call.arguments} />`)}
  ${!text && !calls.length && !reasoning && html`<p class="muted">(empty)</p>`}<//>`;
