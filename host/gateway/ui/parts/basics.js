// Small parts that every page uses: buttons, fields, badges, notes, times.
import { count, iso, time, ago } from '../lib/format.js';
import { html, cx, useId, useState } from '../lib/html.js';
import { useNow } from '../lib/hooks.js';
import { Link } from '../lib/router.js';
import { Icon } from './icon.js';

/**
 * A button; with `href` a link that looks like one. `kind`: `primary`, `danger`, `quiet` or none; `icon`: a name of `parts/icon.js`.
 * With an icon alone, `label` says what it does.
 */
export function Button({ kind, icon, label, busy, small, href, children, class: name, type = 'button', disabled, ...rest }) {
  const hasText = children !== undefined && children !== null && children !== false;
  const all = {
    class: cx('button', kind, small && 'small', !hasText && 'only-icon', busy && 'busy', name),
    'aria-label': label, title: hasText ? undefined : label, ...rest,
  };
  const content = html`${icon && html`<${Icon} name=${icon} />`}${hasText && html`<span>${children}</span>`}`;
  if (href) return html`<${Link} href=${href} ...${all}>${content}</${Link}>`;
  return html`<button type=${type} disabled=${disabled || busy} aria-busy=${busy ? 'true' : undefined} ...${all}>${content}</button>`;
}

/**
 * A control with its label: `<${Field} label="Name" hint="…">${(id) => html`<input id=${id} …/>`}<//>`.
 * The function gets `(id, describedBy)`; `error` replaces the hint.
 */
export function Field({ label, hint, error, children, class: name, hideLabel, extra }) {
  const id = useId();
  const note = error || hint;
  return html`<div class=${cx('field', error && 'invalid', name)}>
    <div class=${cx('field-label', hideLabel && 'sr-only')}><label for=${id}>${label}</label>${extra}</div>
    ${children(id, note ? `${id}-note` : undefined)}
    ${note && html`<p class="field-note" id=${`${id}-note`} role=${error ? 'alert' : undefined}>${note}</p>`}
  </div>`;
}

/** A switch with its label. */
export function Toggle({ label, checked, onChange, hint, disabled }) {
  return html`<label class="toggle" title=${hint}>
    <input type="checkbox" role="switch" checked=${checked} disabled=${disabled} onChange=${(event) => onChange(event.currentTarget.checked)} />
    <span class="toggle-track" aria-hidden="true"></span><span>${label}</span>
  </label>`;
}

/** A state or a category. `tone`: `ok`, `warn`, `bad`, `info`, `accent` or none; `dot` puts a dot before it. */
export const Badge = ({ tone, dot, children, title }) =>
  html`<span class=${cx('badge', tone)} title=${title}>${dot && html`<span class="dot" aria-hidden="true"></span>`}${children}</span>`;

const STATES = {
  waiting: ['info', 'Waiting'], asking: ['warn', 'Waits for a person'], running: ['accent', 'Running'], done: ['ok', 'Done'], failed: ['bad', 'Failed'], loaded: ['ok', 'Loaded'],
  loading: ['accent', 'Loading'], unloaded: [null, 'Not loaded'], unloading: ['accent', 'Unloading'], remote: ['info', 'Remote'],
  completed: ['ok', 'Completed'], cancelled: [null, 'Cancelled'], expired: ['warn', 'Expired'], pending: ['info', 'Pending'],
};

/** The state of a turn, a model or a batch in its usual color. */
export function StateBadge({ state }) {
  const [tone, text] = STATES[state] ?? [null, String(state ?? '–')];
  return html`<${Badge} tone=${tone} dot>${text}<//>`;
}

/** A time in the viewer's zone, with the ISO time as its title. `relative` says how long ago it was. */
export function Time({ ms, relative }) {
  useNow(10_000, !!relative);
  if (typeof ms !== 'number') return html`<span>–</span>`;
  return html`<time datetime=${iso(ms)} title=${relative ? `${time(ms)} · ${iso(ms)}` : iso(ms)}>${relative ? ago(ms) : time(ms)}</time>`;
}

/** The text of an empty list: a `title`, what would fill it, and `action`. */
export const Empty = ({ icon, title, children, action }) => html`<div class="empty">
  ${icon && html`<${Icon} name=${icon} size=${24} />`}
  <p class="empty-title">${title}</p>${children && html`<div class="empty-text">${children}</div>`}${action}
</div>`;

/** An error with its hint, and a button to try again if `onRetry` is given. */
export function ErrorNote({ error, onRetry, title }) {
  if (!error) return null;
  return html`<div class="note bad" role="alert">
    <${Icon} name="warning" />
    <div class="note-body">
      <p>${title && html`<strong>${title} </strong>`}${String(error.message ?? error)}</p>
      ${error.hint && html`<p class="muted">${error.hint}</p>`}
      ${error.code && error.code !== 'error' && html`<p class="muted small"><code>${error.code}</code>${error.status ? ` · HTTP ${error.status}` : ''}</p>`}
    </div>
    ${onRetry && html`<${Button} small icon="retry" onClick=${onRetry}>Try again<//>`}
  </div>`;
}

/** A note that is not an error. `tone`: `info`, `warn`, `ok`. */
export const Note = ({ tone = 'info', icon, children, action }) => html`<div class=${cx('note', tone)}>
  <${Icon} name=${icon ?? (tone === 'warn' ? 'warning' : tone === 'ok' ? 'check' : 'info')} /><div class="note-body">${children}</div>${action}
</div>`;

/** Gray lines in the place of what is loading, so that nothing jumps when it comes. */
export const Skeleton = ({ lines = 3, height }) => html`<div class="skeleton" role="status" aria-label="Loading" style=${height ? { height } : undefined}>
  ${Array.from({ length: lines }, (_, n) => html`<div class="skeleton-line" key=${n}></div>`)}
</div>`;

/** Shows a resource: its skeleton, its error, or `children(data)`. */
export function Loaded({ resource, lines, children }) {
  const { data, error, reload } = resource;
  if (data !== null && data !== undefined) return html`${error && html`<${ErrorNote} error=${error} onRetry=${reload} />`}${children(data)}`;
  if (error) return html`<${ErrorNote} error=${error} onRetry=${reload} />`;
  return html`<${Skeleton} lines=${lines} />`;
}

/** Copies text; says that it did. */
export function Copy({ text, label = 'Copy', small = true, children }) {
  const [said, say] = useState(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(typeof text === 'function' ? text() : text);
      say('Copied');
    } catch { say('Not allowed'); }
    setTimeout(() => say(null), 1500);
  };
  return html`<${Button} kind="quiet" small=${small} icon=${said === 'Copied' ? 'check' : 'copy'} label=${said ?? label} onClick=${copy}>${children && (said ?? children)}<//>`;
}

/** Names and values side by side: `rows` is `[[name, value], …]`; rows whose value is null are left out. */
export const Facts = ({ rows, class: name }) => html`<dl class=${cx('facts', name)}>
  ${rows.filter(([, value]) => value !== null && value !== undefined && value !== false).map(([label, value]) =>
    html`<div key=${label}><dt>${label}</dt><dd>${value}</dd></div>`)}
</dl>`;

/** A figure with its name, for a row of figures. */
export const Figure = ({ label, value, unit, hint, tone }) => html`<div class=${cx('figure', tone)} title=${hint}>
  <span class="figure-label">${label}</span><span class="figure-value">${value}${unit && html`<span class="figure-unit"> ${unit}</span>`}</span>
</div>`;

/** A share of a limit as a bar with words; `note` stands behind the label. */
export function Meter({ label, note, used, limit, format = String }) {
  const share = limit > 0 ? Math.min(used / limit, 1) : 0;
  const tone = share >= 0.95 ? 'bad' : share >= 0.8 ? 'warn' : '';
  return html`<div class="meter">
    <div class="meter-words"><span>${label}${note && html` <span class="muted small">${note}</span>`}</span><span class="num">${format(used)} of ${format(limit)}</span></div>
    <div class="meter-track" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${limit} aria-valuenow=${used}
      aria-valuetext=${`${format(used)} of ${format(limit)}`}><div class=${cx('meter-fill', tone)} style=${{ width: `${share * 100}%` }}></div></div>
  </div>`;
}

/** The button below a list that has more. */
export const More = ({ shown, noun, onMore, busy }) => html`<div class="more">
  <span class="muted">${count(shown, noun)} shown</span><${Button} small busy=${busy} onClick=${onMore}>Show more<//>
</div>`;
