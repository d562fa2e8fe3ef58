// Loads the module of a page and draws it. A module that does not load and a page that fails show what happened; the shell stays.
import { Component, html, useEffect, useState } from '../lib/html.js';
import { may } from '../lib/caller.js';
import { paths } from '../lib/router.js';
import { Button, Empty, ErrorNote, Skeleton } from './basics.js';
import { Page } from './page.js';
import { Refused } from './refusals.js';

const modules = new Map();

export function PageOutlet({ found, path, query, caller }) {
  useEffect(() => { scrollTo(0, 0); }, [path]);
  if (!found) {
    return html`<${Page} title="No such page"><${Empty} icon="search" title="There is nothing at this address"
      action=${html`<${Button} href=${paths.playground()}>Open the playground<//>`}>The address may have a typo, or the page may have moved.<//><//>`;
  }
  const { page, params } = found;
  if (!may(caller, page.need)) return html`<${Refused} caller=${caller} need=${page.need} title=${page.title} />`;
  return html`<${Boundary} key=${path}><${Loader} page=${page} params=${params} query=${query} caller=${caller} /><//>`;
}

function Loader({ page, ...props }) {
  const [state, set] = useState({ component: modules.get(page.module) ?? null, error: null });
  const [round, again] = useState(0);
  useEffect(() => {
    let isCurrent = true;
    if (modules.has(page.module)) return undefined;
    page.load().then(
      ({ default: component }) => { modules.set(page.module, component); if (isCurrent) set({ component, error: null }); },
      (error) => { if (isCurrent) set({ component: null, error }); },
    );
    return () => { isCurrent = false; };
  }, [page.module, round]);
  if (state.component) return html`<${state.component} ...${props} />`;
  if (state.error) {
    // A browser keeps a module that failed to load, so only loading the document again helps.
    return html`<${Page} title=${page.title}><${ErrorNote} title="The page could not be loaded." error=${{ message: String(state.error.message ?? state.error), hint: 'The host may be away, or it may be another version now. Load the console again.' }}
      onRetry=${() => { again(round + 1); location.reload(); }} /><//>`;
  }
  return html`<div class="page" aria-busy="true"><header class="page-head"><h1>${page.title}</h1></header><${Skeleton} lines=${6} /></div>`;
}

/** Catches what a page throws while it is drawn. */
class Boundary extends Component {
  state = { error: null };

  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }) {
    const { error } = this.state;
    if (!error) return children;
    return html`<${Page} title="This page failed"><${ErrorNote} error=${{ message: String(error.message ?? error), hint: 'This is an error of the console. Loading the page again may help; the host is not affected.' }}
      onRetry=${() => this.setState({ error: null })} /><//>`;
  }
}
