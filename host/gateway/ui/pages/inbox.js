// The page of what waits for a person: approvals, deliveries that failed for good, and batches with failures.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { count, number } from '../lib/format.js';
import { useAction, usePolled } from '../lib/hooks.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { inboxCount } from '../lib/inbox.js';
import { Link, paths, setQuery } from '../lib/router.js';
import { Badge, Button, Empty, ErrorNote, Loaded, More, Note, Page, StateBadge, Table, Tabs, Time, toast } from '../parts/index.js';
import { ApprovalCard } from '../parts/approval.js';
import { save, SessionName, usePaged } from '../parts/paged.js';

const APPROVALS = 1000;
const LETTERS = 100;

export default function Inbox({ caller, query }) {
  const isAdmin = may(caller, 'admin');
  const approvals = usePolled((signal) => api.get('/v1/approvals', { signal, query: { limit: APPROVALS } }), [], { everyMs: 2500 });
  const letters = usePaged(({ signal, last }) => (isAdmin ? api.get('/v1/webhooks/dead-letters', { signal, query: { before: last?.id, limit: LETTERS } }) : { data: [], has_more: false }), [isAdmin]);
  // The newest ones are read again: deliveries fail while one looks, and those that are delivered again go. An answer from
  // before a delivery still has its letter, and does not count.
  const delivered = useRef(0);
  usePolled(async (signal) => {
    if (!isAdmin || !letters.rows) return null;
    const before = delivered.current;
    const head = await api.get('/v1/webhooks/dead-letters', { signal, query: { limit: LETTERS } });
    if (delivered.current !== before) return null;
    letters.setRows((rows) => merged(rows, head), { hasMore: (was) => (head.has_more ? was : false) });
    return null;
  }, [], { everyMs: 4000, when: isAdmin && !!letters.rows });
  const batches = usePaged(({ signal, last }) => api.get('/v1/batches', { signal, query: { after: last?.id, limit: 100 } }), []);
  const bad = batches.rows?.filter(isBad);
  const tab = ['letters', 'batches'].includes(query.tab) ? query.tab : 'approvals';
  useEffect(() => {
    if (approvals.data) inboxCount.set((was) => ({ ...was, approvals: approvals.data.data.length, ...(letters.rows ? { deadLetters: letters.rows.length, more: letters.hasMore } : {}) }));
  }, [approvals.data, letters.rows]);
  const counted = (rows, more) => (rows ? `${number(rows.length)}${more ? '+' : ''}` : null);
  return html`<${Page} title="Inbox" about="What waits for a person.">
    <${Tabs} label="Parts of the inbox" active=${tab} onSelect=${(id) => setQuery({ tab: id === 'approvals' ? '' : id })}
      tabs=${[{ id: 'approvals', label: 'Approvals', count: counted(approvals.data?.data) }, { id: 'letters', label: 'Dead letters', count: isAdmin ? counted(letters.rows, letters.hasMore) : null }, { id: 'batches', label: 'Failed batches', count: counted(bad) }]}>
      ${tab === 'approvals' && html`<${Approvals} approvals=${approvals} caller=${caller} />`}
      ${tab === 'letters' && (isAdmin ? html`<${Letters} letters=${letters} onDelivered=${() => { delivered.current += 1; }} />` : html`<${Note}>Dead letters concern all tenants: a key with the role “admin” sees them.<//>`)}
      ${tab === 'batches' && html`<${Batches} batches=${batches} bad=${bad} caller=${caller} />`}<//>
  <//>`;
}

const Approvals = ({ approvals, caller }) => html`<${Loaded} resource=${approvals}>${({ data }) => html`<div aria-live="polite" class="stack">
  ${data.length ? html`<ul class="inbox-list">${data.map((approval) => html`<li key=${approval.id}><${ApprovalCard} approval=${approval} caller=${caller} onDecided=${() => approvals.reload()} /></li>`)}</ul>`
    : html`<div class="card"><${Empty} icon="check" title="Nothing waits for you">Calls of tools with <code>needs_approval</code>, or with <code>approval = true</code> in agent.toml, show up here while their turns wait.<//></div>`}</div>`}<//>`;

/** Puts the newest letters in the place of those that were read before. Rows that did not change stay the same. */
function merged(rows, { data, has_more: hasMore }) {
  const oldest = data.at(-1)?.id;
  const next = hasMore ? [...data, ...rows.filter(({ id }) => id < oldest)] : data;
  const isSame = (a, b) => a.id === b?.id && a.attempts === b.attempts && a.error === b.error;
  return next.length === rows.length && next.every((row, n) => isSame(row, rows[n])) ? rows : next;
}

function Letters({ letters, onDelivered }) {
  const [sending, send] = useState(null);
  const [redeliver, { error }] = useAction(async (letter) => {
    send(letter.id);
    try {
      await api.post(url`/v1/webhooks/dead-letters/${letter.id}/redeliver`);
      toast(`“${letter.topic}” is delivered again`);
      onDelivered();
      // It comes back if it fails again.
      letters.setRows((rows) => rows.filter(({ id }) => id !== letter.id));
    } finally { send(null); }
  });
  const columns = [
    { key: 'topic', label: 'Topic', render: ({ topic, event_id: id }) => html`<code title=${id}>${topic}</code>` },
    { key: 'to', label: 'To', render: ({ agent, session, webhook }) => (agent ? html`<${Link} class="plain" href=${session ? paths.session(agent, session) : paths.agent(agent)}>${agent}${session && html`/<${SessionName} id=${session} />`}<//>` : html`webhook <code>${webhook}</code>`) },
    { key: 'error', label: 'Last error', optional: true, render: ({ error: last }) => html`<span class="bad-text" title=${last}>${last}</span>` },
    { key: 'attempts', label: 'Attempts', align: 'right', optional: true, render: ({ attempts }) => number(attempts) },
    { key: 'at', label: 'Published', align: 'right', optional: true, render: ({ at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
    { key: 'do', label: html`<span class="sr-only">Actions</span>`, align: 'right', render: (letter) => html`<${Button} small icon="retry" busy=${sending === letter.id} disabled=${sending !== null} onClick=${() => redeliver(letter)}>Redeliver<//>` },
  ];
  return html`<${ErrorNote} error=${error} /><${Loaded} resource=${letters}>${(rows) => html`<div class="card flush"><${Table} label="Dead letters" columns=${columns} rows=${rows} rowKey=${({ id }) => id} height=${40}
    empty=${html`<${Empty} icon="check" title="No dead letters">An event lands here when all attempts to deliver it to a session or a webhook have failed.<//>`} />
    ${letters.hasMore && html`<${More} shown=${rows.length} noun="dead letter" busy=${letters.loading} onMore=${letters.more} />`}</div>`}<//>`;
}

const isBad = ({ status, request_counts: counts }) => status === 'failed' || status === 'expired' || counts.failed > 0;

function Batches({ batches, bad, caller }) {
  return html`<${Loaded} resource=${batches}>${() => html`${bad.length ? html`<ul class="inbox-list">${bad.map((batch) => html`<${Batch} key=${batch.id} batch=${batch} caller=${caller} />`)}</ul>`
    : html`<div class="card"><${Empty} icon="check" title="No batch has failed">Batches of your tenant whose file has errors, that expired, or with requests that failed show up here.<//></div>`}
    ${batches.hasMore && html`<${More} shown=${bad.length} noun="failed batch" busy=${batches.loading} onMore=${batches.more} />`}`}<//>`;
}

function Batch({ batch }) {
  const { id, model, status, endpoint, errors, created_at: created, request_counts: counts, error_file_id: errorFile, output_file_id: outputFile } = batch;
  const [download, { busy, error }] = useAction((file, name) => api.raw('GET', url`/v1/files/${file}/content`).then((response) => save(name, response)));
  const shown = errors?.data ?? [];
  return html`<li class="card batch"><div class="tool-top"><code class="tool-name">${id}</code><${StateBadge} state=${status} />
      <span class="muted small tool-numbers">made <${Time} ms=${created * 1000} relative /></span></div>
    <p class="muted small">${model ?? 'no model'} · ${endpoint} · ${number(counts.completed)} of ${count(counts.total, 'request')} answered${counts.failed > 0 && html`, <span class="bad-text">${number(counts.failed)} failed</span>`}</p>
    ${shown.length > 0 && html`<ul class="batch-errors">${shown.slice(0, 20).map((each, n) => html`<li key=${n}><${Badge}>${each.line ? `line ${number(each.line)}` : 'file'}<//> <span>${each.message}</span> <code class="muted">${each.code}</code></li>`)}
      ${shown.length > 20 && html`<li class="muted">and ${number(shown.length - 20)} more</li>`}</ul>`}
    <div class="row">${errorFile && html`<${Button} small icon="download" busy=${busy} onClick=${() => download(errorFile, `${id}-errors.jsonl`)}>Failed requests<//>`}
      ${outputFile && html`<${Button} small icon="download" busy=${busy} onClick=${() => download(outputFile, `${id}-answers.jsonl`)}>Answers<//>`}</div>
    <${ErrorNote} error=${error} /></li>`;
}
