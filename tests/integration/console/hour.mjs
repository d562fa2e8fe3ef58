// A page that is left open does not grow. What an hour brings is played at speed: samples of the engine, events of the log of requests, the polls of
// the lists by a clock that is turned forward, and the way through all pages. Afterwards the heap of the scripts, the nodes and the
// listeners must be what they were when the page was warm. MINUTES is the length of the hour.
import { PATIENCE_MS, api, check, healthy, open, scenario, visit } from './browser.mjs';

const MINUTES = Number(process.env.MINUTES ?? 60);
const SECONDS = MINUTES * 60;
/** The differences that are allowed. The heap of a page that keeps nothing goes up and down by 0.7 MB over hours: code that is compiled, room of arrays. */
const MOST_HEAP = 1_000_000;
const MOST_NODES = 150;
const MOST_LISTENERS = 40;

async function probe(page) {
  const client = await page.context().newCDPSession(page);
  await client.send('HeapProfiler.enable');
  await client.send('Performance.enable');
  return async () => {
    for (let round = 0; round < 3; round += 1) {
      await client.send('HeapProfiler.collectGarbage');
      await page.evaluate(() => new Promise((done) => { requestAnimationFrame(() => setTimeout(done, 20)); }));
    }
    const { metrics } = await client.send('Performance.getMetrics');
    const value = (wanted) => metrics.find(({ name }) => name === wanted).value;
    return { heap: value('JSHeapUsedSize'), nodes: value('Nodes'), listeners: value('JSEventListeners') };
  };
}

/** Compares what a page holds before and after `run`. A page that keeps something grows each time; code that is compiled later, or a cache that fills, grows once. */
async function stays(what, page, measure, run) {
  let before = await measure();
  for (let tries = 1; ; tries += 1) {
    const did = await run();
    const after = await measure();
    const grew = (name) => after[name] - before[name];
    console.log(`${what}: ${did}; heap ${(before.heap / 1e6).toFixed(2)} to ${(after.heap / 1e6).toFixed(2)} MB, nodes ${before.nodes} to ${after.nodes}, listeners ${before.listeners} to ${after.listeners}`);
    healthy(page);
    if (grew('heap') < MOST_HEAP && grew('nodes') < MOST_NODES && grew('listeners') < MOST_LISTENERS) return;
    check(tries < 3, `${what}: ${grew('heap')} bytes, ${grew('nodes')} nodes and ${grew('listeners')} listeners more are in memory`);
    before = after;
  }
}

/** Puts streams that this script feeds in the place of the host's, and a whole hour in the place of the host's minutes. */
function fedStreams() {
  const real = window.fetch;
  const encoder = new TextEncoder();
  window.feeds = new Map();
  window.feed = (path, event, data) => window.feeds.get(path)?.enqueue(encoder.encode(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`));
  window.fetch = async (path, init) => {
    const { pathname, searchParams } = new URL(path, location.origin);
    if (searchParams.get('stream') === 'true' || searchParams.get('follow') === 'true') {
      const body = new ReadableStream({ start(control) { window.feeds.set(pathname, control); } });
      return new Response(body, { headers: { 'content-type': 'text/event-stream' } });
    }
    const response = await real(path, init);
    if (pathname !== '/v1/engine') return response;
    const figures = await response.json();
    const last = figures.at_ms.at(-1) ?? Date.now();
    const value = (name, n) => (name.startsWith('pages') ? 400 + (n % 50) : Math.abs(Math.sin(n / 40)) * 90 + (n % 7));
    window.sample = (n) => ({ at_ms: last + n * 1000, models: figures.models.map((model) => ({ name: model.name, values: Object.fromEntries(Object.keys(model.columns).map((name) => [name, value(name, n)])) })) });
    const hour = Array.from({ length: 3600 }, (_, n) => n - 3599);
    const models = figures.models.map((model) => ({ ...model, columns: Object.fromEntries(Object.keys(model.columns).map((name) => [name, hour.map((n) => value(name, n))])) }));
    return new Response(JSON.stringify({ ...figures, at_ms: hour.map((n) => last + n * 1000), models }), { headers: { 'content-type': 'application/json' } });
  };
}

async function engine() {
  const page = await open();
  await page.addInitScript(fedStreams);
  await visit(page, '/ui/engine');
  await page.getByText('Live').first().waitFor();
  const measure = await probe(page);
  const play = (from, to) => page.evaluate(async ([first, last]) => {
    for (let n = first; n < last; n += 1) {
      window.feed('/v1/engine', 'sample', window.sample(n));
      if (n % 3 === 0) await new Promise(requestAnimationFrame);
    }
  }, [from, to]);
  let second = 120;
  await play(1, second);
  await stays('engine', page, measure, async () => { await play(second, second += SECONDS); return `${SECONDS} samples`; });
  await page.context().close();
}

async function requests() {
  const { data: [row] } = await api('GET', '/v1/requests');
  const page = await open();
  await page.addInitScript(fedStreams);
  await visit(page, '/ui/requests');
  await page.getByText('Live').first().waitFor();
  const measure = await probe(page);
  const play = (from, to) => page.evaluate(async ([first, last, like]) => {
    for (let n = first; n < last; n += 1) {
      window.feed('/v1/requests', 'request', { ...like, id: `req_${n}`, at_ms: like.at_ms + n });
      if (n % 50 === 0) await new Promise(requestAnimationFrame);
    }
    await new Promise((done) => { setTimeout(done, 500); });
  }, [from, to, row]);
  // The list holds 5,000 records; older ones fall off its end.
  let event = 6_000;
  await play(0, event);
  await stays('requests', page, measure, async () => { await play(event, event += 3 * SECONDS); return `${3 * SECONDS} events`; });
  await page.context().close();
}

/** Polls: the list of sessions, the inbox in the navigation and all clocks, while sessions get new turns. */
async function polls() {
  const page = await open();
  await page.clock.install();
  await visit(page, '/ui/sessions');
  await page.locator('.table-box tbody tr').first().waitFor();
  const measure = await probe(page);
  const step = async () => { await page.clock.runFor(4_000); await page.evaluate(() => fetch('/healthz').then(() => null)); };
  const play = async (steps) => {
    for (let n = 0; n < steps; n += 1) {
      if (n % 10 === 0) await api('POST', `/v1/agents/echo/sessions/p-${n % 50}/messages`, { text: '1' });
      await step();
    }
  };
  await play(12);
  const count = Math.round(SECONDS / 4);
  await stays('sessions', page, measure, async () => { await play(count); return `${count} polls`; });
  await page.context().close();
}

/** Pages that are opened and left again and again, by scripts of the page itself, because a driver's look-ups leave something behind. */
async function visits() {
  const page = await open();
  await visit(page, '/ui/agents');
  const measure = await probe(page);
  const go = (rounds) => page.evaluate(async ([count, patience]) => {
    const links = [...document.querySelectorAll('nav[aria-label=Console] a.nav-item')].map(({ href }) => new URL(href).pathname);
    const title = () => document.querySelector('main h1')?.textContent;
    const soon = () => new Promise((done) => { setTimeout(done, 30); });
    for (let n = 0; n < count; n += 1) for (const path of links) {
      const before = title();
      document.querySelector(`nav a[href="${path}"]`).click();
      const latest = performance.now() + patience;
      while (title() === before || !title()) {
        if (performance.now() > latest) throw new Error(`${path} did not open`);
        await soon();
      }
      await soon();
    }
    return links.length;
  }, [rounds, PATIENCE_MS]);
  // The code that is compiled for each page, and what browsers keep of it, settles after some rounds.
  await go(15);
  const rounds = Math.max(5, Math.round(MINUTES / 2));
  await stays('visits', page, measure, async () => `${rounds * await go(rounds)} pages`);
  await page.context().close();
}

await scenario(async () => {
  await engine();
  await requests();
  await polls();
  await visits();
});
