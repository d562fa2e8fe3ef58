// The work of a person, who sets a secret, chats, stops an answer, lets a model call a tool, compares two models, deploys an agent by its files, talks to
// it, forks, exports and deletes sessions, approves a call while the turn waits, and finds a session by what was said in it.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { api, check, healthy, inspect, open, painted, scenario, visit } from './browser.mjs';

const answersOf = (page) => page.getByRole('article', { name: /^(?!You).*: message$/ });
const hasEnded = (page, count = 1) => page.locator('.chat-figures').getByText('total').nth(count - 1).waitFor();

/** Says something in the playground. */
async function say(page, text) {
  await page.getByLabel('Message', { exact: true }).fill(text);
  await page.keyboard.press('Enter');
}

/** Continues the only answer, which remains one message and becomes longer. */
async function continued(page) {
  const text = answersOf(page).last().locator('.chat-message-text');
  const cut = await text.innerText();
  const asked = page.waitForRequest('**/v1/chat/completions');
  await page.getByRole('button', { name: 'Continue' }).click();
  const { messages, continue_final_message: continues } = (await asked).postDataJSON();
  check(continues && messages.at(-1).role === 'assistant', JSON.stringify(messages));
  await (await (await asked).response()).finished();
  await hasEnded(page);
  const whole = await text.innerText();
  check(await answersOf(page).count() === 1 && whole.length > cut.length && whole.startsWith(cut.trim()), `“${cut}” became “${whole}”`);
}

/** Whoever chooses as soon as there is a choice keeps it: the page chooses a model only for a side that has none. */
async function choose() {
  const page = await open();
  await page.addInitScript(() => new MutationObserver((changes, observer) => {
    const select = document.querySelector('select[aria-label="Model or agent"]');
    if (![...select?.options ?? []].some(({ value }) => value === 'agent:approval')) return;
    observer.disconnect();
    select.value = 'agent:approval';
    select.dispatchEvent(new Event('change', { bubbles: true }));
  }).observe(document, { childList: true, subtree: true }));
  await visit(page, '/ui/playground');
  await page.getByPlaceholder(/^Message \w/).waitFor();
  await painted(page);
  const chosen = await page.getByLabel('Model or agent', { exact: true }).inputValue();
  check(chosen === 'agent:approval', `${chosen} is chosen`);
  healthy(page);
  await page.context().close();
}

/** The start page leads to the first page, but not whoever has gone on as soon as there is a navigation. */
async function start() {
  const page = await open();
  await visit(page, '/ui');
  check(new URL(page.url()).pathname === '/ui/playground', `the start page leads to ${page.url()}`);
  await page.addInitScript(() => new MutationObserver((changes, observer) => {
    const link = document.querySelector('nav a.nav-item[href="/ui/docs"]');
    if (!link) return;
    observer.disconnect();
    link.click();
  }).observe(document, { childList: true, subtree: true }));
  await visit(page, '/ui');
  await painted(page);
  check(new URL(page.url()).pathname === '/ui/docs', `a click on the docs leads to ${page.url()}`);
  healthy(page);
  await page.context().close();
}

async function chat() {
  const page = await open();
  await visit(page, '/ui/playground');
  await page.getByLabel('Max tokens').fill('24');
  await say(page, 'Tell me about bees.');
  // The figures stand under the answer when its stream has ended.
  await hasEnded(page);
  const figures = await page.locator('.chat-figures span').allInnerTexts();
  for (const label of ['in', 'cached', 'out', 'first token', 'tokens/s', 'total']) check(figures.some((text) => text.endsWith(` ${label}`)), `${label} is not among ${figures}`);
  // The answer was cut at its limit of tokens, and continues where it ends.
  await continued(page);
  await page.getByLabel('Message', { exact: true }).fill('And about wasps?');
  await page.getByRole('button', { name: 'Code', exact: true }).click();
  await page.getByText('/v1/chat/completions').first().waitFor();
  await code(page.getByRole('dialog'));
  await page.keyboard.press('Escape');
  await page.reload();
  await page.getByText('Tell me about bees.').first().waitFor();
  // A schema that cannot be followed is reported while it is written.
  await page.getByRole('tab', { name: 'Output' }).click();
  await page.getByLabel('Format of the answer').selectOption('json_schema');
  const schema = page.locator('aside textarea').first();
  await schema.fill('{"type": "strin"}');
  await page.getByText(/must be one of null, boolean/).waitFor();
  healthy(page);
}

/** The request as code: the line of curl gives an answer, and the programs can be read by their languages. */
async function code(dialog) {
  // The libraries of the browser are not for other programs.
  const { LD_LIBRARY_PATH: _, ...env } = process.env;
  const shown = async (language) => {
    await dialog.getByRole('tab', { name: language }).click();
    return dialog.getByRole('group', { name: language }).innerText();
  };
  const answer = JSON.parse(execFileSync('sh', ['-c', await shown('curl')], { env, encoding: 'utf8' }));
  check(answer.choices?.[0].message.content, JSON.stringify(answer));
  const program = join(mkdtempSync(join(tmpdir(), 'console-')), 'sample.mjs');
  writeFileSync(program, await shown('JavaScript'));
  execFileSync(process.execPath, ['--check', program], { env });
  try {
    execFileSync('python3', ['-c', 'import ast, sys; ast.parse(sys.stdin.read())'], { env, input: await shown('Python') });
  } catch (error) {
    check(error.code === 'ENOENT', error.message);
  }
  const rust = await shown('Rust SDK');
  check(rust.includes('#[agent]') && rust.includes('.max_tokens(24)'), rust);
}

/** An answer comes word by word, is stopped, and continues where it ends. */
async function stop() {
  const page = await open();
  await visit(page, '/ui/playground');
  // The switch lies over its words. As plain text, an answer is on the page as it was written.
  await page.getByRole('switch', { name: 'Markdown' }).uncheck();
  await page.getByLabel('Max tokens').fill('1500');
  await page.getByLabel('Temperature').fill('0');
  await say(page, 'Write a long story about a beekeeper.');
  const answer = 'article.assistant .chat-message-text';
  const first = (await page.locator(answer).innerText()).length;
  await page.waitForFunction(([where, length]) => document.querySelector(where).innerText.length > length, [answer, first]);
  await page.getByRole('button', { name: 'Stop', exact: true }).click();
  await answersOf(page).last().getByText('Stopped', { exact: true }).waitFor();
  await page.getByLabel('Max tokens').fill('12');
  await continued(page);
  healthy(page);
}

/** A message that was changed is the one that is answered again, and an answer is not continued while a person changes it. */
async function rewrite() {
  const page = await open();
  await visit(page, '/ui/playground');
  await page.getByLabel('Max tokens').fill('8');
  await say(page, 'Tell me about bees.');
  await hasEnded(page);
  const said = page.getByRole('article', { name: 'You: message' });
  await said.getByRole('button', { name: 'Edit the message' }).click();
  await page.getByLabel('Text of the message').fill('Tell me about wasps.');
  await page.getByRole('button', { name: 'Save' }).click();
  await said.getByText('Tell me about wasps.').waitFor();
  const asked = page.waitForRequest('**/v1/chat/completions');
  await answersOf(page).getByRole('button', { name: 'Write this answer again' }).click();
  const { messages } = (await asked).postDataJSON();
  check(messages.length === 1 && messages[0].content === 'Tell me about wasps.', JSON.stringify(messages));
  await hasEnded(page);
  const more = page.getByRole('button', { name: 'Continue' });
  await more.waitFor();
  await answersOf(page).getByRole('button', { name: 'Edit the message' }).click();
  await page.getByLabel('Text of the message').fill('Wasps are');
  check(await more.count() === 0, 'an answer that is changed can be continued');
  await page.getByRole('button', { name: 'Save' }).click();
  await more.waitFor();
  healthy(page);
}

/** A model calls a tool whose arguments its schema constrains, and continues with the result. */
async function tools() {
  const page = await open();
  await visit(page, '/ui/playground');
  await page.getByLabel('Max tokens').fill('64');
  await page.getByRole('tab', { name: 'Tools' }).click();
  await page.getByRole('button', { name: 'Add a tool' }).click();
  await page.getByLabel('Name', { exact: true }).fill('get_weather');
  const cities = ['Oslo', 'Bern'];
  const schema = { type: 'object', additionalProperties: false, required: ['city'], properties: { city: { enum: cities } } };
  await page.getByLabel('Schema of the arguments').fill(JSON.stringify(schema));
  await page.getByText('Enforced while the model writes.').waitFor();
  await page.getByLabel('Tool choice').selectOption('tool:get_weather');
  await say(page, 'How warm is it?');
  await hasEnded(page);
  const call = page.getByRole('group', { name: 'Call of get_weather' });
  const given = JSON.parse(await call.getByRole('group', { name: 'Arguments of the call' }).innerText());
  check(Object.keys(given).join() === 'city' && cities.includes(given.city), JSON.stringify(given));
  await inspect(page, 'playground-call');
  const send = page.getByRole('button', { name: 'Send the results' });
  check(await send.isDisabled(), 'a call without a result can be answered');
  await call.getByLabel('Result of get_weather').fill('{"degrees": 21}');
  await page.getByLabel('Tool choice').selectOption('none');
  const asked = page.waitForRequest('**/v1/chat/completions');
  await send.click();
  const { messages } = (await asked).postDataJSON();
  const [called, result] = messages.slice(-2);
  check(result.role === 'tool' && result.content === '{"degrees": 21}' && result.tool_call_id === called.tool_calls[0].id, JSON.stringify(messages));
  await hasEnded(page, 2);
  check(await answersOf(page).count() === 2, 'the model did not continue');
  healthy(page);
}

/** Two sides get the same message with the same settings, and both answers satisfy the schema. */
async function compare() {
  const page = await open();
  const bodies = [];
  page.on('request', (request) => { if (request.url().endsWith('/v1/chat/completions')) bodies.push(request.postDataJSON()); });
  await visit(page, '/ui/playground');
  for (const [label, value] of [['Max tokens', '200'], ['Temperature', '0.5'], ['Seed', '7'], ['System prompt', 'You name colors.']]) await page.getByLabel(label, { exact: true }).fill(value);
  await page.getByRole('tab', { name: 'Output' }).click();
  await page.getByLabel('Format of the answer').selectOption('json_schema');
  // A mask cannot enforce that items differ, and the editor says so.
  const schema = { type: 'array', items: { enum: ['red', 'green'] }, minItems: 2, maxItems: 2, uniqueItems: true };
  await page.locator('aside textarea').first().fill(JSON.stringify(schema));
  await page.getByText('a part is checked only when a value is complete').waitFor();
  await page.getByRole('switch', { name: 'Two models' }).check();
  const { data: models } = await api('GET', '/v1/models');
  await page.getByLabel('Model or agent of the right side').selectOption(models.find(({ id }) => !id.startsWith('agent:')).id);
  await say(page, 'Name two colors.');
  await hasEnded(page, 2);
  for (const side of ['Left conversation', 'Right conversation']) {
    const answer = await page.getByRole('region', { name: side }).locator('article.assistant pre').first().innerText();
    check(JSON.parse(answer).sort().join() === 'green,red', `${side}: ${answer}`);
  }
  check(bodies.length === 2, `${bodies.length} requests were sent`);
  for (const { seed, temperature, messages, response_format: format } of bodies) {
    check(seed === 7 && temperature === 0.5 && messages[0].role === 'system' && format.json_schema.schema.uniqueItems, JSON.stringify(bodies));
  }
  await inspect(page, 'playground-two');
  healthy(page);
}

async function deploy() {
  // The session does not exist before its first message, which the browser's console reports.
  const page = await open({ expected: ['404'] });
  await visit(page, '/ui/agents');
  await page.getByRole('button', { name: 'Deploy' }).click();
  await page.getByLabel('Component and manifest').setInputFiles([process.env.COMPONENT, process.env.MANIFEST]);
  await page.getByRole('dialog').getByRole('button', { name: /^Deploy/ }).click();
  await page.waitForURL('**/ui/agents/ledger');
  await visit(page, '/ui/sessions/ledger/first');
  await page.getByLabel('Message', { exact: true }).fill('Count the hives.');
  await page.keyboard.press('Enter');
  await page.getByText('Count the hives.').first().waitFor();
  await page.getByRole('button', { name: 'Fork' }).waitFor();
  const turns = async () => (await api('GET', '/v1/agents/ledger/sessions/first/turns')).data;
  while ((await turns())[0]?.state !== 'done') await page.waitForTimeout(100);
  await page.reload();
  await page.getByRole('button', { name: 'Fork' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('Id of the copy').fill('second');
  await dialog.getByRole('button', { name: /^Fork/ }).click();
  await page.waitForURL('**/ui/sessions/ledger/second');
  await page.getByText('Count the hives.').first().waitFor();
  const state = await api('GET', '/v1/agents/ledger/sessions/second/state');
  check(JSON.stringify(state.data[0].value) === '["Count the hives."]' && state.data[0].kind === 'json', JSON.stringify(state));
  // Each message says how many tokens it has, and each turn what it used.
  const { data: [said] } = await api('GET', '/v1/agents/ledger/sessions/second/messages?tokens=true');
  const { count } = await api('POST', '/tokenize', { prompt: said.content, add_special_tokens: false });
  check(said.tokens === count, JSON.stringify([said, count]));
  await page.getByText(`${count} tokens`, { exact: true }).first().waitFor();
  check((await turns())[0].usage.completion_tokens > 0, 'a turn has no usage');
  // The session that was copied is exported and deleted; its copy stays.
  await visit(page, '/ui/sessions/ledger/first');
  const saved = page.waitForEvent('download');
  await page.getByRole('button', { name: 'Export' }).click();
  const file = JSON.parse(readFileSync(await (await saved).path(), 'utf8'));
  check(file.format === 'skep.session' && file.session === 'first' && file.turns === 1, JSON.stringify(file).slice(0, 300));
  await page.getByRole('button', { name: 'Delete', exact: true }).click();
  await dialog.getByRole('button', { name: 'Delete', exact: true }).click();
  await page.waitForURL('**/ui/sessions');
  await page.getByRole('row').filter({ hasText: 'second' }).waitFor();
  check(await page.getByRole('link', { name: 'first', exact: true }).count() === 0, 'a deleted session is listed');
  healthy(page);
}

/** A message that is typed while another one is on its way stays in its field. */
async function type() {
  const page = await open();
  const way = {};
  const held = new Promise((release) => { way.release = release; });
  await page.route('**/messages?detach=true', async (route) => { await held; await route.continue(); });
  await visit(page, '/ui/sessions/ledger/second');
  const field = page.getByLabel('Message', { exact: true });
  const asked = page.waitForRequest('**/messages?detach=true');
  await field.fill('How many frames?');
  await page.keyboard.press('Enter');
  await asked;
  await field.fill('And how many');
  way.release();
  await page.locator('form.sender [aria-busy]').waitFor({ state: 'detached' });
  check(await field.inputValue() === 'And how many', `“${await field.inputValue()}” is left`);
  await field.fill('And how many bees?');
  await page.keyboard.press('Enter');
  await page.getByText('And how many bees?').first().waitFor();
  await page.locator('form.sender [aria-busy]').waitFor({ state: 'detached' });
  check(await field.inputValue() === '', 'a message that was sent is left');
  const texts = async () => (await api('GET', '/v1/agents/ledger/sessions/second/state')).data[0].value;
  while ((await texts()).length < 3) await page.waitForTimeout(100);
  check((await texts()).join() === 'Count the hives.,How many frames?,And how many bees?', await texts());
  healthy(page);
}

async function approve() {
  const page = await open({ expected: ['404'] });
  await visit(page, '/ui/sessions/approval/c1');
  await page.getByLabel('Message', { exact: true }).fill('My order 38 arrived broken, I want my 95 euros back.');
  await page.keyboard.press('Enter');
  // Somebody else decides in the inbox, while the page of the session waits.
  const other = await open();
  await visit(other, '/ui/inbox');
  const approval = other.getByRole('article', { name: 'Approval of refund' });
  await approval.waitFor();
  // The timeline of the turn grows while it runs: the call waits, and the commit comes after the decision.
  const { data: [waiting] } = await api('GET', '/v1/agents/approval/sessions/c1/turns');
  const live = await open();
  await visit(live, `/ui/sessions/approval/c1/turns/${waiting.turn_id}`);
  await live.getByText('This turn waits for a person').waitFor();
  const rows = live.locator('.wf-row');
  await live.locator('.wf-row.open').filter({ hasText: 'tools.approve' }).waitFor();
  check(await rows.filter({ hasText: 'Commit' }).count() === 0, 'a turn that waits is committed');
  await inspect(live, 'turn-live');
  await approval.getByRole('button', { name: 'Approve' }).click();
  await page.getByText(/euros were refunded/).first().waitFor();
  await rows.filter({ hasText: 'Commit' }).waitFor();
  await live.locator('h1').getByText('Done').waitFor();
  check(await live.locator('.wf-row.open').count() === 0, 'a part of a turn that has ended runs');
  healthy(live);
  await approval.waitFor({ state: 'detached' });
  // The tool's result is shown before the turn is committed.
  const state = async () => (await api('GET', '/v1/agents/approval/sessions/c1/turns')).data[0].state;
  while (await state() === 'running') await page.waitForTimeout(100);
  check(await state() === 'done', `the turn is ${await state()}`);
  healthy(page);
  healthy(other);
}

/** Sets a secret and replaces it. Its value is in no answer of the host and in no part of the page. */
async function secrets() {
  const page = await open();
  await visit(page, '/ui/usage?tab=secrets');
  const set = async (dialog, value, to) => {
    await dialog.getByLabel('May be sent to').fill(to);
    await dialog.getByLabel('Value').fill(value);
    await dialog.getByRole('button', { name: 'Set the secret' }).click();
    await dialog.waitFor({ state: 'detached' });
  };
  await page.getByRole('button', { name: 'New secret' }).click();
  const dialog = page.getByRole('dialog');
  check(await dialog.getByRole('button', { name: 'Set the secret' }).isDisabled(), 'a secret without a value can be set');
  await dialog.getByLabel('Name').fill('SHOP_KEY');
  await inspect(page, 'secret-new');
  await set(dialog, 'value-one-of-the-shop', 'https://api.example.com\nhttps://*.example.org');
  const row = page.getByRole('row').filter({ hasText: 'SHOP_KEY' });
  await row.getByText('https://api.example.com, https://*.example.org').waitFor();
  await row.getByRole('button', { name: 'Replace' }).click();
  check(await dialog.getByLabel('Value').inputValue() === '', 'a value is shown again');
  await set(dialog, 'value-two-of-the-shop', 'https://api.example.net');
  await row.getByText('https://api.example.net').waitFor();
  const { data } = await api('GET', '/v1/secrets');
  check(data.length === 1 && data[0].hosts.join() === 'https://api.example.net', JSON.stringify(data));
  check(!(await page.content()).includes('of-the-shop') && !JSON.stringify(data).includes('of-the-shop'), 'a value is shown');
  await inspect(page, 'secrets');
  await row.getByRole('button', { name: 'Delete SHOP_KEY' }).click();
  await dialog.getByRole('button', { name: 'Delete' }).click();
  await page.getByText('No secrets').waitFor();
  healthy(page);
}

/** Finds sessions by words of a message, in any case and order. */
async function find() {
  const page = await open();
  await visit(page, '/ui/sessions');
  const search = page.getByLabel('Search what was said');
  await search.fill('HIVES count');
  const row = page.getByRole('row').filter({ hasText: 'second' });
  await row.locator('mark').nth(1).waitFor();
  check((await row.locator('mark').allInnerTexts()).join() === 'Count,hives', await row.innerText());
  check(await page.getByRole('row').filter({ hasText: 'approval' }).count() === 0, 'a session without the words is shown');
  check(new URL(page.url()).searchParams.get('text') === 'HIVES count', page.url());
  await inspect(page, 'sessions-found');
  await page.reload();
  await row.locator('mark').first().waitFor();
  await search.fill('wasps that nobody spoke of');
  await page.getByText('No session has these words').waitFor();
  await page.getByRole('button', { name: 'Show all' }).click();
  await page.getByRole('row').filter({ hasText: 'approval' }).first().waitFor();
  healthy(page);
}

await scenario(async () => {
  await secrets();
  await start();
  await choose();
  await chat();
  await stop();
  await rewrite();
  await tools();
  await compare();
  await deploy();
  await type();
  await approve();
  await find();
});
