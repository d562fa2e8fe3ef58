// Code with a button that copies it, and the same request in several languages.
import { html, useState } from '../lib/html.js';
import { Copy } from './basics.js';
import { Tabs } from './page.js';

/** A block of code. It is text; long lines scroll sideways within the block. */
export const Code = ({ text, lang, label }) => html`<div class="code">
  <pre tabindex="0" role="group" aria-label=${label ?? (lang ? `Code, ${lang}` : 'Code')}><code>${text}</code></pre>
  <div class="code-copy"><${Copy} text=${text} label="Copy code" /></div>
</div>`;

/** The same in several languages: `samples` is `[{id, label, text}]`. */
export function CodeTabs({ samples, label = 'Language' }) {
  const [active, select] = useState(samples[0].id);
  const shown = samples.find(({ id }) => id === active) ?? samples[0];
  return html`<${Tabs} small label=${label} tabs=${samples} active=${shown.id} onSelect=${select}><${Code} text=${shown.text} label=${shown.label} /><//>`;
}
