// The console: finds out who calls, then draws the shell and the page of the address.
import { html, render, useEffect } from './lib/html.js';
import { connection } from './lib/connection.js';
import { callerStore, identify, may } from './lib/caller.js';
import { navigate, useRoute } from './lib/router.js';
import { Shell } from './parts/shell.js';
import { SignIn } from './parts/sign-in.js';
import { Refused, Unreachable } from './parts/refusals.js';
import { PageOutlet } from './parts/outlet.js';
import { findPage, NAVIGATION } from './pages.js';

function App() {
  const { state, caller, error, hasEnded } = callerStore.use();
  const { path, query } = useRoute();
  const found = findPage(path);
  useEffect(() => {
    const first = caller && NAVIGATION.find(({ need }) => may(caller, need));
    // A person may have gone on since this was drawn.
    if (findPage(location.pathname)?.isStart && first) navigate(first.path, { replace: true });
  }, [path, caller]);

  if (state === 'loading') return null;
  if (state === 'failed') return html`<${Unreachable} error=${error} />`;
  if (state === 'signed-out') return html`<${SignIn} hasEnded=${hasEnded} />`;
  if (state === 'refused' || !may(caller, 'read')) return html`<${Refused} caller=${caller} error=${error} need="read" whole />`;
  return html`<${Shell} caller=${caller} page=${found?.page}>
    ${found?.isStart ? null : html`<${PageOutlet} found=${found} path=${path} query=${query} caller=${caller} />`}
  <//>`;
}

// When the host comes back it may be another one, with other keys.
connection.listen(({ away }) => { if (!away) identify().catch(() => {}); });

// The page's module and the answer of who calls are fetched at the same time.
findPage(location.pathname)?.page?.load().catch(() => {});

const root = document.getElementById('app');
identify().catch(() => {}).finally(() => {
  root.replaceChildren();
  render(html`<${App} />`, root);
});
