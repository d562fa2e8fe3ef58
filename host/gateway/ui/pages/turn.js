// One turn: its timeline while it runs and afterwards, what it said and did, and its log.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { duration, number } from '../lib/format.js';
import { useAction, useNow, usePolled, useResource } from '../lib/hooks.js';
import { html, useEffect, useState } from '../lib/html.js';
import { paths } from '../lib/router.js';
import { Button, Copy, Empty, ErrorNote, Figure, JsonTree, Note, Page, Section, Skeleton, StateBadge, Time } from '../parts/index.js';
import { LogView } from '../parts/log-view.js';
import { TurnLimits } from '../parts/limits.js';
import { TokenBar } from '../parts/message.js';
import { Live, SessionName } from '../parts/paged.js';
import { cancelTurn, openApproval, stateOf, TurnOutput, useTurnFeed } from '../parts/turn-feed.js';
import { cachedShare, rowsOf, sums, Waterfall } from '../parts/waterfall.js';

const POLL_MS = 500;
const isOpen = (state) => state === 'waiting' || state === 'running';

export default function TurnPage({ params: { agent, session, turn }, caller }) {
  const path = url`/v1/agents/${agent}/sessions/${session}/turns/${turn}`;
  const status = useResource((signal) => api.get(path, { signal }), [path]);
  const [polls, setPolls] = useState(true);
  const timeline = usePolled((signal) => api.get(`${path}/timeline`, { signal }), [path], { everyMs: POLL_MS, when: polls });
  const feed = useTurnFeed(agent, session, turn, { onEnd: () => { status.reload(); timeline.reload(); } });
  const known = timeline.data ?? status.data;
  const state = timeline.data?.state ?? (feed.end ? (feed.end === 'done' ? 'done' : 'failed') : status.data?.state);
  const running = isOpen(state);
  useEffect(() => { setPolls(!timeline.error && (!timeline.data || isOpen(timeline.data.state))); }, [timeline.data, timeline.error]);
  const [cancel, cancelling] = useAction(() => cancelTurn(agent, session, turn));
  const n = timeline.data?.turn ?? status.data?.turn ?? feed.turn;
  const approval = openApproval(feed);
  const { message } = status.data ?? {};
  const said = message && (message.text || message.data !== null) ? message : null;
  const failure = status.data?.error ?? feed.error;
  const shown = stateOf(state, failure?.code, feed);
  const gone = status.error?.status === 404 && timeline.error ? status.error : null;

  return html`<${Page} wide name=${`Turn ${n ?? ''} of ${session}`} trail=${[['Sessions', paths.sessions()], [agent, paths.agent(agent)], [session, `${paths.session(agent, session)}?tab=turns`]]}
    title=${html`<span class="turn-title">${n ? `Turn ${number(n)}` : 'Turn'} ${state && html`<${StateBadge} state=${shown} />`}</span>`}
    about=${html`<span class="turn-id mono small">${turn}</span><${Copy} text=${turn} label="Copy the turn’s id" />`}
    actions=${html`${running && may(caller, 'invoke') && html`<${Button} small icon="stop" busy=${cancelling.busy} onClick=${() => cancel()}>Cancel<//>`}
      <${Button} small icon="sessions" href=${paths.session(agent, session)}>Open session<//>`}>
    <${ErrorNote} error=${cancelling.error} />
    ${gone ? html`<${ErrorNote} error=${gone} onRetry=${status.reload} />` : html`
      ${failure && shown !== 'cancelled' && html`<${ErrorNote} error=${failure} title="The turn failed." />`}
      ${approval && html`<${Note} tone="warn" icon="lock">This turn waits for a person: see <a href="#output">the call below</a>.<//>`}
      <${Figures} timeline=${timeline.data} status=${status.data} feed=${feed} running=${running} />
      <${Section} title="Timeline" actions=${running && html`<${Live} status=${feed.status} />`}>
        ${timeline.data ? html`<${Waterfall} timeline=${timeline.data} running=${running} />` : timeline.error ? html`<${ErrorNote} error=${timeline.error} onRetry=${timeline.reload} />` : html`<${Skeleton} lines=${6} />`}
      <//>
      ${timeline.data?.limits?.length > 0 && html`<${Section} title="Limits" about=${running ? 'What the turn has used of each so far.' : 'What the turn used of each.'}><${TurnLimits} limits=${timeline.data.limits} /><//>`}
      <div class="turn-columns">
        <div class="stack wide-gap">
        ${said && html`<${Section} title="Message">${said.text && html`<p class="pre">${said.text}</p>`}${said.data !== null && said.data !== undefined && html`<${JsonTree} value=${said.data} label="Data of the message" />`}<//>`}
        <${Section} title="Output" id="output">
          <div aria-live="polite" aria-busy=${running ? 'true' : 'false'}><${TurnOutput} feed=${feed} caller=${caller} />
            ${!feed.parts.length && html`<${Empty} title=${running ? 'Nothing yet' : 'This turn said nothing'}>${running ? 'Text and calls show up here as they come.' : null}<//>`}
            ${feed.status.state === 'failed' && html`<${ErrorNote} error=${feed.status.error} />`}</div>
          ${feed.done?.data !== undefined && feed.done?.data !== null && html`<div class="turn-data"><h3>Data</h3><${JsonTree} value=${feed.done.data} label="Data of the answer" open=${2} /></div>`}
        <//></div>
        <${Section} title="Log" flush>${n ? html`<${LogView} agent=${agent} session=${session} turn=${n} compact />` : html`<${Empty} title="Not begun">The log of a turn begins with it.<//>`}<//>
      </div>`}
    ${known && html`<p class="muted small">Accepted <${Time} ms=${known.accepted_at_ms} />${known.ended_at_ms && html`, ended <${Time} ms=${known.ended_at_ms} />`} · <${SessionName} id=${session} /></p>`}
  <//>`;
}

function Figures({ timeline, status, feed, running }) {
  const now = useNow(100, running);
  if (!timeline && !status) return html`<${Skeleton} lines=${2} />`;
  const source = timeline ?? status;
  const ended = source.ended_at_ms ?? (running ? now : null);
  const usage = status?.usage ?? feed.done?.usage;
  const total = timeline ? sums(timeline) : usage ? { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens, completion: usage.completion_tokens, firstMs: null } : { prompt: 0, cached: 0, completion: 0, firstMs: null };
  const first = total.firstMs ?? feed.done?.timing?.first_token_ms ?? null;
  return html`<div class="figures turn-figures">
    <${Figure} label=${running ? 'So far' : 'Duration'} value=${ended ? duration(Math.max(0, ended - source.accepted_at_ms)) : '–'} hint="From the acceptance of the message to the end" />
    <${Figure} label="Waited" value=${timeline ? duration(rowsOf(timeline, now)[0].to) : '–'} hint="Before the turn began" />
    <${Figure} label="First token" value=${first === null ? '–' : duration(first)} hint="From the beginning of the turn" />
    <${Figure} label="Timed calls" value=${timeline ? number(timeline.calls.length + timeline.left_out) : '–'} hint="The calls of the timeline. Others, such as reads of the state, count among the calls of the host." />
    <${Figure} label="From the cache" value=${cachedShare(total)} hint="Share of the prompt tokens" />
    <div class="figure turn-tokens"><span class="figure-label">Tokens</span><${TokenBar} prompt=${total.prompt} cached=${total.cached} completion=${total.completion} /></div>
  </div>`;
}
