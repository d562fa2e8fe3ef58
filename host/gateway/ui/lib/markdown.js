// Markdown to elements. Only the lexer of marked is used: its tokens become elements one by one, raw HTML is shown as the text that it
// is, and a link that is neither http, https, mailto nor relative is shown as text.
import { Lexer } from '../vendor/marked.js';
import { html, useMemo } from './html.js';
import { Link } from './router.js';
import { Code } from '../parts/code.js';

const SCHEME = /^[a-z][a-z0-9+.-]*:/i;

/** Returns the address if it is safe to follow, otherwise null. */
export function safeLink(href) {
  const text = String(href ?? '').replace(/[\u0000-\u0020]/g, '');
  if (!text || text.startsWith('//') || text.startsWith('\\')) return null;
  if (!SCHEME.test(text)) return text;
  return /^(https?|mailto):/i.test(text) ? text : null;
}

/** Returns the name of a heading's anchor, as GitHub makes it. */
export const slug = (text) =>
  text.toLowerCase().trim().replace(/[^\p{L}\p{N}\s_-]/gu, '').replace(/\s/g, '-');

/** Returns the headings of a document: `[{depth, text, id}]`. */
export function headings(source) {
  const seen = new Map();
  return lex(source).filter(({ type }) => type === 'heading').map((token) => {
    const text = plain(token.tokens);
    return { depth: token.depth, text, id: unique(slug(text), seen) };
  });
}

/** Draws Markdown. `resolve(href)` may turn a relative link into an address of the console. */
export function Markdown({ text, resolve, class: name = '' }) {
  return useMemo(() => {
    const draw = { resolve, seen: new Map() };
    return html`<div class=${`markdown ${name}`}>${blocks(lex(text), draw)}</div>`;
  }, [text, resolve, name]);
}

/** Draws one line of Markdown without its links, for headings and buttons. */
export const Line = ({ text }) => String(text ?? '').split(/`([^`]+)`/).map((part, n) => (n % 2 ? html`<code key=${n}>${part}</code>` : part));

function lex(source) {
  try { return Lexer.lex(String(source ?? ''), { gfm: true }); } catch { return [{ type: 'text', text: String(source) }]; }
}

const plain = (tokens) => (tokens ?? []).map((token) => (token.tokens ? plain(token.tokens) : unescape(token.text ?? ''))).join('');

function unique(id, seen) {
  const n = seen.get(id) ?? 0;
  seen.set(id, n + 1);
  return n ? `${id}-${n}` : id;
}

const blocks = (tokens, draw) => (tokens ?? []).map((token) => block(token, draw));

function block(token, draw) {
  switch (token.type) {
    case 'space': case 'def': return null;
    case 'heading': {
      const tag = `h${Math.min(token.depth, 6)}`;
      return html`<${tag} id=${unique(slug(plain(token.tokens)), draw.seen)}>${inline(token.tokens, draw)}</${tag}>`;
    }
    case 'paragraph': return html`<p>${inline(token.tokens, draw)}</p>`;
    case 'text': return token.tokens ? inline(token.tokens, draw) : unescape(token.text);
    case 'code': return html`<${Code} text=${token.text} lang=${(token.lang ?? '').split(/\s/)[0]} />`;
    case 'blockquote': return html`<blockquote>${blocks(token.tokens, draw)}</blockquote>`;
    case 'hr': return html`<hr />`;
    case 'list': return list(token, draw);
    case 'table': return table(token, draw);
    case 'checkbox': return checkbox(token.checked);
    default: return html`<p>${token.raw ?? token.text ?? ''}</p>`;
  }
}

const checkbox = (checked) => html`<span class="md-check" role="img" aria-label=${checked ? 'done' : 'open'}>${checked ? '☑' : '☐'}</span> `;

function list(token, draw) {
  const items = token.items.map((item) => {
    const hasBox = item.task && !item.tokens.some(({ type }) => type === 'checkbox');
    return html`<li>${hasBox && checkbox(item.checked)}${blocks(item.tokens, draw)}</li>`;
  });
  return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function table(token, draw) {
  const cell = (tag) => (each, n) => html`<${tag} class=${token.align[n] ? `align-${token.align[n]}` : ''}>${inline(each.tokens, draw)}</${tag}>`;
  return html`<div class="md-table" tabindex="0" role="group" aria-label="Table"><table>
    <thead><tr>${token.header.map(cell('th'))}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${row.map(cell('td'))}</tr>`)}</tbody>
  </table></div>`;
}

const inline = (tokens, draw) => (tokens ?? []).map((token) => span(token, draw));

function span(token, draw) {
  switch (token.type) {
    case 'text': return token.tokens ? inline(token.tokens, draw) : unescape(token.text);
    case 'escape': return unescape(token.text);
    case 'strong': return html`<strong>${inline(token.tokens, draw)}</strong>`;
    case 'em': return html`<em>${inline(token.tokens, draw)}</em>`;
    case 'del': return html`<del>${inline(token.tokens, draw)}</del>`;
    case 'codespan': return html`<code>${token.text}</code>`;
    case 'br': return html`<br />`;
    case 'checkbox': return checkbox(token.checked);
    case 'link': return link(token, draw);
    case 'image': return html`<span class="md-image">${token.text || 'Image'}</span>`;
    default: return token.raw ?? token.text ?? '';
  }
}

function link(token, draw) {
  const content = inline(token.tokens, draw);
  const href = safeLink(draw.resolve ? draw.resolve(token.href) : token.href);
  if (!href) return html`<span>${content}</span>`;
  if (href.startsWith('/ui/') || href.startsWith('#')) return html`<${Link} href=${href}>${content}</${Link}>`;
  return html`<a href=${href} target="_blank" rel="noreferrer noopener">${content}</a>`;
}

const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', '#39': "'", nbsp: '\u00a0' };
const unescape = (text) => String(text).replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);
