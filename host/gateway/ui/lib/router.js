// Addresses: every page is a real path below /ui, so it can be sent to a colleague.
import { html, useEffect, useState } from './html.js';

export const BASE = '/ui';

/** Addresses of pages, with names encoded: `paths.session('hello', 'ada')`. */
export const paths = {
  playground: () => `${BASE}/playground`,
  agents: () => `${BASE}/agents`,
  agent: (agent) => `${BASE}/agents/${encodeURIComponent(agent)}`,
  sessions: () => `${BASE}/sessions`,
  session: (agent, session) => `${BASE}/sessions/${encodeURIComponent(agent)}/${encodeURIComponent(session)}`,
  turn: (agent, session, turn) => `${paths.session(agent, session)}/turns/${encodeURIComponent(turn)}`,
  inbox: () => `${BASE}/inbox`,
  engine: () => `${BASE}/engine`,
  cluster: () => `${BASE}/cluster`,
  usage: () => `${BASE}/usage`,
  requests: () => `${BASE}/requests`,
  request: (id) => `${BASE}/requests/${encodeURIComponent(id)}`,
  docs: (page = '') => `${BASE}/docs${page && `/${page}`}`,
};

/**
 * Compiles a pattern such as `/sessions/:agent/:session` or `/docs/*rest` into a function from a path to its parameters,
 * or null where it does not match.
 */
export function pattern(text) {
  const parts = text.split('/').filter(Boolean);
  return (path) => {
    const given = path.split('/').filter(Boolean);
    const params = {};
    for (const [n, part] of parts.entries()) {
      if (part.startsWith('*')) {
        params[part.slice(1)] = given.slice(n).map(decode).join('/');
        return params;
      }
      if (given[n] === undefined) return null;
      if (part.startsWith(':')) params[part.slice(1)] = decode(given[n]);
      else if (part !== given[n]) return null;
    }
    return given.length === parts.length ? params : null;
  };
}

function decode(segment) {
  try { return decodeURIComponent(segment); } catch { return segment; }
}

const here = () => ({ path: location.pathname, search: location.search, hash: location.hash });
const listeners = new Set();

function moved() {
  const route = here();
  for (const listener of [...listeners]) listener(route);
}
addEventListener('popstate', moved);

/** Goes to an address of the console. `replace` leaves no entry in the history. */
export function navigate(path, { replace = false } = {}) {
  if (path === location.pathname + location.search + location.hash && !replace) return;
  history[replace ? 'replaceState' : 'pushState'](null, '', path);
  moved();
}

/** Changes members of the query in place: `setQuery({search: 'x'})`; empty ones go. */
export function setQuery(changes, { replace = true } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === '') query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  navigate(`${location.pathname}${text && `?${text}`}${location.hash}`, { replace });
}

/** Returns `{path, query, hash}` of the address, and draws again when it changes. */
export function useRoute() {
  const [route, set] = useState(here);
  useEffect(() => {
    set(here());
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  return { path: route.path, query: Object.fromEntries(new URLSearchParams(route.search)), hash: route.hash };
}

/** A link within the console. A click with a modifier key opens a tab, as everywhere. */
export function Link({ href, children, onClick, ...rest }) {
  const click = (event) => {
    onClick?.(event);
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    navigate(href);
  };
  return html`<a href=${href} onClick=${click} ...${rest}>${children}</a>`;
}
