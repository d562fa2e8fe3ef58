// JSON as a tree that folds. Values are text, whatever they contain.
import { html, useState } from '../lib/html.js';
import { Copy } from './basics.js';
import { Icon } from './icon.js';

const CHUNK = 100;

/** Draws any JSON. `open` is the number of levels that are unfolded at first. */
export function JsonTree({ value, open = 1, label = 'JSON', copy = true }) {
  return html`<div class="json" role="group" aria-label=${label}>
    ${copy && html`<div class="json-copy"><${Copy} text=${() => JSON.stringify(value, null, 2)} label="Copy JSON" /></div>`}
    <ul class="json-list"><${Node} value=${value} open=${open} /></ul>
  </div>`;
}

function Node({ name, value, open }) {
  const isBranch = value !== null && typeof value === 'object';
  return isBranch ? html`<${Branch} ...${{ name, value, open }} />` : html`<li><span class="json-leaf">${label(name)}<${Leaf} value=${value} /></span></li>`;
}

const label = (name) => name !== undefined && html`<span class="json-name">${String(name)}</span><span class="json-mark">: </span>`;

function Branch({ name, value, open }) {
  const isList = Array.isArray(value);
  const [isOpen, set] = useState(open > 0);
  const [shown, more] = useState(CHUNK);
  const keys = isList ? null : Object.keys(value);
  const size = isList ? value.length : keys.length;
  const summary = isList ? `[${size}]` : `{${size}}`;
  if (!size) return html`<li><span class="json-leaf">${label(name)}<span class="json-mark">${isList ? '[]' : '{}'}</span></span></li>`;
  const children = isOpen && Array.from({ length: Math.min(shown, size) }, (_, n) => {
    const key = isList ? n : keys[n];
    return html`<${Node} key=${key} name=${key} value=${value[key]} open=${open - 1} />`;
  });
  return html`<li>
    <button type="button" class="json-fold" aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => set(!isOpen)}>
      <${Icon} name=${isOpen ? 'down' : 'right'} size=${12} />${label(name)}<span class="json-mark">${summary}</span>${!isOpen && html`<span class="json-peek"> ${peek(value)}</span>`}
    </button>
    ${isOpen && html`<ul class="json-list">${children}${size > shown && html`<li><button type="button" class="link" onClick=${() => more(shown + CHUNK)}>Show ${Math.min(CHUNK, size - shown)} more of ${size - shown}</button></li>`}</ul>`}
  </li>`;
}

function Leaf({ value }) {
  const [whole, show] = useState(false);
  if (typeof value !== 'string') return html`<span class=${`json-${value === null ? 'null' : typeof value}`}>${String(value)}</span>`;
  const isLong = value.length > 400;
  return html`<span class="json-string">"${isLong && !whole ? value.slice(0, 400) : value}${isLong && !whole ? '…' : '"'}</span>
    ${isLong && html` <button type="button" class="link" onClick=${() => show(!whole)}>${whole ? 'Less' : `All ${value.length.toLocaleString('en-US')} characters`}</button>`}`;
}

function peek(value) {
  let text;
  try { text = JSON.stringify(Array.isArray(value) ? value.slice(0, 4) : Object.fromEntries(Object.entries(value).slice(0, 4))); } catch { return ''; }
  return text.length > 80 ? `${text.slice(0, 80)}…` : text;
}
