// The request of a pane as code: curl, Python, JavaScript, and an agent with the Rust SDK.
import { isAgent, userMessage } from './state.js';
import { chatBody } from './request.js';

/** Returns `[{id, label, text}]` for `CodeTabs`. Keys are placeholders: the console does not know them. */
export function samples(state, pane, keysRequired) {
  const origin = location.origin;
  const messages = state.draft.trim() || !pane.messages.length ? [...pane.messages, userMessage(state.draft.trim() || 'Hello')] : pane.messages;
  const whole = { ...pane, messages };
  if (isAgent(pane.model)) return ofAgent(origin, whole, keysRequired);
  const { body, error } = chatBody(state, whole, { stream: false });
  if (error) return [{ id: 'error', label: 'Error', text: error }];
  return [
    { id: 'curl', label: 'curl', text: curl(`${origin}/v1/chat/completions`, body, keysRequired) },
    { id: 'python', label: 'Python', text: python(origin, body, keysRequired) },
    { id: 'javascript', label: 'JavaScript', text: javascript(origin, body, keysRequired) },
    { id: 'rust', label: 'Rust SDK', text: rust(state, body) },
  ];
}

const json = (value) => JSON.stringify(value, null, 2);
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const indent = (text, by) => text.replaceAll('\n', `\n${by}`);

function curl(address, body, keysRequired, extra = '') {
  const key = keysRequired ? " \\\n  -H \"authorization: Bearer $SKEP_API_KEY\"" : '';
  return `curl -s${extra} ${address} \\\n  -H 'content-type: application/json'${key} \\\n  -d ${shell(json(body))}`;
}

/** Fields that OpenAI's clients do not know by name; they go into `extra_body`. */
const OURS = ['top_k', 'min_p', 'repetition_penalty'];

function python(origin, body, keysRequired) {
  const { body: known, extra } = split(body);
  const lines = Object.entries(known).map(([name, value]) => `    ${name}=${indent(pythonValue(value), '    ')},`);
  if (extra) lines.push(`    extra_body=${indent(pythonValue(extra), '    ')},`);
  const key = keysRequired ? 'os.environ["SKEP_API_KEY"]' : '"none"';
  return `${keysRequired ? 'import os\n\n' : ''}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${key})
stream = client.chat.completions.create(
${lines.join('\n')}
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function split(body) {
  const ours = Object.entries(body).filter(([name]) => OURS.includes(name));
  const special = ['regex', 'grammar'].includes(body.response_format?.type) ? [['response_format', body.response_format]] : [];
  const all = [...ours, ...special];
  const known = Object.fromEntries(Object.entries(body).filter(([name]) => !all.some(([each]) => each === name)));
  return { body: known, extra: all.length ? Object.fromEntries(all) : null };
}

function pythonValue(value, by = '') {
  const deeper = `${by}    `;
  if (value === null) return 'None';
  if (typeof value === 'boolean') return value ? 'True' : 'False';
  if (typeof value !== 'object') return JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = isList ? value.map((each) => pythonValue(each, deeper)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each, deeper)}`);
  const [open, close] = isList ? '[]' : '{}';
  const line = `${open}${parts.join(', ')}${close}`;
  if (line.length < 72 && !line.includes('\n')) return line;
  return `${open}\n${parts.map((part) => `${deeper}${part},`).join('\n')}\n${by}${close}`;
}

function javascript(origin, body, keysRequired) {
  return `import OpenAI from 'openai';

const client = new OpenAI({ baseURL: '${origin}/v1', apiKey: ${keysRequired ? 'process.env.SKEP_API_KEY' : "'none'"} });
const stream = await client.chat.completions.create(${json({ ...body, stream: true })});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? '');
}
`;
}

/** A text as a Rust literal: raw where it has quotes or backslashes. */
function literal(text) {
  if (!/["\\]/.test(text)) return `"${text}"`;
  const marks = '#'.repeat(1 + Math.max(0, ...[...text.matchAll(/"(#*)/g)].map(([, found]) => found.length)));
  return `r${marks}"${text}"${marks}`;
}

const float = (value) => (Number.isInteger(value) ? `${value}.0` : String(value));

function rust(state, body) {
  const chain = [`.conversation_with_model("main", ${literal(body.model ?? '')})`];
  if (state.system.trim()) chain.push(`.system(${literal(state.system)})`);
  chain.push('.user(message.text)');
  const sampling = ['top_k', 'top_p', 'min_p', 'frequency_penalty', 'presence_penalty', 'repetition_penalty'].filter((name) => body[name] !== undefined);
  const uses = ['AgentError', 'Context', 'Message', 'Reply', 'agent'];
  if (sampling.length) {
    uses.push('Sampling');
    const all = ['temperature', 'seed', ...sampling].filter((name) => body[name] !== undefined);
    const fields = all.map((name) => `${name}: Some(${['top_k', 'seed'].includes(name) ? body[name] : float(body[name])})`);
    chain.push(`.sampling(Sampling { ${fields.join(', ')}, ..Sampling::default() })`);
  } else {
    if (body.temperature !== undefined) chain.push(`.temperature(${float(body.temperature)})`);
    if (body.seed !== undefined) chain.push(`.seed(${body.seed})`);
  }
  if (body.max_tokens !== undefined) chain.push(`.max_tokens(${body.max_tokens})`);
  for (const stop of body.stop ?? []) chain.push(`.with_stop(${literal(stop)})`);
  const format = body.response_format;
  const isJson = format?.type === 'json_schema' || format?.type === 'json_object';
  if (format) {
    uses.push('Output');
    const schema = format.json_schema?.schema ?? { type: 'object' };
    if (isJson) chain.push(`.output(Output::JsonSchema(json!(${indent(json(schema), '        ')})))`);
    else if (format.type === 'regex') chain.push(`.output(Output::Regex(${literal(format.regex)}.into()))`);
    else chain.push(`.output(Output::Grammar(${literal(format.grammar)}.into()))`);
  }
  const tools = (body.tools ?? []).map(({ function: { name } }) => name);
  if (tools.length) chain.push(`.tools([${tools.map((name) => JSON.stringify(name)).join(', ')}])`);
  chain.push('.run()', '.await?');
  const note = tools.length ? `\n// Write each tool (${tools.join(', ')}) as a function with #[tool].\n` : '';
  return `${isJson ? 'use serde_json::json;\n' : ''}use skep_sdk::{${uses.sort((a, b) => a.localeCompare(b)).join(', ')}};
${note}
/// Answers as the playground does.
#[agent${tools.length ? `(tools = [${tools.join(', ')}])` : ''}]
async fn answer(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let reply = cx
        ${chain.join('\n        ')};
    Ok(Reply::text(reply.text))
}
`;
}

function ofAgent(origin, pane, keysRequired) {
  const agent = pane.model.slice('agent:'.length);
  const text = pane.messages.findLast(({ role }) => role === 'user')?.text ?? 'Hello';
  const path = `/v1/agents/${encodeURIComponent(agent)}/sessions/${encodeURIComponent(pane.session)}/messages`;
  const key = keysRequired ? "\n    'authorization': `Bearer ${process.env.SKEP_API_KEY}`," : '';
  return [
    { id: 'curl', label: 'curl', text: curl(`${origin}${path}`, { text }, keysRequired, "N -H 'accept: text/event-stream'") },
    { id: 'python', label: 'Python', text: `${keysRequired ? 'import os\n\n' : ''}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${keysRequired ? 'os.environ["SKEP_API_KEY"]' : '"none"'})
answer = client.chat.completions.create(
    model=${JSON.stringify(pane.model)},
    user=${JSON.stringify(pane.session)},  # the session
    messages=[{"role": "user", "content": ${JSON.stringify(text)}}],
)
print(answer.choices[0].message.content)
` },
    { id: 'javascript', label: 'JavaScript', text: `const response = await fetch(${JSON.stringify(origin + path)}, {
  method: 'POST',
  headers: {
    'content-type': 'application/json',${key}
  },
  body: JSON.stringify(${JSON.stringify({ text })}),
});
const turn = await response.json();
console.log(turn.text);
` },
    { id: 'rust', label: 'Rust SDK', text: `use serde_json::{Value, json};
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Calls a tool of the agent ${agent}; grant "agent:${agent}/*" in agent.toml.
#[agent]
async fn caller(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let arguments = json!({ "text": message.text });
    let result = cx.host_tools().call::<Value>("agent:${agent}/TOOL", &arguments).await?;
    Ok(Reply::text(result.to_string()))
}
` },
  ];
}
