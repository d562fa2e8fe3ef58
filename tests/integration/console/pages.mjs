// Visits every page in both themes and on a phone, with a session that has tool calls and a call that waits.
import { api, check, healthy, inspect, open, scenario, settled, toasted, visit } from './browser.mjs';

const { LONG } = process.env;
const HOUR_MS = 3_600_000;
/** All that another theme can break. */
const RULES_OF_COLORS = ['color-contrast', 'link-in-text-block'];
const ago = (ms) => new Date(Date.now() - ms).toISOString();

/** Hosts as a host of a cluster describes them. */
const CLUSTER = {
  hosts: [
    { number: 3, name: '10.0.0.2:8080', url: 'http://10.0.0.2:8080', version: '0.2.0', state: 'serving', this: true, started_at: ago(HOUR_MS), seen_ms_ago: 120, models: ['smollm2-135m'], sessions: 12, running_turns: 2, role: 'all', load_percent: 64, waiting_requests: 3 },
    { number: 4, name: 'hives_of_the_north_rack_17.example.internal:8080', url: 'http://10.0.0.3:8080', version: '0.2.1', state: 'draining', this: false, started_at: ago(90 * HOUR_MS), seen_ms_ago: 900, models: ['smollm2-135m', 'another_model_with_a_long_name'], sessions: 40, running_turns: 0, role: 'gateway', load_percent: 115, waiting_requests: 0 },
    { number: 5, name: '10.0.0.4:8080', url: 'http://10.0.0.4:8080', version: '0.2.0', state: 'serving', this: false, started_at: ago(HOUR_MS / 60), seen_ms_ago: 7_500, models: [], sessions: 0, running_turns: 0 },
  ],
};

/** Answers for the host with several hosts, one of which changes; then the host itself answers, which is in no cluster. */
async function cluster(windows) {
  for (const [name, options] of windows) {
    const page = await open(options);
    const answer = structuredClone(CLUSTER);
    await page.route('**/v1/cluster', (route) => route.fulfill({ json: answer }));
    const peers = { questions: 40, missed: 7, fetched_pages: 1_234, fetched_bytes: 3 * 2 ** 30, given_pages: 1, given_bytes: 2_048 };
    await page.route('**/v1/kv', (route) => route.fulfill({ json: { peers } }));
    await visit(page, '/ui/cluster');
    await page.getByText('Draining', { exact: true }).waitFor();
    await inspect(page, `cluster-hosts-${name}`);
    // A host of an older version has no role: it does everything.
    const cells = [['10.0.0.2:8080', 'this host'], ['hives_of_the_north', '40'], ['hives_of_the_north', 'Gateway'], ['hives_of_the_north', '115%'], ['10.0.0.2:8080', '64%'], ['10.0.0.4:8080', 'none loaded'], ['10.0.0.4:8080', 'Everything']];
    for (const [row, text] of cells) {
      await page.getByRole('row').filter({ hasText: row }).getByText(text).first().waitFor({ state: 'attached' });
    }
    await page.getByText('The hosts run 2 versions: 0.2.0, 0.2.1.').waitFor();
    for (const text of ['1,234 pages, 3 GiB', '1 page, 2 KiB']) await page.getByRole('region', { name: 'Transfers of KV pages' }).getByText(text, { exact: true }).waitFor();
    // It is read again by itself.
    answer.hosts[1].state = 'serving';
    await page.getByText('Draining', { exact: true }).waitFor({ state: 'detached' });
    const link = page.locator('nav[aria-label=Console] a[href="/ui/cluster"]');
    await link.waitFor({ state: 'attached' });
    await page.unroute('**/v1/cluster');
    await page.reload();
    await page.getByText('This host is not part of a cluster').waitFor();
    await link.waitFor({ state: 'detached' });
    const { hosts: [own] } = await api('GET', '/v1/cluster');
    const row = page.getByRole('row').filter({ hasText: 'This host' });
    for (const text of ['Serving', own.version, own.models.join(', ')]) await row.getByText(text, { exact: true }).first().waitFor({ state: 'attached' });
    check(await page.getByRole('button', { name: /^Drain/ }).count() === 0, 'a host without others can be drained');
    await inspect(page, `cluster-none-${name}`);
    await page.context().close();
  }
}

/** Each limit is shown with what is used of it, which is what the API says. */
async function limits() {
  const page = await open();
  await visit(page, '/ui/agents/approval');
  // One turn of the agent waits for a person.
  const turns = page.getByRole('region', { name: 'All sessions together' }).getByRole('meter', { name: 'Turns that run or wait' });
  await turns.and(page.locator('[aria-valuenow="1"]')).waitFor();
  const { limits: { concurrent_turns: most }, used } = await api('GET', '/v1/agents/approval');
  check(used.concurrent_turns === 1 && await turns.getAttribute('aria-valuemax') === String(most), JSON.stringify(used));
  await ofTurns(page);
  await visit(page, '/ui/usage?tab=limits');
  await settled(page);
  const [tenant, status] = [await api('GET', '/v1/limits'), await api('GET', '/v1/status')];
  const shown = (name) => page.getByRole('region', { name, exact: true }).getByRole('meter').count();
  check(await shown(`Limits of the tenant ${tenant.tenant}`) === tenant.data.length + Number(tenant.money_per_day !== null), JSON.stringify(tenant));
  check(await shown('Limits of the host') === status.limits.filter(({ of }) => !of).length, JSON.stringify(status.limits));
  for (const { name } of status.models) check(await shown(`Limits of ${name}`) === status.limits.filter(({ of }) => of === name).length, JSON.stringify(status.limits));
  // A name that has no words of its own is one that nobody has described.
  const names = await page.locator('.limit-meters .meter-words > span:first-child').allInnerTexts();
  check(names.every((name) => !name.includes('_')), `${names}`);
  healthy(page);
  await page.context().close();
}

/** The page of a turn says what it used of each limit, and the page of its agent what the latest turns used. */
async function ofTurns(page) {
  const { data: [turn] } = await api('GET', '/v1/agents/room-service/sessions/guest-7/turns');
  const { limits } = await api('GET', `/v1/agents/room-service/sessions/guest-7/turns/${turn.turn_id}/timeline`);
  const uses = (name) => limits.find((limit) => limit.name === name);
  // Tokens that were taken back count as well.
  check(uses('tokens_per_turn').used >= turn.usage.completion_tokens && uses('tokens_per_turn').limit === 512, JSON.stringify(limits));
  for (const { name, used, limit } of limits) check(used <= limit, `${name}: ${used} of ${limit} are used`);
  for (const name of ['turn_ms', 'cpu_ms', 'memory_mb', 'host_calls', 'host_call_kb']) check(uses(name).used > 0, `${name}: ${JSON.stringify(limits)}`);
  await visit(page, `/ui/sessions/room-service/guest-7/turns/${turn.turn_id}`);
  const meters = page.getByRole('region', { name: 'Limits' }).getByRole('meter');
  await meters.first().waitFor();
  const shown = await meters.evaluateAll((all) => all.map((meter) => [meter.getAttribute('aria-valuenow'), meter.getAttribute('aria-valuemax'), meter.getAttribute('aria-label')]));
  check(JSON.stringify(shown.map(([used, limit]) => [Number(used), Number(limit)])) === JSON.stringify(limits.map(({ used, limit }) => [used, limit])), JSON.stringify(shown));
  // A name that has no words of its own is one that nobody has described.
  check(shown.every(([, , label]) => !label.includes('_')), JSON.stringify(shown));
  // A turn that waits for a person has used something so far.
  const { data: [waiting] } = await api('GET', '/v1/agents/approval/sessions/c1/turns');
  await visit(page, `/ui/sessions/approval/c1/turns/${waiting.turn_id}`);
  await page.getByRole('region', { name: 'Limits' }).getByRole('meter', { name: 'Calls of the host', exact: true }).and(page.locator(':not([aria-valuenow="0"])')).waitFor();
  const { recent_turns: recent } = await api('GET', '/v1/agents/room-service');
  check(recent.turns === 1 && recent.latest.tokens_per_turn === uses('tokens_per_turn').used, JSON.stringify(recent));
  await visit(page, '/ui/agents/room-service');
  const tokens = page.getByRole('region', { name: 'Each turn' }).getByRole('meter', { name: 'Tokens', exact: true });
  await tokens.and(page.locator(`[aria-valuenow="${recent.highest.tokens_per_turn}"]`)).waitFor();
}

/** The KV pages are a map of squares, and a table that names their owners. */
async function owners(page) {
  await visit(page, '/ui/engine');
  const table = page.getByRole('group', { name: 'Owners of pages' });
  await table.getByText('room-service').first().waitFor();
  const squares = page.locator('.pages-squares i');
  const [all, free] = [await squares.count(), await page.locator('.pages-squares i.free').count()];
  check(all > 1 && all <= 400 && free < all, `${free} of ${all} squares are free`);
}

/** A request is in the log as soon as it has ended, without a reload. */
async function follows(page) {
  await visit(page, '/ui/requests');
  await page.getByRole('status').filter({ hasText: /^Live$/ }).waitFor();
  const first = () => document.querySelector('main a[href^="/ui/requests/"]')?.getAttribute('href');
  const before = await page.evaluate(first);
  await api('POST', '/v1/completions', { prompt: 'Bees', max_tokens: 1 });
  await page.waitForFunction(([was, text]) => document.querySelector(text)?.getAttribute('href') !== was, [before, 'main a[href^="/ui/requests/"]']);
  const { data: [newest] } = await api('GET', '/v1/requests?limit=1');
  check(await page.evaluate(first) === `/ui/requests/${encodeURIComponent(newest.id)}`, `${newest.id} is not at the top`);
}

/** Waits until what has this name or id has the focus. */
const focuses = (page, name) => page.waitForFunction((wanted) => (document.activeElement.getAttribute('aria-label') ?? document.activeElement.id) === wanted, name);

/** Presses keys one after the other until they have led to an address: on a machine that is busy, more time may pass between them than a person takes. */
async function pressUntil(page, keys, address) {
  for (let tries = 1; ; tries += 1) {
    for (const key of keys) await page.keyboard.press(key);
    try {
      await page.waitForURL(address, { timeout: 5_000 });
      return;
    } catch (error) {
      if (tries === 10) throw error;
    }
  }
}

/** The keyboard leads to every page, to the search, to the content and to the list of shortcuts; a theme that a person chose is kept. */
async function keyboard(page) {
  // The search takes the focus as soon as it is there, and keeps it and what is written while the list loads.
  const waits = {};
  const held = new Promise((release) => { waits.release = release; });
  await page.route('**/ui/pages/sessions.js', async (route) => { await held; await route.continue(); });
  await pressUntil(page, ['g', 's'], '**/ui/sessions');
  await page.keyboard.press('/');
  check(await page.getByLabel('Search by id').count() === 0, 'the page did not wait for its module');
  waits.release();
  await focuses(page, 'Search by id');
  await page.unroute('**/ui/pages/sessions.js');
  await page.keyboard.type('guest');
  await page.getByRole('link', { name: 'guest-7' }).waitFor();
  await focuses(page, 'Search by id');
  check(await page.getByLabel('Search by id').inputValue() === 'guest', 'what was written is lost');
  await page.getByLabel('Search by id').fill('');
  await page.getByLabel('Search by id').blur();
  await page.keyboard.press('/');
  await focuses(page, 'Search by id');
  await page.getByLabel('Search by id').blur();
  await page.keyboard.press('?');
  const help = page.getByRole('dialog', { name: 'Shortcuts' });
  await help.getByText('Search in the page').waitFor();
  await inspect(page, 'shortcuts');
  await page.keyboard.press('Escape');
  await help.waitFor({ state: 'detached' });
  await page.reload();
  await page.getByRole('heading', { level: 1, name: 'Sessions' }).waitFor();
  await page.keyboard.press('Tab');
  await page.keyboard.press('Enter');
  await focuses(page, 'main');
  const shown = () => page.evaluate(() => document.documentElement.dataset.theme);
  check(await shown() === 'light', `the theme is ${await shown()}`);
  await page.locator('label[title=Dark]').click();
  check(await shown() === 'dark', `the theme is ${await shown()}`);
  // Shortcuts count also for whoever has just clicked a choice.
  await page.keyboard.press('?');
  await help.waitFor();
  await page.keyboard.press('Escape');
  await help.waitFor({ state: 'detached' });
  // The theme is there before anything is drawn.
  await page.goto(page.url(), { waitUntil: 'commit' });
  await page.locator('.sidebar').first().waitFor({ state: 'attached' });
  check(await shown() === 'dark', `a new page begins ${await shown()}`);
  await page.getByRole('heading', { level: 1 }).first().waitFor();
}

/** Times are those of the person's zone. */
async function zone(path) {
  const timeZone = 'Pacific/Kiritimati';
  const page = await open({ zone: timeZone });
  await visit(page, path);
  const time = page.locator('.table-box td time').last();
  await time.waitFor();
  const [shown, here, utc] = await time.evaluate((element, name) => {
    const inZone = (zoneName) => new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium', timeZone: zoneName }).format(Date.parse(element.dateTime));
    return [element.textContent, inZone(name), inZone('UTC')];
  }, timeZone);
  check(shown === here && shown !== utc, `${shown} is shown, ${here} is the time there, ${utc} that of UTC`);
  healthy(page);
  await page.context().close();
}

/** A call is denied with a reason, which the inbox repeats and the page of its turn shows, while the turn runs and after it. */
async function deny() {
  const { data: [waiting] } = await api('GET', '/v1/agents/approval/sessions/c1/turns');
  const page = await open();
  await visit(page, `/ui/sessions/approval/c1/turns/${waiting.turn_id}`);
  await page.getByText('This turn waits for a person').waitFor();
  await page.locator('h1').getByText('Waits for a person').waitFor();
  // The message is not among those of the session before the turn is committed, and both pages show it.
  await page.getByRole('region', { name: 'Message' }).getByText('Please refund 20 euros for order 11.').waitFor();
  const session = await open({ expected: ['404'] });
  await visit(session, '/ui/sessions/approval/c1');
  await session.locator('.live-turn').getByText('Please refund 20 euros for order 11.').waitFor();
  const inbox = await open();
  await visit(inbox, '/ui/inbox');
  const approval = inbox.getByRole('article', { name: 'Approval of refund' });
  await approval.getByLabel('Reason').fill('Order 11 was never paid.');
  const said = toasted(inbox, 'Denied refund: “Order 11 was never paid.”');
  await approval.getByRole('button', { name: 'Deny' }).click();
  await said;
  await inbox.getByText('Nothing waits for you').waitFor();
  // The agent reads the reason in a sentence of the host, which the page shows beside the decision and as the error of the call.
  const decided = page.locator('.decided').filter({ hasText: 'Denied' });
  await decided.getByText('Order 11 was never paid.').waitFor();
  await page.locator('.toolcall').getByText('Order 11 was never paid.').first().waitFor();
  await page.locator('h1').getByText('Done').waitFor();
  check(await decided.count() === 1, 'the decision is not shown once');
  await page.locator('.turn-output').getByText(/may not refund/).first().waitFor();
  const { data: messages } = await api('GET', '/v1/agents/approval/sessions/c1/messages');
  check(messages.some(({ role, content }) => role === 'tool' && content.includes('never paid')), JSON.stringify(messages));
  for (const each of [page, inbox, session]) {
    healthy(each);
    await each.context().close();
  }
}

await scenario(async () => {
  // The turn waits for a person, and this page does not wait for the turn.
  await api('POST', '/v1/agents/approval/sessions/c1/messages', { text: 'Please refund 20 euros for order 11.' }, undefined, { prefer: 'respond-async' });
  const { data: [turn] } = await api('GET', '/v1/agents/room-service/sessions/guest-7/turns');
  const { data: [other] } = await api('GET', `/v1/agents/echo/sessions/${LONG}/turns`);
  const { data: [request] } = await api('GET', '/v1/requests');
  const session = '/ui/sessions/room-service/guest-7';
  const pages = [
    ['playground', '/ui/playground'],
    ['agents', '/ui/agents'],
    ['agent', '/ui/agents/room-service'],
    ['agent-tools', '/ui/agents/room-service?tab=tools'],
    ['agent-triggers', '/ui/agents/room-service?tab=triggers'],
    ['agent-versions', '/ui/agents/room-service?tab=versions'],
    ['sessions', '/ui/sessions'],
    ['sessions-found', '/ui/sessions?text=TEA'],
    ['sessions-not-found', '/ui/sessions?text=nobody_said_this'],
    ['session-long-name', `/ui/sessions/echo/${LONG}`],
    ['turn-long-name', `/ui/sessions/echo/${LONG}/turns/${other.turn_id}`],
    ['requests-long-name', `/ui/requests?session=${LONG}`],
    ['session', session],
    ['session-state', `${session}?tab=state`],
    ['session-turns', `${session}?tab=turns`],
    ['session-logs', `${session}?tab=logs`],
    ['turn', `${session}/turns/${turn.turn_id}`],
    ['inbox', '/ui/inbox'],
    ['inbox-dead-letters', '/ui/inbox?tab=letters'],
    ['inbox-batches', '/ui/inbox?tab=batches'],
    ['usage-limits', '/ui/usage?tab=limits'],
    ['usage-keys', '/ui/usage?tab=keys'],
    ['engine', '/ui/engine'],
    ['cluster', '/ui/cluster'],
    ['usage', '/ui/usage'],
    ['requests', '/ui/requests'],
    ['request', `/ui/requests/${request.id}`],
    ['docs', '/ui/docs'],
    ['guide', '/ui/docs/host/models'],
    ['api', '/ui/docs/api'],
    ['api-secrets', '/ui/docs/api/secrets'],
    ['not-found', '/ui/nowhere'],
  ];
  const windows = [
    ['light', { theme: 'light' }],
    ['dark', { theme: 'dark' }],
    ['phone', { theme: 'light', width: 360, height: 740 }],
  ];
  for (const [name, options] of windows.filter(([, { theme }]) => theme === 'light')) {
    const page = await open(options);
    for (const [title, path] of pages) {
      await page.emulateMedia({ colorScheme: 'light', reducedMotion: 'no-preference' });
      await visit(page, path);
      await settled(page);
      await inspect(page, `${title}-${name}`);
      if (name === 'phone') continue;
      // An open page follows the system's theme.
      await page.emulateMedia({ colorScheme: 'dark', reducedMotion: 'reduce' });
      await page.locator('html[data-theme=dark]').waitFor();
      await inspect(page, `${title}-dark`, { rules: RULES_OF_COLORS });
    }
    await page.context().close();
  }
  await cluster(windows);
  // A turn tells what it did.
  const page = await open();
  await visit(page, `${session}/turns/${turn.turn_id}`);
  for (const part of ['generate', 'order_food', 'Commit', 'prompt tokens cached']) {
    await page.locator('main').getByText(part).first().waitFor();
  }
  // A session says how much of its state it may still write.
  await visit(page, session);
  await page.getByText('of 64 KiB of state').waitFor();
  await visit(page, `${session}?tab=state`);
  const stored = page.getByRole('meter', { name: 'State and conversations, stored' });
  await stored.waitFor();
  check(Number(await stored.getAttribute('aria-valuenow')) > 0 && await stored.getAttribute('aria-valuemax') === String(32 * 2 ** 20), 'the size of the session is not shown');
  await visit(page, session);
  await limits();
  await owners(page);
  await follows(page);
  await keyboard(page);
  healthy(page);
  await zone(`${session}?tab=turns`);
  await deny();
});
