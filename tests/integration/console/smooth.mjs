// Long lists stay smooth: 10,000 sessions and a session of 5,000 messages, scrolled by the wheel from end to end. The number of rows in
// the document stays bounded, and so does the processor time that the page takes for a step of the wheel, which other programs of the machine
// do not lengthen. How long the browser was busy by the clock is printed; LONGEST_TASK_MS makes more than that a failure.
import { api, check, healthy, open, scenario, visit } from './browser.mjs';

const { AGENT, LONGEST_TASK_MS } = process.env;
const SESSIONS = 10_000;
const MESSAGES = 5_000;
const AT_ONCE = 24;
/** People feel a frame that takes 50 ms as a jerk. A machine whose processor is half as fast may take twice as long. */
const MOST_STEP_MS = Number(process.env.MOST_STEP_MS ?? 100);

/** Imports sessions, which is the fastest way through the API to make many of them. */
async function fill() {
  const session = (id, conversations = []) => ({
    format: 'skep.session', version: 1, agent: AGENT, session: id, turns: 1, created_at_ms: 1, updated_at_ms: 1, state: {}, conversations,
  });
  const put = (id, body) => api('PUT', `/v1/agents/${AGENT}/sessions/${id}`, body);
  // A host that has them is measured as it is.
  if ((await api('GET', '/v1/sessions?limit=1')).data.length) return;
  const { data: [model] } = await api('GET', '/v1/models');
  const usage = { prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };
  const messages = Array.from({ length: MESSAGES }, (_, n) => ({
    role: n % 2 ? 'assistant' : 'user',
    content: n % 2 ? `Answer **${n}**.\n\n${'It has a few words, and `code`. '.repeat(n % 7)}\n\n- one\n- two` : `Question ${n}: ${'and so on '.repeat(n % 5)}`,
  }));
  await put('long', session('long', [{ name: 'main', model: model.id, transcript: { messages, tokens: [], rendered: '', usage } }]));
  let next = 1;
  const worker = async () => { while (next < SESSIONS) { const id = `s-${next++}`; await put(id, session(id)); } };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

/** Notes each task of the page that takes longer than 50 ms, which is what people feel as a jerk. */
async function watch(page) {
  await page.addInitScript(() => {
    window.longTasks = [];
    window.drawn = 0;
    const frame = () => { window.drawn += 1; requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
    new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.longTasks.push(Math.round(entry.duration)); }).observe({ type: 'longtask', buffered: false });
  });
}

/** Turns the wheel until `isDone` says so, and returns what the page did meanwhile. */
async function scroll(page, { name, rows, delta, isDone, mostSteps = 2_000 }) {
  const box = await page.locator(name).boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  const client = await page.context().newCDPSession(page);
  await client.send('Performance.enable');
  const workedMs = async () => (await client.send('Performance.getMetrics')).metrics.find((metric) => metric.name === 'ThreadTime').value * 1000;
  const began = await page.evaluate(() => { window.longTasks.length = 0; window.drawn = 0; return performance.now(); });
  let steps = 0;
  let most = 0;
  const workedInSteps = [];
  for (; steps < mostSteps; steps += 1) {
    const before = await workedMs();
    await page.mouse.wheel(0, delta);
    const seen = await page.evaluate((selector) => new Promise((done) => { requestAnimationFrame(() => done(document.querySelectorAll(selector).length)); }), rows);
    most = Math.max(most, seen);
    workedInSteps.push(await workedMs() - before);
    if (await isDone()) break;
  }
  check(steps < mostSteps, `${name} did not come to its end in ${steps} steps`);
  const figures = await page.evaluate((since) => ({ tasks: [...window.longTasks], perSecond: (window.drawn * 1000) / (performance.now() - since) }), began);
  // The browser collects garbage in a few steps, and a busy machine makes others longer. A tenth of them, and at least two, do not count.
  const longestMs = workedInSteps.toSorted((a, b) => b - a)[Math.max(2, Math.floor(workedInSteps.length / 10))];
  const sumMs = workedInSteps.reduce((sum, ms) => sum + ms, 0);
  return { steps, most, stepMs: sumMs / steps, longestMs, ...figures };
}

function tell(what, { steps, most, stepMs, longestMs, tasks, perSecond }) {
  const longest = Math.max(0, ...tasks);
  console.log(`${what}: ${steps} steps of the wheel, ${stepMs.toFixed(1)} ms of processor time in a step, at most ${longestMs.toFixed(0)} ms in nine of ten, ${perSecond.toFixed(0)} frames/s, at most ${most} rows in the document, `
    + `${tasks.length} tasks over 50 ms${tasks.length ? `, the longest ${longest} ms` : ''}`);
  check(longestMs <= MOST_STEP_MS, `${what}: a step of the wheel took ${longestMs.toFixed(0)} ms of processor time, and not ${MOST_STEP_MS} ms at most`);
  if (LONGEST_TASK_MS) check(longest <= Number(LONGEST_TASK_MS), `${what}: a task took ${longest} ms`);
}

/** Each filter begins at the top and loads more at its end, also if the filter before had as many rows there. */
async function filtered(page, box) {
  const counted = (text) => page.locator('.filter-count').getByText(text, { exact: true }).waitFor();
  for (const search of ['s-1', 's-2']) {
    await page.getByLabel('Search by id').fill(search);
    await counted('200+ sessions');
    await page.getByRole('link', { name: new RegExp(`^${search}`) }).first().waitFor();
    await page.locator(box).evaluate((element) => { element.scrollTop = element.scrollHeight; });
    await counted('400+ sessions');
  }
}

async function sessions() {
  const page = await open();
  await watch(page);
  await visit(page, '/ui/sessions');
  const box = '.table-box';
  await page.locator(`${box} tbody tr`).first().waitFor();
  const state = () => page.evaluate(() => {
    const element = document.querySelector('.table-box');
    const rows = [...element.querySelectorAll('tbody tr[aria-rowindex]')].map((row) => Number(row.ariaRowIndex));
    return { atEnd: element.scrollTop + element.clientHeight >= element.scrollHeight - 2, last: rows.at(-1), count: Number(element.querySelector('table').ariaRowCount) };
  });
  let turns = 0;
  const slow = await scroll(page, { name: box, rows: `${box} tbody tr`, delta: 100, isDone: async () => { turns += 1; return turns > 200; } });
  tell(`${SESSIONS} sessions, slowly`, slow);
  const down = await scroll(page, { name: box, rows: `${box} tbody tr`, delta: 1200, isDone: async () => { const now = await state(); return now.atEnd && now.last === SESSIONS + 1; } });
  tell(`${SESSIONS} sessions, down`, down);
  check((await state()).count === SESSIONS + 1, JSON.stringify(await state()));
  // The first session that was made is the last row, and what is in view is where it belongs.
  await page.getByRole('link', { name: 'long', exact: true }).waitFor();
  const up = await scroll(page, { name: box, rows: `${box} tbody tr`, delta: -6000, isDone: () => page.evaluate(() => document.querySelector('.table-box').scrollTop === 0) });
  tell(`${SESSIONS} sessions, up`, up);
  for (const { most } of [slow, down, up]) check(most > 20 && most < 100, `${most} rows of sessions are in the document`);
  await filtered(page, box);
  healthy(page);
  await page.context().close();
}

async function messages() {
  const page = await open();
  await watch(page);
  await visit(page, `/ui/sessions/${AGENT}/long`);
  const box = '.transcript';
  const item = '.transcript-item';
  // A session opens at its end.
  await page.getByRole('article', { name: `Assistant, message ${MESSAGES}` }).waitFor();
  const up = await scroll(page, { name: box, rows: item, delta: -2400, isDone: () => page.evaluate(() => document.querySelector('.transcript').scrollTop === 0) });
  tell(`${MESSAGES} messages, up`, up);
  await page.getByRole('article', { name: 'User, message 1', exact: true }).waitFor();
  const down = await scroll(page, { name: box, rows: item, delta: 6000, isDone: () => page.evaluate(() => { const { scrollTop, clientHeight, scrollHeight } = document.querySelector('.transcript'); return scrollTop + clientHeight >= scrollHeight - 2; }) });
  tell(`${MESSAGES} messages, down`, down);
  await page.getByRole('article', { name: `Assistant, message ${MESSAGES}` }).waitFor();
  for (const { most } of [up, down]) check(most > 5 && most < 60, `${most} messages are in the document`);
  healthy(page);
  await page.context().close();
}

await scenario(async () => {
  await fill();
  await sessions();
  await messages();
});
