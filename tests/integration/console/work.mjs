// The work of a person, who sets a secret, chats, deploys an agent by its files, talks to it, forks a session, approves a call while the turn waits,
// and finds a session by what was said in it.
import { api, check, healthy, inspect, open, scenario, visit } from './browser.mjs';

async function chat() {
  const page = await open();
  await visit(page, '/ui/playground');
  await page.getByLabel('Max tokens').fill('24');
  await page.getByLabel('Message', { exact: true }).fill('Tell me about bees.');
  await page.keyboard.press('Enter');
  // The figures stand under the answer when its stream has ended.
  await page.getByText(/tokens\/s|tok\/s/).first().waitFor();
  // The answer was cut at its limit of tokens, and continues where it ends: it is still one message, which has become longer.
  const answers = page.getByRole('article', { name: /^(?!You).*: message$/ });
  const cut = await answers.last().locator('.chat-message-text').innerText();
  const asked = page.waitForRequest('**/v1/chat/completions');
  await page.getByRole('button', { name: 'Continue' }).click();
  const { messages, continue_final_message: continues } = (await asked).postDataJSON();
  check(continues && messages.at(-1).role === 'assistant', JSON.stringify(messages));
  await (await (await asked).response()).finished();
  await page.locator('.chat-figures').getByText('total').first().waitFor();
  const whole = await answers.last().locator('.chat-message-text').innerText();
  check(await answers.count() === 1 && whole.length > cut.length && whole.startsWith(cut.trim()), `“${cut}” became “${whole}”`);
  await page.getByRole('button', { name: 'Code' }).click();
  await page.getByText('/v1/chat/completions').first().waitFor();
  await page.keyboard.press('Escape');
  await page.reload();
  await page.getByText('Tell me about bees.').first().waitFor();
  // A schema that cannot be followed is reported while it is written.
  await page.getByRole('tab', { name: 'Output' }).click();
  await page.getByLabel('Form of the answer').selectOption('json_schema');
  const schema = page.locator('aside textarea').first();
  await schema.fill('{"type": "strin"}');
  await page.getByText(/must be one of null, boolean/).waitFor();
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
  await approval.getByRole('button', { name: 'Approve' }).click();
  await page.getByText(/euros were refunded/).first().waitFor();
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
  await chat();
  await deploy();
  await approve();
  await find();
});
