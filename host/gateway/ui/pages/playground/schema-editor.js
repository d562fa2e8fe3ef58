// A text field for a JSON Schema that says while one types what the host enforces.
import { api } from '../../lib/api.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { useDebounced } from '../../lib/hooks.js';
import { Markdown } from '../../lib/markdown.js';
import { Button, Field, Icon } from '../../parts/index.js';
import { parse } from './request.js';
import { isAgent } from './state.js';

/** `value` is the text; `example` fills it; the schema is checked for the model. */
export function SchemaEditor({ label, model, value, onChange, example, rows = 10, hint }) {
  const verdict = useVerdict(value, model);
  const format = () => { const { value: schema } = parse(value); if (schema !== undefined) onChange(JSON.stringify(schema, null, 2)); };
  return html`<div class="schema-editor">
    <${Field} label=${label} hint=${hint} extra=${html`<span class="row">
        ${example && !value.trim() && html`<${Button} kind="quiet" small onClick=${() => onChange(JSON.stringify(example, null, 2))}>Use an example<//>`}
        <${Button} kind="quiet" small onClick=${format} disabled=${verdict.tone === 'bad' || !value.trim()}>Format<//></span>`}>
      ${(id, note) => html`<textarea id=${id} class="mono" aria-describedby=${note} rows=${rows} spellcheck=${false} autocapitalize="off" value=${value}
        placeholder='{"type": "object", "properties": {…}}' onInput=${(event) => onChange(event.currentTarget.value)} />`}
    <//>
    <${Verdict} ...${verdict} />
  </div>`;
}

/** Asks the host about the schema a moment after the last key. Returns `{tone, text, notes}`. */
export function useVerdict(text, model) {
  const settled = useDebounced(text, 250);
  const [verdict, set] = useState({ tone: 'none', text: '', notes: [] });
  useEffect(() => {
    if (!settled.trim()) { set({ tone: 'none', text: 'Write a JSON Schema; the host checks it as you type.', notes: [] }); return undefined; }
    const { value: schema, error } = parse(settled);
    if (error) { set({ tone: 'bad', text: error, notes: [] }); return undefined; }
    const stop = new AbortController();
    api.post('/v1/schemas/check', { schema, ...(model && !isAgent(model) ? { model } : {}) }, { signal: stop.signal }).then((check) => {
      const notes = check.notes ?? [];
      if (check.error) set({ tone: 'bad', text: check.error.message, notes });
      else if (!check.enforced) set({ tone: 'warn', text: 'The host cannot enforce this schema.', notes });
      else if (notes.some(({ kind }) => kind !== 'warning')) set({ tone: 'warn', text: 'Every answer satisfies it; a part is checked only when a value is complete:', notes });
      else set({ tone: notes.length ? 'warn' : 'ok', text: notes.length ? 'Enforced while the model writes, with warnings:' : 'Enforced while the model writes.', notes });
    }, (failure) => { if (!stop.signal.aborted) set({ tone: 'warn', text: `Not checked: ${failure.message}`, notes: [] }); });
    return () => stop.abort();
  }, [settled, model]);
  return verdict;
}

/** The part of the schema that a note belongs to, and its text. */
function NoteText({ path, keywords, message }) {
  return html`${typeof path === 'string' && html`<code>${path || '/'}</code> `}${(keywords ?? []).map((keyword) => html`<code key=${keyword}>${keyword}</code> `)}<${Markdown} text=${message} />`;
}

const Verdict = ({ tone, text, notes }) => html`<div class=${`verdict ${tone}`} role="status" aria-live="polite">
  ${tone !== 'none' && html`<${Icon} name=${tone === 'ok' ? 'check' : 'warning'} size=${14} />`}
  <div><p>${text}</p>${notes.length > 0 && html`<ul>${notes.map((note, n) => html`<li key=${n}><${NoteText} ...${note} /></li>`)}</ul>`}</div>
</div>`;
