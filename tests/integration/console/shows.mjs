// A page shows a text.
import { healthy, open, scenario, visit } from './browser.mjs';

await scenario(async () => {
  const page = await open();
  await visit(page, process.env.PAGE);
  await page.getByRole('main').getByText(process.env.TEXT, { exact: true }).first().waitFor();
  healthy(page);
});
