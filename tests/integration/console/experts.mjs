// The experts of a model whose replica is divided: a map of layers and experts, the busiest expert of each layer in words, and the time of each rank.
import { api, check, healthy, inspect, open, scenario, settled, visit } from './browser.mjs';

const sums = ({ experts }) => experts.map(({ tokens }) => tokens.reduce((sum, each) => sum + each, 0));
const load = () => api('GET', '/v1/engine/load');
const work = () => api('POST', '/v1/completions', { prompt: 'The hives of the north', max_tokens: 8 });

await scenario(async () => {
  await work();
  const { experts, ranks } = await load();
  check(experts.length === 3 && experts.every(({ tokens }) => tokens.length === 8) && ranks.length === 2, JSON.stringify([experts, ranks]));
  for (const [name, options] of [['light', {}], ['dark', { theme: 'dark' }], ['phone', { width: 360, height: 740 }]]) {
    const page = await open(options);
    await visit(page, '/ui/engine');
    await settled(page);
    const map = page.getByRole('img', { name: /8 experts in 3 layers/ });
    await map.scrollIntoViewIfNeeded();
    // The map is drawn: an expert with tokens is a pixel that is not transparent.
    await page.waitForFunction((canvas) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return canvas.width === 8 && canvas.height === 3 && data.some((value, n) => n % 4 === 3 && value > 0);
    }, await map.elementHandle());
    const table = page.getByRole('group', { name: 'Busiest experts' });
    check(await table.getByRole('row').count() === 1 + 3, await table.innerText());
    await inspect(page, `engine-experts-${name}`);
    if (name === 'light') {
      // Each rank of the replica has its time in a step.
      const times = page.getByRole('group', { name: 'Replicas' });
      await times.getByRole('columnheader', { name: 'Waits' }).waitFor();
      await times.getByRole('row').filter({ hasText: 'part 2 of 2' }).getByText(/%$/).waitFor();
      // The counts are read again by themselves.
      await page.getByText('Since this page was opened', { exact: true }).click();
      const shows = (count) => page.getByText(new RegExp(`tokens\\. ${count.toLocaleString('en-US')} times in each layer`)).waitFor();
      await shows(0);
      const [before] = sums(await load());
      await work();
      const [after] = sums(await load());
      check(after > before, `${before} became ${after}`);
      await shows(after - before);
    }
    healthy(page);
    await page.context().close();
  }
});
