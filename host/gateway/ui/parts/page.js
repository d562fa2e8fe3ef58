// The frame of a page: its heading, its actions, its sections; and tabs.
import { html, cx, useEffect, useRef } from '../lib/html.js';
import { Link } from '../lib/router.js';

/**
 * A page. `title` is also the title of the document; `trail` is `[[text, href], …]` above the heading; `actions` stand at its right.
 * `fill` gives the page the height of the window, for pages that scroll within.
 */
export function Page({ title, name, about, trail, actions, fill, wide, children }) {
  const heading = useRef();
  useEffect(() => { document.title = `${name ?? (typeof title === 'string' ? title : 'Skep')} · Skep`; }, [title, name]);
  return html`<div class=${cx('page', fill && 'fill', wide && 'wide')}>
    <header class="page-head">
      <div class="page-words">
        ${trail && html`<nav class="trail" aria-label="Breadcrumb"><ol>${trail.map(([text, href]) =>
          html`<li key=${text}>${href ? html`<${Link} href=${href}>${text}<//>` : text}</li>`)}</ol></nav>`}
        <h1 ref=${heading} tabindex="-1">${title}</h1>
        ${about && html`<p class="page-about">${about}</p>`}
      </div>
      ${actions && html`<div class="page-actions">${actions}</div>`}
    </header>
    ${children}
  </div>`;
}

/** A part of a page with a heading of its own. `flush` leaves out the padding, for tables. */
export const Section = ({ title, about, actions, flush, children, class: name, id }) => html`<section class=${cx('section', name)} aria-label=${title} id=${id}>
  ${(title || actions) && html`<div class="section-head"><div><h2>${title}</h2>${about && html`<p class="muted">${about}</p>`}</div>${actions && html`<div class="section-actions">${actions}</div>`}</div>`}
  <div class=${cx('card', flush && 'flush')}>${children}</div>
</section>`;

/** Tabs: `tabs` is `[{id, label, count?}]`. The caller draws the panel of `active`, as children. */
export function Tabs({ tabs, active, onSelect, label, children, small }) {
  const list = useRef();
  const key = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = tabs.findIndex(({ id }) => id === active);
    const to = step ? (at + step + tabs.length) % tabs.length : event.key === 'Home' ? 0 : event.key === 'End' ? tabs.length - 1 : -1;
    if (to < 0) return;
    event.preventDefault();
    onSelect(tabs[to].id);
    list.current.querySelectorAll('[role=tab]')[to]?.focus();
  };
  return html`<div class=${cx('tabs', small && 'small')}>
    <div class="tab-list" role="tablist" aria-label=${label} ref=${list} onKeyDown=${key}>
      ${tabs.map(({ id, label: text, count }) => html`<button type="button" role="tab" key=${id} id=${`tab-${id}`} aria-selected=${id === active ? 'true' : 'false'}
        aria-controls=${children ? `panel-${id}` : undefined} tabindex=${id === active ? 0 : -1} onClick=${() => onSelect(id)}>
        ${text}${count !== undefined && count !== null && html`<span class="tab-count">${count}</span>`}</button>`)}
    </div>
    ${children && html`<div role="tabpanel" id=${`panel-${active}`} aria-labelledby=${`tab-${active}`} class="tab-panel">${children}</div>`}
  </div>`;
}
