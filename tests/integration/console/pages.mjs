// Visits every page in both themes and on a phone, with a session that has tool calls and a call that waits.
import { api, healthy, inspect, open, scenario, settled, visit } from './browser.mjs';

await scenario(async () => {
  // The turn waits for a person, and this page does not wait for the turn.
  await api('POST', '/v1/agents/approval/sessions/c1/messages', { text: 'Please refund 20 euros for order 11.' }, undefined, { prefer: 'respond-async' });
  const { data: [turn] } = await api('GET', '/v1/agents/room-service/sessions/guest-7/turns');
  const { data: [request] } = await api('GET', '/v1/requests');
  const session = '/ui/sessions/room-service/guest-7';
  const pages = [
    ['playground', '/ui/playground'],
    ['agents', '/ui/agents'],
    ['agent', '/ui/agents/room-service'],
    ['sessions', '/ui/sessions'],
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
