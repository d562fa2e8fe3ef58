// The HTTP API of the host. Every page goes through this file; what it can do, `curl` can.
import { answered, lost } from './connection.js';
import { readEvents } from './sse.js';
import { createStore } from './store.js';

/** Turns true when an answer said 401: the shell then shows the sign-in page. */
export const signedOut = createStore(false);

let signIns = 0;

/** Notes that somebody has signed in: a 401 to an earlier request no longer counts. */
export function signedIn() {
  signIns += 1;
}

/** An error answer of the host. `status` is 0 if the host did not answer at all. */
export class ApiError extends Error {
  constructor(status, code, text, more = {}) {
    const [message, ...hints] = String(text).split(/[\n;]?\s*\bhint:\s*/);
    super(message.trim());
    this.name = 'ApiError';
    this.status = status;
    this.code = code;
    this.hint = hints.join(' ').trim() || more.hint || null;
    this.param = more.param ?? null;
    this.retryAfterS = more.retryAfterS ?? null;
  }

  /** Whether the host did not answer, so that the same request may succeed later. */
  get isAway() {
    return this.status === 0;
  }
}

/** Makes an ApiError of an `{error: {message, code, …}}` object, whoever sent it. */
export function errorOf(body, status = 0, more = {}) {
  const { message = 'The host answered with an error.', code = 'error', hint, param } = body?.error ?? {};
  return new ApiError(status, code, message, { hint, param, ...more });
}

/** Returns `path` with the query's members that are neither undefined, null nor empty. */
export function withQuery(path, query) {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== '');
  if (!pairs.length) return path;
  return `${path}${path.includes('?') ? '&' : '?'}${new URLSearchParams(pairs)}`;
}

/** Encodes one segment of a path: ``url`/v1/agents/${name}` ``. */
export const url = (strings, ...values) =>
  strings.reduce((path, text, n) => path + encodeURIComponent(values[n - 1]) + text);

async function refusal(response) {
  let body = null;
  try { body = await response.json(); } catch { /* Not every error has a body of JSON. */ }
  return errorOf(body?.error ? body : { error: { message: `${response.status} ${response.statusText}`.trim() } },
    response.status, { retryAfterS: Number(response.headers.get('retry-after')) || null });
}

async function send(method, path, { query, body, headers, signal, accept } = {}) {
  const isRaw = body instanceof FormData || body instanceof Blob || typeof body === 'string';
  const all = { 'x-skep-console': '1', ...(accept ? { accept } : {}), ...headers };
  if (body !== undefined && !isRaw) all['content-type'] = 'application/json';
  const since = signIns;
  let response;
  try {
    const init = { method, headers: all, signal, cache: 'no-store', body: isRaw ? body : JSON.stringify(body) };
    response = await fetch(withQuery(path, query), init);
  } catch (cause) {
    if (signal?.aborted) throw cause;
    lost();
    throw new ApiError(0, 'host_unreachable', 'The host does not answer.', { hint: 'See whether the process still runs.' });
  }
  answered();
  if (response.status === 401 && since === signIns) signedOut.set(true);
  if (!response.ok) throw await refusal(response);
  return response;
}

async function json(method, path, options) {
  const response = await send(method, path, options);
  if (response.status === 204) return null;
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

export const api = {
  get: (path, options) => json('GET', path, options),
  post: (path, body, options) => json('POST', path, { ...options, body }),
  put: (path, body, options) => json('PUT', path, { ...options, body }),
  del: (path, options) => json('DELETE', path, options),
  /** Returns the answer as text. */
  text: async (path, options) => (await send('GET', path, options)).text(),
  /** Returns the whole response, for headers or a download. */
  raw: (method, path, options) => send(method, path, options),
  /** Reads a stream of events until it ends. It posts if there is a `body`. `onEvent` gets `{event, data, id}`, data as text. */
  async stream(path, { method, query, body, headers, signal, lastId, onEvent, onOpen }) {
    const all = { ...headers, ...(lastId ? { 'last-event-id': lastId } : {}) };
    const verb = method ?? (body === undefined ? 'GET' : 'POST');
    const response = await send(verb, path, { query, body, headers: all, signal, accept: 'text/event-stream' });
    onOpen?.(response);
    try {
      await readEvents(response.body, onEvent);
    } catch (cause) {
      if (signal?.aborted) throw cause;
      lost();
      throw new ApiError(0, 'stream_cut', 'The stream broke off.', { hint: 'Check that the host still runs, then try again.' });
    }
  },
};
