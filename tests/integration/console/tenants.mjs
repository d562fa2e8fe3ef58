// Signing in: a wrong key is refused, each tenant sees its own sessions, and a key that may only read changes nothing.
import { readFileSync } from 'node:fs';
import { api, check, healthy, inspect, open, scenario, url, visit } from './browser.mjs';

const { ADMIN, ACME, ZENITH, COMPONENT } = process.env;

async function signIn(key, name) {
  // The first answer is 401, which the browser's console reports.
  const page = await open({ expected: ['401'] });
  await page.goto(`${url}/ui/sessions`);
  await page.getByLabel('API key').fill('skep_wrong');
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.getByText('does not know this key').waitFor();
  await inspect(page, `sign-in-${name}`);
  let hold;
  const late = new Promise((resolve) => { hold = resolve; });
  await page.route('**/v1/late', hold);
  await page.evaluate(async () => {
    const { api: host } = await import('/ui/lib/api.js');
    window.late = host.get('/v1/late').catch(() => {});
  });
  await page.getByLabel('API key').fill(key);
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.getByRole('heading', { level: 1, name: 'Sessions' }).waitFor();
  // A request from before the sign-in is refused after it.
  await (await late).fulfill({ status: 401, json: {} });
  await page.evaluate(() => window.late);
  await page.evaluate(() => new Promise(requestAnimationFrame));
  check(await page.getByLabel('API key').count() === 0, 'a late refusal ended the sign-in');
  // No script can read the key, and the cookie alone is not enough for a request.
  check(await page.evaluate(() => document.cookie) === '', 'a script can read the cookie');
  check(await page.evaluate(async () => (await fetch('/v1/sessions')).status) === 401, 'the cookie counts without the header');
  page.problems.length = 0;
  return page;
}

await scenario(async () => {
  const form = new FormData();
  form.set('manifest', 'name = "ledger"\n');
  form.set('component', new Blob([readFileSync(COMPONENT)]), 'agent.wasm');
  const deployed = await fetch(`${url}/v1/agents`, { method: 'POST', body: form, headers: { authorization: `Bearer ${ADMIN}` } });
  check(deployed.status === 201, await deployed.text());
  await api('POST', '/v1/agents/ledger/sessions/honey/messages', { text: 'secret of acme' }, ACME);

  const acme = await signIn(ACME, 'acme');
  await acme.getByText('honey').first().waitFor();
  const zenith = await signIn(ZENITH, 'zenith');
  await zenith.getByText(/No sessions/).first().waitFor();
  check(!(await zenith.locator('body').innerText()).includes('honey'), 'a tenant sees another one');
  await visit(zenith, '/ui/sessions?text=secret');
  await zenith.getByText('No session has these words').waitFor();
  await visit(acme, '/ui/sessions?text=SECRET');
  await acme.getByText('secret of acme').first().waitFor();
  await visit(zenith, '/ui/sessions/ledger/honey');
  check(!(await zenith.locator('body').innerText()).includes('secret of acme'), 'a tenant reads another one');
  zenith.problems.length = 0;
  // A key that reads is offered nothing that changes something, and the host would refuse it.
  await visit(zenith, '/ui/agents/ledger');
  for (const name of ['Deploy', 'Send a message', 'Delete the agent']) {
    check(await zenith.getByRole('button', { name }).count() === 0, `a key that may read sees “${name}”`);
  }
  const status = await zenith.evaluate(async () => {
    const headers = { 'x-skep-console': '1', 'content-type': 'application/json' };
    const body = JSON.stringify({ text: 'x' });
    return (await fetch('/v1/agents/ledger/sessions/x/messages', { method: 'POST', headers, body })).status;
  });
  check(status === 403, `a key that may read got ${status}`);
  zenith.problems.length = 0;
  // The limits of its own tenant are its business, those of the host are not.
  await visit(zenith, '/ui/usage?tab=limits');
  await zenith.getByRole('region', { name: 'Limits of the tenant zenith' }).getByRole('meter').first().waitFor();
  check(await zenith.getByText('Limits of the host').count() === 0, 'a key that may read sees the limits of the host');
  healthy(zenith);
  // An admin sees the sessions of every tenant.
  const admin = await signIn(ADMIN, 'admin');
  await admin.getByText('acme/honey').first().waitFor();
  healthy(admin);
  await admin.getByRole('button', { name: 'Sign out' }).click();
  await admin.getByLabel('API key').waitFor();
  check(await admin.getByText('You are signed out').count() === 0, 'who signs out is told so');
  // Revoking a key ends the sign-in of whoever uses it, and their page says why.
  await visit(acme, '/ui/sessions');
  const { data: keys } = await api('GET', '/v1/keys', undefined, ADMIN);
  await api('DELETE', `/v1/keys/${keys.find(({ tenant }) => tenant === 'acme').id}`, undefined, ADMIN);
  await acme.getByText('You are signed out').waitFor();
  acme.problems.length = 0;
  await inspect(acme, 'signed-out');
});
