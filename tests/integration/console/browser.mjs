// The parts that every scenario of the console shares: a headless Chromium, a check of every page, and screenshots.
import { createInterface } from 'node:readline';
import { readFileSync, mkdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

/** A wait that takes longer fails. Even a busy machine does not need as much. */
export const PATIENCE_MS = 180_000;
export const url = process.env.CONSOLE_URL;
const shots = process.env.CONSOLE_SHOTS;
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

export const browser = await chromium.launch({
  executablePath: process.env.CONSOLE_CHROMIUM,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'],
});

export function fail(message) {
  throw new Error(message);
}

export function check(condition, message) {
  if (!condition) fail(message);
}

/** Opens a window, whose person is in the time zone `zone`. Errors of its scripts, refused resources and violations of the policy end the scenario. */
export async function open({ theme = 'light', width = 1280, height = 840, zone, expected = [] } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: theme, timezoneId: zone });
  const page = await context.newPage();
  page.problems = [];
  page.on('pageerror', (error) => page.problems.push(`script: ${error.message}`));
  page.on('console', (message) => {
    const text = `${message.text()} ${message.location().url}`;
    if (message.type() === 'error' && !expected.some((part) => text.includes(part))) page.problems.push(text);
  });
  page.on('request', (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith('data:') && !request.url().startsWith('blob:')) {
      page.problems.push(`a request to ${request.url()}`);
    }
  });
  page.on('dialog', (dialog) => {
    page.problems.push(`a dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  page.setDefaultTimeout(PATIENCE_MS);
  return page;
}

/** Visits a page of the console and waits for its heading. */
export async function visit(page, path) {
  await page.goto(`${url}${path}`);
  await page.getByRole('heading', { level: 1 }).first().waitFor();
}

/** Waits until a page has loaded what it shows, and what it loads because of that. Its streams stay open. */
export async function settled(page) {
  const busy = page.locator('[aria-busy=true], .skeleton');
  do {
    await busy.first().waitFor({ state: 'detached' });
    await painted(page);
  } while (await busy.count() > 0);
}

/** Waits until a page is painted as it stays: some frames have passed, and no color changes in a transition anymore. */
export async function painted(page) {
  await page.evaluate(async () => {
    const frame = () => new Promise((done) => { requestAnimationFrame(done); });
    const changing = () => document.getAnimations().filter((each) => each instanceof CSSTransition);
    do {
      for (let n = 0; n < 3; n += 1) await frame();
      await Promise.allSettled(changing().map(({ finished }) => finished));
    } while (changing().length > 0);
  });
}

/** Returns a promise of a toast with a text. It is asked for before the toast comes, which goes by itself while a busy machine looks elsewhere. */
export const toasted = (page, text) => page.evaluate(([wanted, patience]) => new Promise((done, fails) => {
  const place = document.querySelector('.toasts');
  const look = () => { if (place.innerText.includes(wanted)) done(); };
  new MutationObserver(look).observe(place, { childList: true, subtree: true, characterData: true });
  setTimeout(() => fails(new Error(`no toast says “${wanted}”`)), patience);
  look();
}), [text, PATIENCE_MS]);

/** Checks accessibility, and that nothing is wider than the window; keeps a screenshot. `rules` are those that count; all do without them. */
export async function inspect(page, name, { rules } = {}) {
  await painted(page);
  if (!await page.evaluate(() => Boolean(window.axe))) await page.evaluate(axe);
  const runOnly = rules && { type: 'rule', values: rules };
  const found = await page.evaluate((only) => window.axe.run(document, { resultTypes: ['violations'], ...only }), runOnly && { runOnly });
  const serious = found.violations.filter((one) => ['serious', 'critical'].includes(one.impact));
  const told = serious.map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.target).slice(0, 3).join(' | ')}`);
  check(told.length === 0, `${name}: ${told.join('\n')}`);
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  check(wider <= 0, `${name} is ${wider} px wider than its window`);
  mkdirSync(shots, { recursive: true });
  await page.screenshot({ path: `${shots}/${name}.png` });
  healthy(page);
}

export function healthy(page) {
  check(page.problems.length === 0, page.problems.join('\n'));
}

/** Sends a request to the host as the page would, with a key. */
export async function api(method, path, body, key, more = {}) {
  const headers = { 'content-type': 'application/json', ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
  const response = await fetch(`${url}${path}`, { method, headers, body: body && JSON.stringify(body) });
  const text = await response.text();
  check(response.ok, `${method} ${path}: ${response.status} ${text}`);
  return text ? JSON.parse(text) : undefined;
}

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Asks the test for something, such as to kill the host, and returns its answer. */
export async function ask(what) {
  console.log(`> ${what}`);
  return (await answers.next()).value;
}

/** Runs a scenario. */
export async function scenario(run) {
  try {
    await run();
    await browser.close();
    console.log('passed');
    process.exit(0);
  } catch (error) {
    const pages = browser.contexts().flatMap((context) => context.pages());
    mkdirSync(shots, { recursive: true });
    for (const [index, page] of pages.entries()) {
      await page.screenshot({ path: `${shots}/failed-${process.pid}-${index}.png` }).catch(() => {});
      console.error(`at ${page.url()}: ${page.problems?.join('; ')}`);
      console.error((await page.locator('body').innerText().catch(() => '')).slice(0, 2000));
    }
    console.error(error.stack);
    process.exit(1);
  }
}
