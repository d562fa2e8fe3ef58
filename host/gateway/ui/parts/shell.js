// The frame around every page: navigation, who is signed in, the theme, whether the host answers, and the shortcuts.
import { html, cx, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { connection, askNow } from '../lib/connection.js';
import { may, signOut } from '../lib/caller.js';
import { useHasCluster } from '../lib/cluster.js';
import { useInboxCount } from '../lib/inbox.js';
import { goToSearch, pageKeys, useKeys } from '../lib/keys.js';
import { Link, navigate, useRoute } from '../lib/router.js';
import { setTheme, theme } from '../lib/theme.js';
import { NAVIGATION } from '../pages.js';
import { Badge, Button } from './basics.js';
import { Dialog, Toasts } from './dialog.js';
import { Icon } from './icon.js';

export function Shell({ caller, page, children }) {
  const [isOpen, setOpen] = useState(false);
  const [helps, setHelps] = useState(false);
  const { path } = useRoute();
  const main = useRef();
  const isFirst = useRef(true);
  const hasCluster = useHasCluster(caller);
  const items = NAVIGATION.filter(({ id, need }) => may(caller, need) && (id !== 'cluster' || hasCluster));
  const waiting = useInboxCount(caller);
  useLayoutEffect(() => {
    setOpen(false);
    if (isFirst.current) { isFirst.current = false; return; }
    // Whoever has begun to write in the new page keeps the focus.
    if (main.current?.contains(document.activeElement?.closest('input, textarea') ?? null)) return;
    main.current?.focus({ preventScroll: true });
  }, [path]);
  useKeys(useMemo(() => ({
    ...Object.fromEntries(items.map(({ key, path: to }) => [`g ${key}`, () => navigate(to)])),
    '?': () => setHelps(true),
    '/': goToSearch,
    Escape: () => setOpen(false),
  }), [caller, hasCluster]));
  const count = waiting.approvals + waiting.deadLetters;
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <div class=${cx('shell', isOpen && 'nav-open')}>
      <header class="topbar">
        <${Button} kind="quiet" icon=${isOpen ? 'close' : 'menu'} label="Navigation" aria-expanded=${isOpen ? 'true' : 'false'} aria-controls="navigation" onClick=${() => setOpen(!isOpen)} />
        <span class="topbar-title">${page?.title ?? 'Skep'}</span>
        ${count > 0 && html`<${Link} class="topbar-inbox" href="/ui/inbox" aria-label=${`Inbox, ${count} waiting`}><${Icon} name="inbox" /><span class="nav-count">${count}</span><//>`}
      </header>
      <div class="scrim" onClick=${() => setOpen(false)}></div>
      <nav class="sidebar" id="navigation" aria-label="Console">
        <${Link} class="brand" href="/ui/"><img src="/ui/icon.svg" alt="" width="22" height="22" /><span>Skep</span><//>
        <ul class="nav">${items.map((item) => html`<li key=${item.id}>
          <${Link} href=${item.path} class="nav-item" aria-current=${page?.nav === item.id ? 'page' : undefined} title=${`${item.label} (g ${item.key})`}>
            <${Icon} name=${item.id} /><span>${item.label}</span>
            ${item.id === 'inbox' && count > 0 && html`<span class="nav-count"><span class="sr-only">, </span>${count}${waiting.more ? '+' : ''}<span class="sr-only"> waiting</span></span>`}
          <//></li>`)}</ul>
        <${Foot} caller=${caller} onHelp=${() => setHelps(true)} />
      </nav>
      <main id="main" ref=${main} tabindex="-1"><${Banner} />${children}</main>
    </div>
    <${Toasts} />
    ${helps && html`<${Help} items=${items} onClose=${() => setHelps(false)} />`}`;
}

function Foot({ caller, onHelp }) {
  return html`<div class="side-foot">
    <${ThemeChoice} />
    <div class="who">
      <div class="who-words"><span class="who-name" title=${caller.key ? `Key ${caller.key}` : 'This host asks for no key'}>${caller.tenant}</span>
        <${Badge} title=${caller.agents ? `Only the agents ${caller.agents.join(', ')}` : undefined}>${caller.role}<//></div>
      <${Button} kind="quiet" small label="Shortcuts" onClick=${onHelp}><span aria-hidden="true">?</span><//>
      ${caller.key && html`<${Button} kind="quiet" small icon="signout" label="Sign out" onClick=${signOut} />`}
    </div>
  </div>`;
}

const CHOICES = [['system', 'As the system', 'system'], ['light', 'Light', 'sun'], ['dark', 'Dark', 'moon']];

function ThemeChoice() {
  const { choice } = theme.use();
  return html`<div class="segments" role="radiogroup" aria-label="Theme">${CHOICES.map(([id, label, icon]) => html`
    <label key=${id} title=${label}><input class="sr-only" type="radio" name="theme" aria-label=${label} checked=${choice === id} onChange=${() => setTheme(id)} /><span><${Icon} name=${icon} size=${14} /></span></label>`)}</div>`;
}

/** Says that the host is away, and for a moment that it is back. */
function Banner() {
  const { away } = connection.use();
  const [wasAway, setWasAway] = useState(false);
  useEffect(() => {
    if (away) { setWasAway(true); return undefined; }
    if (!wasAway) return undefined;
    const timer = setTimeout(() => setWasAway(false), 2500);
    return () => clearTimeout(timer);
  }, [away, wasAway]);
  return html`<div class="banner-place" role="status" aria-live="polite">
    ${away && html`<div class="banner warn"><span class="spinner" aria-hidden="true"></span><span><strong>Reconnecting…</strong> The host does not answer. What you see may be old.</span><${Button} small onClick=${askNow}>Try now<//></div>`}
    ${!away && wasAway && html`<div class="banner ok"><${Icon} name="check" /><span>The host answers again.</span></div>`}
  </div>`;
}

function Help({ items, onClose }) {
  const ofPage = pageKeys.use();
  const rows = (list) => html`<dl class="keys">${list.map(([keys, does]) => html`<div key=${keys}><dt>${keys.split(' ').map((key) => html`<kbd>${key}</kbd>`)}</dt><dd>${does}</dd></div>`)}</dl>`;
  return html`<${Dialog} title="Shortcuts" onClose=${onClose}>
    ${ofPage.length > 0 && html`<h3>This page</h3>${rows(ofPage.map(({ keys, does }) => [keys, does]))}`}
    <h3>Everywhere</h3>
    ${rows([...items.map(({ key, label }) => [`g ${key}`, label]), ['/', 'Search in the page'], ['?', 'These shortcuts'], ['Esc', 'Close']])}
  <//>`;
}
