// One session: its messages, state, turns and log.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { bytes, count, duration, number, short } from '../lib/format.js';
import { useIsDrawn, usePolled, useResource } from '../lib/hooks.js';
import { html, useCallback, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { Link, navigate, paths, setQuery } from '../lib/router.js';
import { recall, remember } from '../lib/store.js';
import { Button, Confirm, Copy, Dialog, Empty, ErrorNote, Field, JsonTree, Loaded, Meter, More, Page, Skeleton, StateBadge, Table, Tabs, Time, toast } from '../parts/index.js';
import { Composer } from '../parts/composer.js';
import { LogView } from '../parts/log-view.js';
import { MessageFrame, StoredMessage, TokenBar, Value } from '../parts/message.js';
import { Choice, save, SessionName, usePaged } from '../parts/paged.js';
import { Transcript } from '../parts/transcript.js';
import { cancelTurn, sentKey, stateOf, TurnOutput, useTurnFeed } from '../parts/turn-feed.js';

const TURNS = 100;

export default function SessionPage({ params: { agent, session }, query, caller }) {
  const path = url`/v1/agents/${agent}/sessions/${session}`;
  const tab = ['state', 'turns', 'logs'].includes(query.tab) ? query.tab : 'messages';
  const [dialog, open] = useState(null);
  const isDrawn = useIsDrawn();
  const detail = useResource((signal) => api.get(path, { signal }), [path]);
  const owner = useResource((signal) => (detail.data ? api.get(url`/v1/agents/${agent}`, { signal }) : null), [agent, !detail.data]);
  const { data, error } = detail;
  const isNew = !data && error?.code === 'session_not_found';
  const live = useLive(path, agent, session, detail);
  const exports = async () => {
    try { await save(`${agent}-${session}.json`, await api.raw('GET', `${path}/export`)); } catch (cause) { toast(cause.message, { tone: 'bad' }); }
  };
  const shown = { id: tab, agent, session, path, caller, data, isNew, live, query, limits: owner.data?.limits };
  return html`<${Page} fill name=${session} trail=${[['Sessions', paths.sessions()], [agent, paths.agent(agent)]]} title=${html`<${SessionName} id=${session} />`}
    actions=${data && html`
      ${may(caller, 'invoke') && html`<${Button} small icon="fork" onClick=${() => open('fork')}>Fork<//>`}
      <${Button} small icon="download" onClick=${exports}>Export<//>
      ${may(caller, 'invoke') && html`<${Button} small icon="trash" onClick=${() => open('delete')}>Delete<//>`}`}>
    <div class="session">
      ${error && !isNew && error.code !== 'session_not_found' && html`<div class="session-error"><${ErrorNote} error=${error} onRetry=${detail.reload} /></div>`}
      ${data && html`<${Summary} data=${data} limits=${owner.data?.limits} />`}
      ${!data && !error && html`<div class="session-error"><${Skeleton} lines=${6} /></div>`}
      ${(data || isNew) && html`<${Tabs} label="Parts of the session" active=${tab} onSelect=${(id) => setQuery({ tab: id === 'messages' ? '' : id })}
        tabs=${[{ id: 'messages', label: 'Messages', count: data ? number(messagesOf(data)) : null }, { id: 'state', label: 'State', count: data?.state_keys.length }, { id: 'turns', label: 'Turns', count: data ? number(data.turns) : null }, { id: 'logs', label: 'Logs' }]}>
        <${PANELS[tab]} ...${shown} key=${tab} /><//>`}
    </div>
    ${dialog === 'fork' && html`<${Fork} agent=${agent} session=${session} path=${path} onClose=${() => open(null)} />`}
    ${dialog === 'delete' && html`<${Confirm} title="Delete this session?" action="Delete" onClose=${() => open(null)} confirm=${async () => { await api.del(path); toast(`Deleted ${session}`); if (isDrawn.current) navigate(paths.sessions(), { replace: true }); }}>
      <p><strong><${SessionName} id=${session} /></strong> of ${agent} goes with its messages, state, turns and log lines. This cannot be undone; an export keeps a copy.</p><//>`}
  <//>`;
}

const messagesOf = ({ conversations }) => conversations.reduce((sum, { messages }) => sum + messages, 0);

function Summary({ data, limits }) {
  const { usage, created_at_ms: created, updated_at_ms: updated, state_bytes: size, conversations } = data;
  const models = [...new Set(conversations.map(({ model }) => model))];
  return html`<div class="session-summary">
    <p class="session-words"><span>Begun <${Time} ms=${created} relative /></span><span>last turn <${Time} ms=${updated} relative /></span>${models.length > 0 && html`<span>${models.join(', ')}</span>`}<span title="The limit is state_kb of the agent">${bytes(size)}${limits?.state_kb > 0 && ` of ${bytes(limits.state_kb * 1024)}`} of state</span></p>
    <${TokenBar} compact prompt=${usage.prompt_tokens} cached=${usage.prompt_tokens_details.cached_tokens} completion=${usage.completion_tokens} />
  </div>`;
}

/** The turns that run now: those that were sent from here, and those that run when the page is opened. */
function useLive(path, agent, session, detail) {
  const [open, setOpen] = useState([]);
  const reloads = useRef({ asked: 0, shown: 0 });
  const add = (turn) => setOpen((was) => (was.some(({ id }) => id === turn.id) ? was : [...was, turn]));
  /** Shows a turn that somebody else began; what was said to it comes with its status. */
  const begin = (id, signal) => {
    const sent = recall(sentKey(id), null);
    add({ id, ...sent });
    if (!sent) api.get(`${path}/turns/${encodeURIComponent(id)}`, { signal }).then(({ message }) => { if (message) setOpen((was) => was.map((turn) => (turn.id === id ? { ...turn, text: message.text, data: message.data ?? undefined } : turn))); }, () => {});
  };
  useEffect(() => {
    const stop = new AbortController();
    setOpen([]);
    api.get(`${path}/turns`, { signal: stop.signal, query: { limit: 10 } }).then(({ data }) => {
      for (const { turn_id: id, state } of [...data].reverse()) if (state === 'waiting' || state === 'running') begin(id, stop.signal);
    }, () => { /* The page shows a running turn only if the host lists turns. */ });
    return () => stop.abort();
  }, [path]);
  const send = async (message) => {
    const { turn_id: id } = await api.post(`${path}/messages`, message, { query: { detach: true } });
    remember(sentKey(id), message);
    add({ id, text: message.text, data: message.data });
  };
  const close = (id) => { remember(sentKey(id), null); setOpen((was) => was.filter((turn) => turn.id !== id)); };
  /** Reads the session again. An older answer does not replace a newer one. */
  const reload = async () => {
    const asked = (reloads.current.asked += 1);
    const data = await api.get(path);
    if (asked > reloads.current.shown) { reloads.current.shown = asked; detail.setData(data); }
    return data;
  };
  return { open, send, close, reload };
}

function Messages({ agent, session, path, caller, data, isNew, live, query }) {
  const conversations = data?.conversations ?? [];
  const names = conversations.map(({ name }) => name);
  const name = names.includes(query.conversation) ? query.conversation : names.includes('main') || !names.length ? 'main' : names[0];
  const total = conversations.find((each) => each.name === name)?.messages ?? 0;
  const handle = useRef(null);
  const load = useCallback(async (after, limit) => (await api.get(`${path}/messages`, { query: { conversation: name, after, limit, tokens: true } })).data, [path, name]);
  const ended = useCallback(async (id) => {
    try {
      const next = await live.reload();
      await handle.current?.refresh(next.conversations.find((each) => each.name === name)?.messages ?? 0);
    } catch { /* What has been said stays in view as it was streamed. */ }
    live.close(id);
  }, [name, live]);
  const tail = live.open.length > 0 && html`${live.open.map((turn) => html`<${LiveTurn} key=${turn.id} ...${{ agent, session, turn, caller, onEnd: ended }} />`)}`;
  return html`<div class="session-messages">
    ${conversations.length > 1 && html`<div class="filters"><${Choice} label="Conversation" value=${name} options=${conversations.map((each) => [each.name, `${each.name} · ${count(each.messages, 'message')}`])} onChange=${(next) => setQuery({ conversation: next === 'main' ? '' : next })} /></div>`}
    <${Transcript} key=${name} label="Messages" total=${total} load=${load} handle=${handle} tail=${tail} render=${(message, find) => html`<${StoredMessage} message=${message} find=${find} />`}
      empty=${html`<${Empty} icon="sessions" title=${isNew ? 'This session does not exist yet' : 'No messages yet'}>${may(caller, 'invoke') ? 'It begins with its first message, which you can send below.' : 'It begins with the first message to it.'}<//>`} />
    ${may(caller, 'invoke') && html`<${Composer} onSend=${live.send} placeholder=${`Message ${agent}`} focus=${isNew} />`}
  </div>`;
}

/** A turn that has not ended, below the messages. */
function LiveTurn({ agent, session, turn, caller, onEnd }) {
  const feed = useTurnFeed(agent, session, turn.id, { onEnd: ({ end }) => { if (end === 'done') onEnd(turn.id); } });
  const [stopping, stop] = useState(false);
  const state = feed.end === 'error' ? stateOf('failed', feed.error.code) : feed.turn === null ? 'waiting' : stateOf('running', null, feed);
  return html`<div class="live-turn" aria-live="polite" aria-busy=${feed.end ? 'false' : 'true'}>
    ${(turn.text || turn.data !== undefined) && html`<${MessageFrame} role="user">${turn.text && html`<p class="pre">${turn.text}</p>`}${turn.data !== undefined && html`<${JsonTree} value=${turn.data} label="Data" />`}<//>`}
    <${MessageFrame} role="assistant">
      <${TurnOutput} feed=${feed} caller=${caller} />
      ${!feed.parts.length && !feed.end && html`<p class="muted">${state === 'waiting' ? 'Waiting for its turn…' : 'Working…'}</p>`}
      ${state === 'failed' && html`<${ErrorNote} error=${feed.error} title="The turn failed." />`}
      ${feed.status.state === 'failed' && html`<${ErrorNote} error=${feed.status.error} />`}
      <div class="live-foot"><${StateBadge} state=${state} /><${Link} href=${paths.turn(agent, session, turn.id)}>Timeline<//>
        ${feed.status.state === 'waiting' && html`<span class="muted small">Reconnecting…</span>`}
        ${!feed.end && may(caller, 'invoke') && html`<${Button} small icon="stop" busy=${stopping} onClick=${() => { stop(true); cancelTurn(agent, session, turn.id).catch((error) => { stop(false); toast(error.message, { tone: 'bad' }); }); }}>Stop<//>`}
        ${feed.end === 'error' && html`<${Button} small kind="quiet" icon="close" onClick=${() => onEnd(turn.id)}>Dismiss<//>`}</div>
    <//>
  </div>`;
}

function State({ path, isNew, data, limits }) {
  const state = usePaged(({ signal, last }) => (isNew ? { data: [], has_more: false } : api.get(`${path}/state`, { signal, query: { after: last?.key, limit: 100 } })), [path, isNew]);
  const stored = data && data.conversations.reduce((sum, each) => sum + each.bytes, data.state_bytes);
  return html`<div class="session-panel">
    ${data && limits && html`<div class="limit-meters"><${Meter} label="State" used=${data.state_bytes} limit=${limits.state_kb * 1024} format=${bytes} />
      <${Meter} label="State and conversations, stored" used=${stored} limit=${limits.session_kb * 1024} format=${bytes} /></div>`}
    <${Loaded} resource=${state}>${(rows) => (rows.length ? html`<ul class="state-list">
      ${rows.map((row) => html`<${Entry} key=${row.key} row=${row} />`)}</ul>
      ${state.hasMore && html`<${More} shown=${rows.length} noun="key" busy=${state.loading} onMore=${state.more} />`}`
    : html`<${Empty} icon="table" title="No state">What the agent keeps for this session under a key shows up here.<//>`)}<//></div>`;
}

function Entry({ row: { key, bytes: size, kind, value, text } }) {
  const isTree = value !== null && typeof value === 'object';
  return html`<li class="state-entry"><div class="state-head"><code class="state-key">${key}</code><span class="muted small">${bytes(size)}</span>${kind !== 'binary' && html`<${Copy} text=${text ?? JSON.stringify(value, null, 2)} label=${`Copy the value of ${key}`} />`}</div>
    ${kind === 'binary' ? html`<p class="muted">${count(size, 'byte')} that are not text</p>`
      : kind === 'text' ? html`<p class="value-text pre mono" tabindex="0">${text}</p>`
      : isTree ? html`<${JsonTree} value=${value} open=${Object.keys(value).length > 24 ? 0 : 1} copy=${false} label=${`Value of ${key}`} />`
      : html`<${Value} value=${typeof value === 'string' ? JSON.stringify(value) : value} label=${`Value of ${key}`} />`}</li>`;
}

const TURN_COLUMNS = [
  { key: 'turn', label: 'Turn', render: ({ turn, turn_id: id }) => (turn === null || turn === undefined ? html`<span class="muted">${String(id).slice(0, 8)}</span>` : number(turn)) },
  { key: 'state', label: 'State', render: ({ state, code }) => html`<${StateBadge} state=${stateOf(state, code)} />${code && code !== 'cancelled' && html` <code class="muted small optional">${code}</code>`}` },
  { key: 'duration', label: 'Duration', align: 'right', render: ({ accepted_at_ms: from, ended_at_ms: to }) => (to ? duration(to - from) : html`<span class="muted">so far <${Time} ms=${from} relative /></span>`) },
  { key: 'tokens', label: 'Tokens', align: 'right', optional: true, render: ({ usage }) => (usage ? html`<span title=${`${number(usage.prompt_tokens)} in the prompts, ${number(usage.prompt_tokens_details.cached_tokens)} of them cached; ${number(usage.completion_tokens)} generated`}>${short(usage.prompt_tokens)} + ${short(usage.completion_tokens)}</span>` : '–') },
  { key: 'accepted', label: 'Accepted', align: 'right', optional: true, render: ({ accepted_at_ms: ms }) => html`<${Time} ms=${ms} />` },
];

function Turns({ agent, session, path, isNew, live }) {
  const turns = usePaged(({ signal, last }) => (isNew ? { data: [], has_more: false } : api.get(`${path}/turns`, { signal, query: { before: last?.turn_id, limit: TURNS } })), [path, isNew]);
  const isBusy = live.open.length > 0 || turns.rows?.some(({ state }) => state === 'running' || state === 'waiting');
  // While a turn runs the first page is read again, and the rows that it has are replaced.
  usePolled(async (signal) => {
    if (!isBusy || !turns.rows) return null;
    const { data } = await api.get(`${path}/turns`, { signal, query: { limit: 20 } });
    turns.setRows((rows) => [...data, ...rows.filter(({ turn_id: id }) => !data.some((row) => row.turn_id === id))]);
    return null;
  }, [path], { everyMs: 1500, when: !!isBusy });
  return html`<div class="session-panel flush"><${Loaded} resource=${turns}>${(rows) => html`<${Table} label="Turns" columns=${TURN_COLUMNS} rows=${rows} rowKey=${(row) => row.turn_id} hrefOf=${(row) => paths.turn(agent, session, row.turn_id)}
    onEnd=${turns.hasMore ? turns.more : undefined} max="100%" empty=${html`<${Empty} icon="clock" title="No turns yet">Each message to the agent runs a turn.<//>`} />`}<//></div>`;
}

const Logs = ({ agent, session }) => html`<div class="session-panel fixed"><${LogView} agent=${agent} session=${session} /></div>`;

const PANELS = { messages: Messages, state: State, turns: Turns, logs: Logs };

function Fork({ agent, session, path, onClose }) {
  const plain = session.slice(session.indexOf('/') + 1);
  const tenant = session.slice(0, session.indexOf('/') + 1);
  const [id, setId] = useState(`${tenant}${plain}-fork`);
  const [state, set] = useState({ busy: false, error: null });
  const isDrawn = useIsDrawn();
  const field = useMemo(() => (name, note) => html`<input id=${name} aria-describedby=${note} value=${id} autocomplete="off" spellcheck=${false} onInput=${(event) => setId(event.currentTarget.value)} />`, [id]);
  const run = async (event) => {
    event.preventDefault();
    set({ busy: true, error: null });
    try {
      const copy = await api.post(`${path}/fork`, { session: id.trim() });
      toast('Forked');
      if (!isDrawn.current) return;
      onClose();
      navigate(paths.session(agent, copy.id ?? id.trim()));
    } catch (error) { set({ busy: false, error }); }
  };
  return html`<${Dialog} title="Fork this session" onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} kind="primary" icon="fork" busy=${state.busy} disabled=${!id.trim()} onClick=${run}>Fork<//>`}>
    <p class="muted">The copy has the same messages and state, and shares what the model has computed. The two are independent from here on.</p>
    <form onSubmit=${run}><${Field} label="Id of the copy">${field}<//></form>
    <${ErrorNote} error=${state.error} />
  <//>`;
}
