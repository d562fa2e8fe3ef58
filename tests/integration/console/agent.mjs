// An agent is deployed by dropping its files, gets a second version, goes back to the first one, and is deleted; its page says what it was granted, what
// wakes it and what it has used. A key of the API is made and revoked.
import { readFileSync } from 'node:fs';
import { api, check, healthy, inspect, open, scenario, visit } from './browser.mjs';

const { COMPONENT, HOSTILE } = process.env;
const SCHEDULE = '[[schedule]]\nname = "digest"\nsession = "daily"\ncron = "0 7 * * 1"\n';
const manifest = (tokens, schedule) => `name = "shop"
[[trigger.http]]
route = "/shop/{session}"
[[trigger.event]]
topic = "order.*"
session = "orders"
${schedule}[grants]
clocks = true
events = ["shop.*"]
hosts = ["https://api.example.com", "https://api.example.org"]
secrets = [{ name = "SHOP_KEY", hosts = ["https://api.example.com"] }]
[limits]
tokens_per_day = ${tokens}
`;

async function drop(page) {
  await visit(page, '/ui/agents');
  await page.getByText('No agents yet').waitFor();
  const encoded = readFileSync(COMPONENT).toString('base64');
  await page.evaluate(([component, text]) => {
    const files = new DataTransfer();
    files.items.add(new File([Uint8Array.from(atob(component), (letter) => letter.charCodeAt(0))], 'shop.wasm'));
    files.items.add(new File([text], 'agent.toml'));
    for (const kind of ['dragover', 'drop']) dispatchEvent(new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true }));
  }, [encoded, manifest(1000, SCHEDULE)]);
  const dialog = page.getByRole('dialog');
  await dialog.getByText('shop.wasm').waitFor();
  await inspect(page, 'agent-deploy');
  await dialog.getByRole('button', { name: 'Deploy', exact: true }).click();
  await page.waitForURL('**/ui/agents/shop');
}

/** The page compares what agent.toml asks for with what skep.toml and the secrets of the host allow. */
async function grants(page) {
  const grant = (name, state) => page.locator('.grants li').filter({ has: page.getByText(name, { exact: true }) }).getByText(state, { exact: true }).waitFor();
  const allowed = [['small', 'Granted'], ['https://api.example.com', 'Granted'], ['https://api.example.org', 'Not granted'], ['shop.*', 'Granted'], ['wall clock and monotonic clock', 'Granted']];
  for (const [name, state] of allowed) await grant(name, state);
  await grant('SHOP_KEY', 'Not granted');
  await inspect(page, 'agent-grants');
  await api('PUT', '/v1/secrets/SHOP_KEY', { value: 'a value of the shop', hosts: ['https://api.example.com'] });
  await page.reload();
  await grant('SHOP_KEY', 'Granted');
  const used = await page.getByRole('meter', { name: 'Tokens today (UTC)' }).getAttribute('aria-valuetext');
  check(used === '0 of 1,000', used);
}

async function versions(page) {
  await page.getByRole('button', { name: 'Deploy', exact: true }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('Component and manifest').setInputFiles([COMPONENT]);
  await dialog.getByLabel('agent.toml', { exact: true }).fill(manifest(2000, ''));
  await dialog.getByRole('button', { name: 'Deploy', exact: true }).click();
  await page.getByText('0 of 2,000').waitFor();
  await page.getByRole('tab', { name: 'Versions' }).click();
  const version = (n) => page.locator('.version-list > li').filter({ hasText: `Version ${n}` });
  await version(2).getByText('Active', { exact: true }).waitFor();
  await inspect(page, 'agent-two-versions');
  await version(1).getByRole('button', { name: 'Activate' }).click();
  await dialog.getByRole('button', { name: 'Activate' }).click();
  await version(1).getByText('Active', { exact: true }).waitFor();
  const { data } = await api('GET', '/v1/agents/shop/versions');
  check(data.find((each) => each.in_force).version === 1, JSON.stringify(data));
}

/** The schedule came back with the first version. The data of an event is text, whatever it contains. */
async function triggers(page) {
  await api('POST', '/v1/events', { topic: 'order.paid', data: { note: HOSTILE } });
  await visit(page, '/ui/agents/shop?tab=triggers');
  for (const text of ['/shop/{session}', 'order.*', 'shop.*']) await page.getByText(text, { exact: true }).first().waitFor();
  await page.getByText('onerror=alert(1)').first().waitFor();
  check(await page.locator('img[src="x"], a[href^="javascript"]').count() === 0, 'the data of an event became HTML');
  await inspect(page, 'agent-wakes');
  await page.getByRole('button', { name: 'Cancel digest' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Cancel the schedule' }).click();
  await page.getByText('No schedules').waitFor();
  check((await api('GET', '/v1/schedules?agent=shop')).data.length === 0, 'the schedule is still there');
}

async function remove(page) {
  await page.getByRole('button', { name: 'Delete the agent' }).click();
  const dialog = page.getByRole('dialog');
  const confirm = dialog.getByRole('button', { name: 'Delete', exact: true });
  check(await confirm.isDisabled(), 'an agent is deleted without its name');
  await dialog.getByLabel(/to confirm/).fill('shop');
  await confirm.click();
  await page.getByText('No agents yet').waitFor();
}

/** A key is shown once, and a revoked one stays in the list. */
async function keys(page) {
  await visit(page, '/ui/usage?tab=keys');
  await page.getByRole('button', { name: 'New key' }).click();
  await page.getByRole('dialog').getByLabel('Name', { exact: true }).fill('till');
  await inspect(page, 'key-new');
  await page.getByRole('button', { name: 'Create the key' }).click();
  const made = page.getByRole('dialog', { name: 'The new key' });
  const key = await made.locator('code').first().innerText();
  check(key.startsWith('skep_'), key);
  await made.getByRole('button', { name: 'I have kept it' }).click();
  const row = page.getByRole('row').filter({ hasText: 'till' });
  await row.getByText('In use').waitFor();
  const { data } = await api('GET', '/v1/keys');
  check(data.length === 1 && data[0].role === 'invoke' && !JSON.stringify(data).includes(key), JSON.stringify(data));
  check(!(await page.content()).includes(key), 'a key is shown again');
  await row.getByRole('button', { name: 'Revoke' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Revoke' }).click();
  await row.getByText('Revoked').waitFor();
}

await scenario(async () => {
  const page = await open();
  await drop(page);
  await grants(page);
  await versions(page);
  await triggers(page);
  await remove(page);
  await keys(page);
  healthy(page);
});
