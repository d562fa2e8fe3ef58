// The sign-in page. The key goes to the host once, which answers with a cookie that scripts cannot read; it is kept nowhere else.
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { useAction } from '../lib/hooks.js';
import { signIn } from '../lib/caller.js';
import { Button, Field, Note } from './basics.js';

/** `hasEnded`: the person was signed in, until the host no longer knew the key. */
export function SignIn({ hasEnded }) {
  const [key, setKey] = useState('');
  const input = useRef();
  const [enter, { busy, error }] = useAction(() => signIn(key.trim()));
  useEffect(() => { document.title = 'Sign in · Skep'; input.current?.focus(); }, []);
  const submit = async (event) => {
    event.preventDefault();
    if (!key.trim()) { input.current.focus(); return; }
    // Whoever has begun to type another key keeps on typing.
    if (await enter() === undefined && input.current?.value === key) input.current.select();
  };
  return html`<main class="alone"><form class="sign-in card" onSubmit=${submit}>
    <img src="/ui/icon.svg" alt="" width="40" height="40" />
    <h1>Sign in to Skep</h1>
    ${hasEnded && html`<div role="status"><${Note} tone="warn">You are signed out: the key was revoked, or the sign-in has expired. This page opens again after you sign in.<//></div>`}
    <p class="muted">This host asks for an API key. What the console shows depends on the key’s tenant, role and agents.</p>
    <${Field} label="API key" error=${error && [error.status === 401 ? 'The host does not know this key, or it was revoked.' : error.message, error.hint].filter(Boolean).join(' ')}
      hint="It begins with skep_. An operator makes one with “skep key create”.">
      ${(id, note) => html`<input ref=${input} id=${id} aria-describedby=${note} type="password" name="key" autocomplete="current-password" spellcheck=${false}
        placeholder="skep_…" value=${key} onInput=${(event) => setKey(event.currentTarget.value)} aria-invalid=${error ? 'true' : undefined} />`}
    <//>
    <${Button} kind="primary" type="submit" busy=${busy} icon="key">Sign in<//>
  </form></main>`;
}
