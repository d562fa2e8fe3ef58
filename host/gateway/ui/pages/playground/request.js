// The request of a pane as JSON: what is sent, and what “as code” shows.

/** The options with their place in the request. `bounds` are those of the field. */
export const OPTIONS = [
  { name: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.1, about: '0 always takes the most likely token.' },
  { name: 'max_tokens', label: 'Max tokens', min: 1, step: 1, whole: true, about: 'Maximum number of tokens of an answer.' },
  { name: 'top_p', label: 'Top p', min: 0, max: 1, step: 0.05, about: 'Keeps the smallest set of tokens with at least this total probability.' },
  { name: 'top_k', label: 'Top k', min: 0, step: 1, whole: true, about: 'Keeps the k most likely tokens; 0 keeps all.' },
  { name: 'min_p', label: 'Min p', min: 0, max: 1, step: 0.05, about: 'Drops tokens below this share of the most likely one.' },
  { name: 'seed', label: 'Seed', min: 0, step: 1, whole: true, about: 'The same seed and request give the same answer.' },
  { name: 'frequency_penalty', label: 'Frequency penalty', min: -2, max: 2, step: 0.1, about: 'Lowers tokens by how often they appeared.' },
  { name: 'presence_penalty', label: 'Presence penalty', min: -2, max: 2, step: 0.1, about: 'Lowers tokens that appeared at all.' },
  { name: 'repetition_penalty', label: 'Repetition penalty', min: 0.1, step: 0.05, about: '1 turns it off.' },
];

export const EFFORTS = ['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'];

/** The field that asks for the rest of the last message. */
export const CONTINUES = 'continue_final_message';

/** Parses JSON and returns `{value}` or `{error}` in words. */
export function parse(text) {
  if (!text?.trim()) return { error: 'It is empty.' };
  try { return { value: JSON.parse(text) }; } catch (error) { return { error: `This is not JSON: ${error.message}.` }; }
}

/** Returns `{body}` of a chat completion for a pane, or `{error}` that says which part cannot be sent. */
export function chatBody(state, pane, { stream = true, continues = false } = {}) {
  const { options, output } = state;
  const messages = [];
  if (state.system.trim()) messages.push({ role: 'system', content: state.system });
  for (const message of pane.messages) messages.push(...wireMessages(message));
  const body = { model: pane.model, messages };
  if (continues) {
    const { text, reasoning } = pane.messages.at(-1);
    if (!text) messages.push({ role: 'assistant', content: '' });
    if (reasoning) messages.at(-1).reasoning_content = reasoning;
    Object.assign(body, { [CONTINUES]: true, add_generation_prompt: false });
  }
  for (const { name } of OPTIONS) if (options[name] !== undefined && options[name] !== '') body[name] = Number(options[name]);
  if (options.reasoning_effort) body.reasoning_effort = options.reasoning_effort;
  const stops = (options.stop ?? '').split('\n').filter(Boolean);
  if (stops.length) body.stop = stops;
  const tools = state.tools.filter(({ on }) => on);
  if (tools.length) {
    body.tools = [];
    for (const tool of tools) {
      const { value, error } = parse(tool.schema);
      if (error) return { error: `The schema of the tool “${tool.name}” cannot be sent. ${error}` };
      body.tools.push({ type: 'function', function: { name: tool.name, ...(tool.description ? { description: tool.description } : {}), parameters: value } });
    }
    const isNamed = tools.some(({ name }) => `tool:${name}` === state.toolChoice);
    if (isNamed) body.tool_choice = { type: 'function', function: { name: state.toolChoice.slice(5) } };
    else if (['none', 'required'].includes(state.toolChoice)) body.tool_choice = state.toolChoice;
  }
  const text = output.texts[output.kind] ?? '';
  if (output.kind === 'json_object') body.response_format = { type: 'json_object' };
  if (output.kind === 'regex' && text) body.response_format = { type: 'regex', regex: text };
  if (output.kind === 'grammar' && text) body.response_format = { type: 'grammar', grammar: text };
  if (output.kind === 'json_schema') {
    const { value, error } = parse(text);
    if (error) return { error: `The schema of the answer cannot be sent. ${error}` };
    body.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema: value } };
  }
  if (stream) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return { body };
}

function wireMessages(message) {
  if (message.role === 'user') return [{ role: 'user', content: message.text }];
  if (message.role === 'system') return [{ role: 'system', content: message.text }];
  const calls = message.calls ?? [];
  if (!message.text && !calls.length) return [];
  const said = { role: 'assistant', content: message.text || null };
  if (calls.length) said.tool_calls = calls.map(({ id, name, text }) => ({ id, type: 'function', function: { name, arguments: text } }));
  return [said, ...calls.map(({ id, result }) => ({ role: 'tool', tool_call_id: id, content: result ?? '' }))];
}
