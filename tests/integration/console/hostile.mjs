// Texts of models, tools and clients that would be scripts if a page took them for HTML.
import { PATIENCE_MS, api, check, healthy, open, scenario, settled, url, visit } from './browser.mjs';

const { HOSTILE } = process.env;

await scenario(async () => {
  const { data: [turn] } = await api('GET', '/v1/agents/talker/sessions/s/turns');
  // The log of requests is written after the answer.
  const latest = performance.now() + PATIENCE_MS;
  let request;
  while (!request) {
    check(performance.now() < latest, 'the log of requests stays empty');
    ({ data: [request] } = await api('GET', '/v1/requests'));
    if (!request) await new Promise((done) => setTimeout(done, 100));
  }
  // A session whose only turn failed has a log and nothing else.
  const page = await open({ expected: ['/v1/agents/breaks/sessions/s'] });
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
  await shown('/ui/sessions?text=src');
  await shown(`/ui/sessions/talker/s/turns/${turn.turn_id}`);
  await shown(`/ui/requests/${request.id}`);
  // The message of a panic is the error of its turn, and a line of the log.
  const { data: [broken] } = await api('GET', '/v1/agents/breaks/sessions/s/turns');
  await shown(`/ui/sessions/breaks/s/turns/${broken.turn_id}`);
  await shown('/ui/sessions/breaks/s?tab=logs');
  await api('POST', '/v1/keys', { name: HOSTILE, tenant: 'acme', role: 'read' });
  await shown('/ui/usage?tab=keys');
  // A file of a batch whose lines are refused.
  const form = new FormData();
  const line = { custom_id: HOSTILE, method: 'POST', url: '/v1/chat/completions', body: { model: HOSTILE, messages: [{ role: HOSTILE, content: HOSTILE }] } };
  form.set('purpose', 'batch');
  form.set('file', new Blob([JSON.stringify(line)]), `${HOSTILE.replaceAll('/', '')}.jsonl`);
  const file = await (await fetch(`${url}/v1/files`, { method: 'POST', body: form })).json();
  await api('POST', '/v1/batches', { input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h' });
  await shown('/ui/inbox?tab=batches');
  // Addresses that somebody sends to a person.
  const lured = await open({ expected: ['404', '400'] });
  const name = encodeURIComponent(HOSTILE);
  for (const path of [`/ui/agents/${name}`, `/ui/sessions/${name}/${name}`, `/ui/sessions?search=${name}&tenant=${name}&agent=${name}`, `/ui/sessions?text=${name}`, `/ui/requests/${name}`,
    `/ui/docs/${name}`, `/ui/inbox?tab=${name}`, `/ui/engine?model=${name}`, `/ui/playground?model=${name}`, `/ui/${name}`]) {
    await visit(lured, path);
    await settled(lured);
    check(await lured.locator('img[src="x"], a[href^="javascript"], script:not([src])').count() === 0, `${path}: a script came with an address`);
    healthy(lured);
  }
  await visit(page, '/ui/playground');
  await page.getByLabel('Model or agent', { exact: true }).selectOption({ label: 'far/m' });
  await page.getByLabel('Message', { exact: true }).fill(HOSTILE);
  await page.keyboard.press('Enter');
  await page.locator('.chat-figures').getByText('total').first().waitFor();
  // The message, and the answer.
  await page.getByText('onerror=alert(1)').filter({ visible: true }).nth(1).waitFor();
  // The reasoning before the answer is folded.
  const fold = page.getByRole('button', { name: /^Reasoning/, expanded: false });
  await fold.waitFor();
  const shownBefore = await page.getByText('onerror=alert(1)').filter({ visible: true }).count();
  await fold.click();
  await page.getByText('onerror=alert(1)').filter({ visible: true }).nth(shownBefore).waitFor();
  check(await page.locator('img[src="x"], a[href^="javascript"]').count() === 0, 'the playground made HTML of a text');
  healthy(page);
});
