// The table of pages: address, module, title, and the role that the page needs. A module is loaded when its page is first opened; its default
// export is a component that gets `{params, query, caller}`.
import { BASE, pattern } from './lib/router.js';

const page = (path, module, title, { nav = module, need = 'read' } = {}) => ({
  match: pattern(`${BASE}${path}`), module, title, nav, need, load: () => import(`./pages/${module}.js`),
});

export const PAGES = [
  page('/playground', 'playground', 'Playground', { need: 'invoke' }),
  page('/agents', 'agents', 'Agents'),
  page('/agents/:agent', 'agent', 'Agent', { nav: 'agents' }),
  page('/sessions', 'sessions', 'Sessions'),
  page('/sessions/:agent/:session', 'session', 'Session', { nav: 'sessions' }),
  page('/sessions/:agent/:session/turns/:turn', 'turn', 'Turn', { nav: 'sessions' }),
  page('/inbox', 'inbox', 'Inbox'),
  page('/engine', 'engine', 'Engine'),
  page('/cluster', 'cluster', 'Cluster'),
  page('/usage', 'usage', 'Usage'),
  page('/requests', 'requests', 'Requests'),
  page('/requests/:id', 'requests', 'Request', { nav: 'requests' }),
  page('/docs', 'docs', 'Docs'),
  page('/docs/*page', 'docs', 'Docs'),
];

/** The navigation, in its order; `key` is the second key of its shortcut, after `g`. The cluster is left out where the host is in none. */
export const NAVIGATION = [
  { id: 'playground', label: 'Playground', path: `${BASE}/playground`, key: 'p', need: 'invoke' },
  { id: 'agents', label: 'Agents', path: `${BASE}/agents`, key: 'a', need: 'read' },
  { id: 'sessions', label: 'Sessions', path: `${BASE}/sessions`, key: 's', need: 'read' },
  { id: 'inbox', label: 'Inbox', path: `${BASE}/inbox`, key: 'i', need: 'read' },
  { id: 'engine', label: 'Engine', path: `${BASE}/engine`, key: 'e', need: 'read' },
  { id: 'cluster', label: 'Cluster', path: `${BASE}/cluster`, key: 'c', need: 'read' },
  { id: 'usage', label: 'Usage', path: `${BASE}/usage`, key: 'u', need: 'read' },
  { id: 'requests', label: 'Requests', path: `${BASE}/requests`, key: 'r', need: 'read' },
  { id: 'docs', label: 'Docs', path: `${BASE}/docs`, key: 'd', need: 'read' },
];

/** Returns `{page, params}` of a path, `{isStart}` for the console's root, which leads to the first page that the key may see, or null. */
export function findPage(path) {
  if (path === BASE || path === `${BASE}/`) return { isStart: true };
  for (const each of PAGES) {
    const params = each.match(path);
    if (params) return { page: each, params };
  }
  return null;
}
