// Messages of conversations: what was said, the reasoning, the calls of tools and their results. All of it is text.
import { html, cx } from '../lib/html.js';
import { Markdown } from '../lib/markdown.js';
import { count, number, percent } from '../lib/format.js';
import { Badge, Copy } from './basics.js';
import { Icon } from './icon.js';
import { JsonTree } from './json-tree.js';

const SPEAKERS = { user: 'User', assistant: 'Assistant', system: 'System', tool: 'Tool', prompt: 'Prompt', developer: 'Developer' };

/** Returns JSON as a value, or undefined if the text is none. */
export function parsed(text) {
  if (typeof text !== 'string') return text;
  try { return JSON.parse(text); } catch { return undefined; }
}

/** A value that a tool got or gave: a tree if it has parts, otherwise text. */
export function Value({ value, label, open = 1 }) {
  const read = typeof value === 'string' && /^\s*[[{"]/.test(value) ? parsed(value) ?? value : value;
  if (read !== null && typeof read === 'object') return html`<${JsonTree} value=${read} label=${label} open=${open} />`;
  return html`<p class="value-text pre mono">${typeof read === 'string' ? read : String(read)}</p>`;
}

/** The reasoning of a model before its answer, folded. */
export const Reasoning = ({ text, isOpen, words = 'Reasoning' }) => (text ? html`<details class="thought" open=${isOpen}>
  <summary><${Icon} name="right" size=${12} />${words}<span class="muted"> · ${count(text.trim().split(/\s+/).length, 'word')}</span></summary><p class="pre">${text.trim()}</p></details>` : null);

/** A call of a tool, with its outcome once there is one. `argsOpen` is how deep the arguments are unfolded at first. */
export function Call({ name, args, result, error, hasResult, isOpen = 1, argsOpen = isOpen, waiting }) {
  return html`<div class=${cx('toolcall', error !== undefined && error !== null && 'failed')}>
    <div class="toolcall-head"><${Icon} name="tool" size=${14} /><code>${name}</code>${waiting && html`<span class="spinner" aria-hidden="true"></span><span class="muted small">${waiting}</span>`}</div>
    <div class="toolcall-part"><span class="toolcall-label">Arguments</span><${Value} value=${args} label=${`Arguments of ${name}`} open=${argsOpen} /></div>
    ${hasResult && html`<div class="toolcall-part"><span class="toolcall-label">Result</span><${Value} value=${result} label=${`Result of ${name}`} open=${isOpen} /></div>`}
    ${error !== undefined && error !== null && html`<div class="toolcall-part"><span class="toolcall-label">Error</span><p class="value-text pre mono bad-text">${error}</p></div>`}
  </div>`;
}

/** The frame of a message: who speaks at the left, what is said beside it. */
export const MessageFrame = ({ role, name, number: n, tokens, children, copy }) => html`<article class=${cx('said', `from-${role}`)} aria-label=${`${SPEAKERS[role] ?? role}${n ? `, message ${n}` : ''}`}>
  <header class="said-head"><span class="said-role">${SPEAKERS[role] ?? role}</span>${name && html`<code class="said-name">${name}</code>`}${n && html`<span class="said-number">${number(n)}${tokens !== undefined && html` · <span title="Tokens of the message, without the marks of the chat template">${count(tokens, 'token')}</span>`}</span>`}</header>
  <div class="said-body">${children}</div>
  ${copy && html`<div class="said-copy"><${Copy} text=${copy} label="Copy message" /></div>`}
</article>`;

/** A stored message. `find(id)` returns the call that a result answers. */
export function StoredMessage({ message, find }) {
  const { role, content, reasoning, tool_calls: calls = [], tool_call_id: answers, number: n, tokens } = message;
  if (role === 'tool') {
    const call = find?.(answers);
    return html`<${MessageFrame} role="tool" name=${call?.function?.name} number=${n} tokens=${tokens} copy=${content}><${Value} value=${content} label="Result of a tool" open=${0} /><//>`;
  }
  return html`<${MessageFrame} role=${role} number=${n} tokens=${tokens} copy=${content || undefined}>
    <${Reasoning} text=${reasoning} />
    ${content && (role === 'assistant' ? html`<${Markdown} text=${content} />` : html`<p class="pre">${content}</p>`)}
    ${calls.map((call) => html`<${Call} key=${call.id} name=${call.function?.name} args=${call.function?.arguments} />`)}
    ${!content && !calls.length && !reasoning && html`<p class="muted">(empty)</p>`}
  <//>`;
}

/** The tokens of a prompt as a bar: from the cache, computed; and what was generated. */
export function TokenBar({ prompt = 0, cached = 0, completion = 0, compact }) {
  const share = prompt ? cached / prompt : 0;
  return html`<div class=${cx('tokens', compact && 'compact')}>
    <div class="tokens-bar" role="img" aria-label=${`${number(cached)} of ${number(prompt)} prompt tokens came from the cache, ${number(completion)} were generated`}>
      <span class="tokens-cached" style=${{ width: `${share * 100}%` }}></span></div>
    <p class="tokens-words"><span><b>${number(cached)}</b> of ${number(prompt)} prompt tokens cached${prompt ? ` (${percent(share, 0)})` : ''}</span><span><b>${number(completion)}</b> generated</span></p>
  </div>`;
}

/** A word about how a generation ended. */
export const Outcome = ({ ok, children }) => html`<${Badge} tone=${ok ? 'ok' : 'bad'}>${children}<//>`;
