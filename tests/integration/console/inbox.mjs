// A delivery that failed for good is delivered again from the inbox, once its receiver was mended.
import { api, ask, check, healthy, inspect, open, scenario, toasted, visit } from './browser.mjs';

await scenario(async () => {
  const page = await open();
  await visit(page, '/ui/inbox?tab=letters');
  await page.getByText('No dead letters').waitFor();
  // The receiver says that it is gone, so no attempt follows the first one. The page is open already.
  await api('POST', '/v1/events', { topic: 'order.paid', data: { order: 38 } });
  const row = page.getByRole('row').filter({ hasText: 'order.paid' });
  await row.getByText(/HTTP 410/).waitFor();
  await inspect(page, 'inbox-dead-letter');
  const again = row.getByRole('button', { name: 'Redeliver' });
  // It fails again and comes back while nobody has mended the receiver.
  const said = toasted(page, 'is delivered again');
  await again.click();
  await said;
  await again.waitFor();
  await ask('mend');
  await again.click();
  await ask('delivered');
  await page.getByText('No dead letters').waitFor();
  const { data } = await api('GET', '/v1/webhooks/dead-letters');
  check(data.length === 0, JSON.stringify(data));
  healthy(page);
});
