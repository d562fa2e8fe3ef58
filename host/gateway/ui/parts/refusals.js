// The texts that replace a page that the key may not see, or any page while the host has not been reached yet.
import { html } from '../lib/html.js';
import { connection, askNow } from '../lib/connection.js';
import { identify, signOut } from '../lib/caller.js';
import { Badge, Button, Empty, ErrorNote } from './basics.js';
import { Page } from './page.js';

const NEEDS = {
  read: 'reads lists, sessions, turns and logs',
  invoke: 'sends messages and generates',
  admin: 'is the operator’s: it changes the host and sees all tenants',
};

/** Says which role a page needs and which one the key has. `whole` fills the window, for keys that see no page at all. */
export function Refused({ caller, error, need, title = 'Not allowed', whole }) {
  const note = html`<${Empty} icon="lock" title=${`This needs a key with the role “${need}”`}
      action=${(caller?.key || !caller) && html`<${Button} icon="signout" onClick=${signOut}>Sign in with another key<//>`}>
    <p>That role ${NEEDS[need]}. ${caller && html`Your key of tenant <strong>${caller.tenant}</strong> has the role <${Badge}>${caller.role}<//>.`}</p>
    ${error && html`<p>The host says: ${error.message}</p>`}
    ${whole && html`<p>Keys with the role “metrics” read <code>/metrics</code> and nothing else.</p>`}
    <p>An operator makes keys with <code>skep key create --role ${need}</code>.</p>
  <//>`;
  if (whole) return html`<main class="alone"><h1 class="sr-only">Not allowed</h1>${note}</main>`;
  return html`<${Page} title=${title}>${note}<//>`;
}

/** The host did not say who calls, because it does not answer or failed. */
export function Unreachable({ error }) {
  const { away } = connection.use();
  return html`<main class="alone"><h1>Skep</h1>
    <${ErrorNote} error=${error} onRetry=${() => { askNow(); identify().catch(() => {}); }} />
    ${away && html`<p class="muted" role="status">Trying again until the host answers…</p>`}
  </main>`;
}
