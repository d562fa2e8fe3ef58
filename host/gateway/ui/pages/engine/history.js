// The last hour of the engine: loaded once, then one sample a second from the stream. After a gap it is loaded again.
import { api } from '../../lib/api.js';
import { useEffect, useRef, useState } from '../../lib/html.js';
import { useResource, useStream } from '../../lib/hooks.js';

const KEPT = 3600;

/** Returns `{history: {at, models: [{name, …, columns}], version} | null, error, reload, live}`; `live` is the state of the stream. */
export function useHistory() {
  const loaded = useResource((signal) => api.get('/v1/engine', { signal }), []);
  const kept = useRef(null);
  const [version, draw] = useState(0);
  useEffect(() => {
    if (!loaded.data) return;
    kept.current = { at: [...loaded.data.at_ms], models: loaded.data.models.map((model) => ({ ...model, columns: copy(model.columns), each_replica: (model.each_replica ?? []).map(copy) })) };
    draw((n) => n + 1);
  }, [loaded.data]);
  const frame = useRef(0);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);
  const opened = useRef(0);
  const stream = useStream(loaded.data ? '/v1/engine' : null, {
    query: { stream: 'true' },
    // The samples between two connections are only in the history.
    onOpen: () => { opened.current += 1; if (opened.current > 1) loaded.reload(); },
    onEvent({ event, data }) {
      if (event !== 'sample' || !kept.current) return;
      const isKnown = add(kept.current, JSON.parse(data));
      if (!isKnown) loaded.reload();
      frame.current ||= requestAnimationFrame(() => { frame.current = 0; draw((n) => n + 1); });
    },
  });
  return { history: kept.current && { ...kept.current, version }, error: loaded.error, reload: loaded.reload, live: stream.state };
}

const copy = (columns) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, [...values]]));

/** Adds a sample. Returns false if it has a model that the history lacks, or the other way round. */
function add(history, { at_ms: at, models }) {
  if (at <= history.at.at(-1)) return true;
  history.at.push(at);
  const drop = history.at.length > KEPT;
  if (drop) history.at.shift();
  for (const model of history.models) {
    const sample = models.find(({ name }) => name === model.name);
    append(model.columns, sample?.values, drop);
    model.each_replica.forEach((columns, n) => append(columns, sample?.each_replica?.[n], drop));
  }
  return models.length === history.models.length && models.every(({ name }) => history.models.some((model) => model.name === name));
}

/** Adds values to the ends of columns. */
function append(columns, values, drop) {
  for (const [name, column] of Object.entries(columns)) {
    column.push(values?.[name] ?? null);
    if (drop) column.shift();
  }
}

/** Returns the newest value of a column, or null. */
export const newest = (columns, name) => columns[name]?.at(-1) ?? null;

/** Returns the mean of a column over the last minute, or null. */
export function recent(columns, name) {
  const known = (columns[name] ?? []).slice(-60).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/**
 * Cuts the newest `spanS` seconds out of the columns of a model: `{at, columns}`. With `everyS` above 1, a point is the mean of so many seconds; that
 * of a p99 is their highest. Points lie on round times, so that they stay where they are while new ones come.
 */
export function cutOut(history, columns, spanS, everyS) {
  const first = Math.max(0, history.at.findIndex((at) => at >= history.at.at(-1) - spanS * 1000));
  if (everyS <= 1) return { at: history.at.slice(first), columns: mapColumns(columns, (values) => values.slice(first)) };
  const starts = [];
  let last = null;
  for (let n = first; n < history.at.length; n += 1) {
    const bucket = Math.floor(history.at[n] / (everyS * 1000));
    if (bucket !== last) starts.push(n);
    last = bucket;
  }
  const ends = [...starts.slice(1), history.at.length];
  return {
    at: ends.map((end) => history.at[end - 1]),
    columns: mapColumns(columns, (values, name) => starts.map((start, n) => (name.endsWith('_p99') ? highest : mean)(values, start, ends[n]))),
  };
}

const mapColumns = (columns, cut) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, cut(values, name)]));

function mean(values, from, to) {
  let sum = 0;
  let known = 0;
  for (let n = from; n < to; n += 1) if (values[n] !== null) { sum += values[n]; known += 1; }
  return known ? sum / known : null;
}

function highest(values, from, to) {
  let high = null;
  for (let n = from; n < to; n += 1) if (values[n] !== null && (high === null || values[n] > high)) high = values[n];
  return high;
}
