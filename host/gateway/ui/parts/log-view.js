// Log lines of an agent as they come, the newest at the end.
import { url } from '../lib/api.js';
import { clock, iso } from '../lib/format.js';
import { useStream } from '../lib/hooks.js';
import { html, cx, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { Empty, ErrorNote } from './basics.js';
import { Choice, Live } from './paged.js';
import { VirtualList } from './table.js';

const KEPT = 2000;
const LEVELS = [['debug', 'All levels'], ['info', 'Info and above'], ['warn', 'Warnings and errors'], ['error', 'Errors']];

/** Follows the log of `agent`, of one `session`, and of one `turn` (its number) if they are given. */
export function LogView({ agent, session, turn, compact }) {
  const [level, setLevel] = useState('debug');
  const lines = useRef([]);
  const [shown, show] = useState([]);
  const timer = useRef(null);
  const query = { session, level, limit: 1000 };
  const flush = () => { timer.current = null; show([...lines.current]); };
  useEffect(() => {
    lines.current = [];
    show([]);
    return () => { clearTimeout(timer.current); timer.current = null; };
  }, [agent, session, level]);
  const status = useStream(url`/v1/agents/${agent}/logs`, {
    query,
    onEvent: ({ event, data }) => {
      if (event !== 'log') return;
      const line = JSON.parse(data);
      if (lines.current.length && line.id <= lines.current.at(-1).id) return;
      lines.current.push(line);
      if (lines.current.length > KEPT) lines.current.splice(0, lines.current.length - KEPT);
      timer.current ??= setTimeout(flush, 80);
    },
  });
  const items = useMemo(() => (turn === undefined ? shown : shown.filter((line) => line.turn === turn)), [shown, turn]);
  return html`<div class=${cx('logs', compact && 'compact')}>
    <div class="logs-head"><${Live} status=${status} /><${Choice} label="Level" value=${level} options=${LEVELS} onChange=${setLevel} /></div>
    <${ErrorNote} error=${status.state === 'failed' ? status.error : null} />
    ${items.length ? html`<${VirtualList} label="Log lines" items=${items} itemKey=${(line) => line.id} estimate=${26} follow class="logs-lines" render=${(line) => html`<div class=${`log-line ${line.level}`}>
        <time class="log-time" datetime=${iso(line.at_ms)} title=${iso(line.at_ms)}>${clock(line.at_ms)}</time><span class="log-level">${line.level}</span>
        <span class="log-text">${line.message}</span>${turn === undefined && !session && line.session ? html`<span class="log-where">${line.session}</span>` : null}</div>`} />`
      : html`<${Empty} title=${turn === undefined ? 'No log lines yet' : 'This turn logged nothing'}>${turn === undefined ? 'What an agent logs shows up here as it happens.' : null}<//>`}
  </div>`;
}
