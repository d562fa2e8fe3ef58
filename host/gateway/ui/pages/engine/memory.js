// The KV cache as a map of squares by owner, and memory by kind as a bar. Both have a table beside the picture.
import { bytes, number, percent } from '../../lib/format.js';
import { html, cx, useMemo, useState } from '../../lib/html.js';
import { Link, paths } from '../../lib/router.js';
import { Badge, Empty } from '../../parts/index.js';

const SQUARES = 400;
const TONES = 5;

/** The squares: each stands for the same number of pages; owners come in the order of their size, free pages last. */
export function Pages({ pages }) {
  const { owners, total, free } = pages;
  const [chosen, choose] = useState(null);
  const sorted = useMemo(() => [...owners].sort((a, b) => b.pages - a.pages), [owners]);
  const squares = useMemo(() => spread(sorted, total), [sorted, total]);
  const used = total - free;
  if (!total) return html`<${Empty} title="This model has no KV cache yet">It is made when the model is loaded.<//>`;
  return html`<div class="pages-map">
    <div class="pages-squares" role="img" aria-label=${`${number(used)} of ${number(total)} pages are in use; the table names their owners`}>
      ${squares.map((owner, n) => html`<i key=${n} class=${cx(owner === null ? 'free' : `own-${owner % TONES + 1}`, owner !== null && sorted[owner]?.kind === 'cached' && 'cached', chosen !== null && chosen !== owner && 'faded')}
        onMouseEnter=${() => choose(owner)} onMouseLeave=${() => choose(null)} title=${owner === null ? 'Free' : nameOf(sorted[owner])}></i>`)}
    </div>
    <p class="muted small">One square is about ${number(Math.max(1, Math.round(total / squares.length)))} ${total / squares.length > 1 ? 'pages' : 'page'} of ${number(pages.page_tokens)} tokens. Pale squares are cached: they are given up when pages are needed.</p>
    <div class="table-box" tabindex="0" role="group" aria-label="Owners of pages"><table class="table pages-table">
      <caption class="sr-only">Owners of pages</caption>
      <thead><tr><th scope="col">Owner</th><th scope="col">State</th><th scope="col" class="num">Pages</th><th scope="col" class="num">Share</th></tr></thead>
      <tbody>
        ${sorted.slice(0, 40).map((owner, n) => html`<tr key=${n} onMouseEnter=${() => choose(n)} onMouseLeave=${() => choose(null)}>
          <td><span class=${cx('swatch', `own-${n % TONES + 1}`, owner.kind === 'cached' && 'cached')}></span><${Owner} owner=${owner} /></td>
          <td><${Badge} tone=${owner.kind === 'running' ? 'accent' : null} dot>${owner.kind === 'running' ? 'Running' : 'Cached'}<//></td>
          <td class="num">${number(owner.pages)}</td><td class="num">${percent(owner.pages / total)}</td></tr>`)}
        ${sorted.length > 40 && html`<tr><td>${number(sorted.length - 40)} more</td><td></td><td class="num">${number(sorted.slice(40).reduce((sum, owner) => sum + owner.pages, 0))}</td><td></td></tr>`}
        <tr><td><span class="swatch free"></span>Free</td><td></td><td class="num">${number(free)}</td><td class="num">${percent(free / total)}</td></tr>
      </tbody></table></div>
  </div>`;
}

const nameOf = ({ tenant, agent, session }) => [tenant, agent ?? 'models', session].filter(Boolean).join(' / ');

function Owner({ owner }) {
  const { tenant, agent, session } = owner;
  if (!agent) return html`${tenant} / <span class="muted">${owner.kind === 'cached' ? 'shared, or for requests to the model' : 'requests to the model'}</span>`;
  if (!session) return html`${tenant} / ${agent} / <span class="muted">shared by its sessions</span>`;
  return html`${tenant} / ${agent} / <${Link} href=${paths.session(agent, tenant === 'local' ? session : `${tenant}/${session}`)}>${session}<//>`;
}

/** Gives each owner its share of the squares, at least one, and leaves the rest free. */
function spread(owners, total) {
  const count = Math.min(SQUARES, total);
  const squares = [];
  owners.forEach(({ pages }, n) => {
    const share = Math.max(1, Math.round((pages / total) * count));
    for (let each = 0; each < share && squares.length < count; each += 1) squares.push(n);
  });
  while (squares.length < count) squares.push(null);
  return squares;
}

/** Memory by kind. */
export function Memory({ memory }) {
  const sum = memory.reduce((total, each) => total + each.bytes, 0);
  if (!sum) return html`<${Empty} title="Nothing is known yet">The sizes come with the plan of a model’s memory when it is loaded.<//>`;
  const sorted = [...memory].sort((a, b) => b.bytes - a.bytes);
  return html`<div class="stack">
    <div class="memory-bar" aria-hidden="true">${sorted.map(({ kind, bytes: size }, n) => html`<i key=${kind} class=${`own-${n % TONES + 1}`} style=${{ flexGrow: String(size / sum) }} title=${`${kind}: ${bytes(size)}`}></i>`)}</div>
    <table class="table"><caption class="sr-only">Memory by kind</caption>
      <thead><tr><th scope="col">Kind</th><th scope="col" class="num">Size</th><th scope="col" class="num">Share</th></tr></thead>
      <tbody>${sorted.map(({ kind, bytes: size }, n) => html`<tr key=${kind}><td><span class=${`swatch own-${n % TONES + 1}`}></span>${KINDS[kind] ?? kind}</td><td class="num">${bytes(size)}</td><td class="num">${percent(size / sum)}</td></tr>`)}
        <tr><td><strong>All</strong></td><td class="num"><strong>${bytes(sum)}</strong></td><td></td></tr></tbody></table>
  </div>`;
}

const KINDS = { weights: 'Weights', kv: 'KV cache', activations: 'Activations', graphs: 'CUDA graphs' };
