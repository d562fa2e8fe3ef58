// A page that is open while the host is killed and started again says so, and continues by itself.
import { ask, check, open, scenario, visit } from './browser.mjs';

await scenario(async () => {
  const page = await open({ expected: ['ERR_CONNECTION', 'ERR_INCOMPLETE', 'ERR_EMPTY', 'ERR_SOCKET', 'net::'] });
  await visit(page, '/ui/engine');
  await page.getByText('Live').first().waitFor();
  await ask('kill');
  await page.getByText(/Reconnecting/).first().waitFor();
  await ask('start');
  await page.getByText(/Reconnecting/).first().waitFor({ state: 'detached' });
  await page.getByText('Live').first().waitFor();
  await page.getByRole('link', { name: 'Sessions' }).click();
  await page.getByRole('heading', { level: 1, name: 'Sessions' }).waitFor();
  check(page.problems.length === 0, page.problems.join('\n'));
});
