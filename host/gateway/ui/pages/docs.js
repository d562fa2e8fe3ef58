// The guides and the HTTP API of this host's version, without internet.
import { api } from '../lib/api.js';
import { html, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { useMedia, useResource } from '../lib/hooks.js';
import { headings, Markdown } from '../lib/markdown.js';
import { Link, paths, useRoute } from '../lib/router.js';
import { Button, Dialog, Empty, Loaded, Page } from '../parts/index.js';
import { ApiOverview, ApiTag } from './docs/operations.js';
import { resolveLink } from './docs/links.js';
import { tagsOf } from './docs/openapi.js';

const START = 'host/README';
const GROUPS = [['host', 'Running a host'], ['sdk', 'Writing agents']];

export default function Docs({ params }) {
  const page = params.page || START;
  const guides = useResource((signal) => api.get('/ui/guides/index.json', { signal }));
  const document_ = useResource((signal) => api.get('/openapi.json', { signal }));
  const [isOpen, open] = useState(false);
  const isNarrow = useMedia('(max-width: 960px)');
  useEffect(() => open(false), [page]);
  const [kind, tag] = page.split('/');
  const isApi = kind === 'api';
  const guide = guides.data?.find(({ id }) => id === page);
  const contents = html`<${Contents} guides=${guides.data ?? []} openapi=${document_.data} page=${page} />`;
  const title = isApi ? (tag ? `API: ${tag}` : 'HTTP API') : guide?.title ?? 'Docs';
  return html`<div class="docs">
    ${!isNarrow && html`<aside class="docs-side" aria-label="Contents of the docs">${contents}</aside>`}
    <${Page} title=${title} name=${title} trail=${[['Docs', page === START ? null : paths.docs()], ...(isApi && tag ? [['HTTP API', paths.docs('api')]] : [])]}
      actions=${isNarrow && html`<${Button} icon="menu" onClick=${() => open(true)}>Contents<//>`}>
      ${isApi ? html`<${Loaded} resource=${document_} lines=${8}>${(openapi) => (tag ? html`<${ApiTag} key=${tag} openapi=${openapi} tag=${tag} />` : html`<${ApiOverview} openapi=${openapi} />`)}<//>`
        : html`<${Guide} key=${page} id=${page} known=${guides.data} />`}
    <//>
    ${isNarrow && isOpen && html`<${Dialog} title="Contents" onClose=${() => open(false)}>${contents}<//>`}
  </div>`;
}

/** The list of all guides and of the parts of the API, with a search. */
function Contents({ guides, openapi, page }) {
  const [search, setSearch] = useState('');
  const wanted = search.trim().toLowerCase();
  const has = (text) => !wanted || text.toLowerCase().includes(wanted);
  const tags = useMemo(() => (openapi ? tagsOf(openapi) : []), [openapi]);
  const operations = wanted ? tags.flatMap(({ name, operations: all }) => all.filter(({ path, summary, method }) => has(`${method} ${path} ${summary}`)).map((operation) => ({ ...operation, tag: name }))) : [];
  const item = (href, text, isHere) => html`<li key=${href}><${Link} href=${href} aria-current=${isHere ? 'page' : undefined}>${text}<//></li>`;
  const groups = GROUPS.map(([group, label]) => [label, guides.filter(({ id, title }) => id.startsWith(`${group}/`) && has(title))]);
  const nothing = wanted && !operations.length && groups.every(([, all]) => !all.length);
  return html`<nav aria-label="Docs" class="docs-nav">
    <input type="search" aria-label="Search guides and operations" placeholder="Search" value=${search} onInput=${(event) => setSearch(event.currentTarget.value)} />
    ${groups.map(([label, all]) => all.length > 0 && html`<h2 key=${label}>${label}</h2><ul>${all.map(({ id, title }) => item(paths.docs(id), title, id === page))}</ul>`)}
    ${wanted ? operations.length > 0 && html`<h2>Operations</h2><ul>${operations.slice(0, 30).map(({ id, method, path, tag }) => item(`${paths.docs(`api/${tag}`)}#${id}`, html`<span class=${`verb ${method}`}>${method}</span> <span class="mono">${path}</span>`, false))}</ul>`
      : html`<h2>HTTP API</h2><ul>${item(paths.docs('api'), 'Overview', page === 'api')}${tags.map(({ name }) => item(paths.docs(`api/${name}`), name, page === `api/${name}`))}</ul>`}
    ${nothing && html`<p class="muted">Nothing has “${search}” in its title, path or summary.</p>`}
  </nav>`;
}

function Guide({ id, known }) {
  const { hash } = useRoute();
  const exists = !known || known.some((guide) => guide.id === id);
  const text = useResource((signal) => (exists ? api.text(`/ui/guides/${id.split('/').map(encodeURIComponent).join('/')}.md`, { signal }) : ''), [id, exists]);
  const all = useMemo(() => (text.data ? headings(text.data).filter(({ depth }) => depth === 2 || depth === 3) : []), [text.data]);
  const body = useMemo(() => (text.data ?? '').replace(/^# .*\n+/, ''), [text.data]);
  const resolve = useMemo(() => (href) => resolveLink(href, id, known), [id, known]);
  useHash(hash, text.data);
  const current = useCurrent(all);
  if (!exists) {
    return html`<${Empty} icon="docs" title="There is no such guide" action=${html`<${Button} href=${paths.docs()}>All guides<//>`}>It may have another name in this version.<//>`;
  }
  return html`<div class="guide"><article class="guide-text"><${Loaded} resource=${text} lines=${12}>${() => html`<${Markdown} text=${body} resolve=${resolve} />`}<//></article>
    ${all.length > 1 && html`<nav class="toc" aria-label="On this page"><h2>On this page</h2><ul>${all.map((heading) => html`<li key=${heading.id} class=${`depth-${heading.depth}`}>
      <${Link} href=${`#${heading.id}`} aria-current=${heading.id === current ? 'location' : undefined}>${heading.text}<//></li>`)}</ul></nav>`}</div>`;
}

/** Scrolls to the element that the address names, once it is there. */
export function useHash(hash, when) {
  useEffect(() => {
    if (!hash || !when) return;
    const name = decodeURIComponent(hash.slice(1));
    requestAnimationFrame(() => document.getElementById(name)?.scrollIntoView());
  }, [hash, when]);
}

/** Returns the id of the heading that was scrolled past last. */
function useCurrent(all) {
  const [current, set] = useState(null);
  const frame = useRef(0);
  useEffect(() => {
    const look = () => {
      frame.current = 0;
      let last = null;
      for (const { id } of all) if ((document.getElementById(id)?.getBoundingClientRect().top ?? Infinity) < 120) last = id;
      set(last ?? all[0]?.id ?? null);
    };
    const soon = () => { frame.current ||= requestAnimationFrame(look); };
    look();
    addEventListener('scroll', soon, { passive: true });
    return () => { cancelAnimationFrame(frame.current); removeEventListener('scroll', soon); };
  }, [all]);
  return current;
}
