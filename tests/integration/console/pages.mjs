// Visits every page in both themes and on a phone, with a session that has tool calls and a call that waits.
import { api, healthy, inspect, open, scenario, settled, visit } from './browser.mjs';

const { LONG } = process.env;
const HOUR_MS = 3_600_000;
const ago = (ms) => new Date(Date.now() - ms).toISOString();

/** Hosts as a host of a cluster describes them. One of another version leaves members out. */
const CLUSTER = {
  hosts: [
    { number: 3, name: '10.0.0.2:8080', url: 'http://10.0.0.2:8080', version: '0.2.0', state: 'serving', this: true, started_at: ago(HOUR_MS), seen_ms_ago: 120, models: ['smollm2-135m'], sessions: 12, running_turns: 2 },
    { number: 4, name: 'hives_of_the_north_rack_17.example.internal:8080', url: 'http://10.0.0.3:8080', version: '0.2.1', state: 'draining', this: false, started_at: ago(90 * HOUR_MS), seen_ms_ago: 900, models: ['smollm2-135m', 'another_model_with_a_long_name'], sessions: 40, running_turns: 0 },
    { number: 5, state: 'gone', seen_ms_ago: 75_000 },
  ],
  unowned_sessions: 7,
};

/** Answers for the host with several hosts, one of which changes, and then as a host that knows nothing of clusters. */
async function cluster(windows) {
  for (const [name, options] of windows) {
    const page = await open(options);
    const answer = structuredClone(CLUSTER);
    let status = 200;
    await page.route('**/v1/cluster', (route) => route.fulfill({ status, json: status === 200 ? answer : { error: { message: 'no such route', code: 'not_found' } } }));
    await visit(page, '/ui/cluster');
    await page.getByText('Draining', { exact: true }).waitFor();
    await inspect(page, `cluster-hosts-${name}`);
    for (const [row, text] of [['10.0.0.2:8080', 'this host'], ['hives_of_the_north', '40'], ['host 5', 'Gone']]) {
      await page.getByRole('row').filter({ hasText: row }).getByText(text).first().waitFor();
    }
    await page.getByText('The hosts run 2 versions: 0.2.0, 0.2.1.').waitFor();
    // It is read again by itself.
    answer.hosts[1].state = 'serving';
    answer.unowned_sessions = 0;
    await page.getByText('Draining', { exact: true }).waitFor({ state: 'detached' });
    const link = page.locator('nav[aria-label=Console] a[href="/ui/cluster"]');
    await link.waitFor({ state: 'attached' });
    status = 404;
    await page.reload();
    await page.getByText('This host is not part of a cluster').waitFor();
    await link.waitFor({ state: 'detached' });
    await inspect(page, `cluster-none-${name}`);
    await page.context().close();
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
    ['not-found', '/ui/nowhere'],
  ];
  const windows = [
    ['light', { theme: 'light' }],
    ['dark', { theme: 'dark' }],
    ['phone', { theme: 'light', width: 360, height: 740 }],
  ];
  for (const [name, options] of windows) {
    const page = await open(options);
    for (const [title, path] of pages) {
      await visit(page, path);
      await settled(page);
      await inspect(page, `${title}-${name}`);
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
  // The keyboard leads to every page.
  await page.keyboard.press('g');
  await page.keyboard.press('e');
  await page.waitForURL('**/ui/engine');
  healthy(page);
});
