// Texts of models, tools and clients that would be scripts if a page took them for HTML.
import { api, check, healthy, open, scenario, visit } from './browser.mjs';

const { HOSTILE } = process.env;

await scenario(async () => {
  const { data: [turn] } = await api('GET', '/v1/agents/talker/sessions/s/turns');
  // The log of requests is written after the answer.
  let request;
  for (let tries = 0; tries < 100 && !request; tries += 1) {
    ({ data: [request] } = await api('GET', '/v1/requests'));
    if (!request) await new Promise((done) => setTimeout(done, 100));
  }
  const page = await open();
  const shown = async (path) => {
    await visit(page, path);
    await page.getByText('onerror=alert(1)').filter({ visible: true }).first().waitFor();
    check(await page.locator('img[src="x"]').count() === 0, `${path}: an image was made of a text`);
    check(await page.locator('a[href^="javascript"]').count() === 0, `${path}: a link runs a script`);
    healthy(page);
  };
  await shown('/ui/sessions/talker/s');
  await shown('/ui/sessions/ledger/s');
  await shown('/ui/sessions/ledger/s?tab=state');
  await shown(`/ui/sessions/talker/s/turns/${turn.turn_id}`);
  await shown(`/ui/requests/${request.id}`);
  await visit(page, '/ui/playground');
  await page.getByLabel('Model or agent', { exact: true }).selectOption({ label: 'far/m' });
  await page.getByLabel('Message', { exact: true }).fill(HOSTILE);
  await page.keyboard.press('Enter');
  await page.locator('.chat-figures').getByText('total').first().waitFor();
  // The message, and the answer.
  await page.getByText('onerror=alert(1)').filter({ visible: true }).nth(1).waitFor();
  check(await page.locator('img[src="x"], a[href^="javascript"]').count() === 0, 'the playground made HTML of a text');
  healthy(page);
});
