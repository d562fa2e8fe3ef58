// The page of a cluster shows each of its hosts as the API describes it, and drains one of them, whose process then ends.
import { api, check, healthy, inspect, open, scenario, visit } from './browser.mjs';

const DRAINED = Number(process.env.DRAINED);

await scenario(async () => {
  const { hosts } = await api('GET', '/v1/cluster');
  const page = await open();
  await visit(page, '/ui/cluster');
  const row = ({ name }) => page.getByRole('row').filter({ hasText: name });
  for (const host of hosts) {
    for (const text of ['Serving', host.version, host.models.join(', ')]) await row(host).getByText(text, { exact: true }).first().waitFor();
    check(await row(host).getByText('this host').count() === Number(host.this), `${host.name} is ${host.this ? 'not ' : ''}marked as this host`);
    check(await row(host).locator(`a[href="${host.url}/ui/cluster"]`).count() === Number(!host.this), `the link of ${host.name}`);
  }
  await page.locator('nav[aria-label=Console] a[href="/ui/cluster"]').waitFor();
  await inspect(page, 'cluster');
  const drained = hosts.find(({ number }) => number === DRAINED);
  await row(drained).getByRole('button', { name: `Drain ${drained.name}` }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByText('hands its sessions over').waitFor();
  await inspect(page, 'cluster-drain');
  await dialog.getByRole('button', { name: 'Drain', exact: true }).click();
  await row(drained).waitFor({ state: 'detached' });
  const left = (await api('GET', '/v1/cluster')).hosts.map(({ number }) => number);
  check(left.length === hosts.length - 1 && !left.includes(DRAINED), `the hosts ${left} are left`);
  healthy(page);
});
