// The replicas of a model and their ranks, each with its memory, and the replicas with what they do.
import { api, check, healthy, inspect, open, scenario, settled, visit } from './browser.mjs';

await scenario(async () => {
  await api('POST', '/v1/completions', { prompt: 'The', max_tokens: 4 });
  const { models: [model] } = await api('GET', '/v1/engine?seconds=1');
  const ranks = model.replica_memory.map((replica) => replica.ranks.length);
  check(ranks.join() === '4,4', `the replicas have ${ranks} ranks`);
  for (const [name, options] of [['light', {}], ['dark', { theme: 'dark' }], ['phone', { width: 360, height: 740 }]]) {
    const page = await open(options);
    await visit(page, '/ui/engine');
    await settled(page);
    const table = page.getByRole('group', { name: 'Replicas' });
    await table.scrollIntoViewIfNeeded();
    for (const text of ['Replica 1', 'Replica 2', 'stage 1 of 2, part 2 of 2', 'stage 2 of 2, part 1 of 2']) await table.getByText(text).first().waitFor();
    check(await table.getByRole('row').count() === 1 + 2 * (1 + 4), await table.innerText());
    await inspect(page, `engine-ranks-${name}`);
    healthy(page);
    await page.context().close();
  }
});
