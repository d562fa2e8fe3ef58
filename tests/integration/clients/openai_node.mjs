// Uses the official `openai` client for Node against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed".
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "unused", maxRetries: 0 });
const greedy = { model, temperature: 0 };
const parameters = {
  type: "object",
  additionalProperties: false,
  required: ["hive"],
  properties: { hive: { type: "integer", minimum: 1, maximum: 99 } },
};
const counts = { name: "count_bees", description: "Counts the bees of a hive.", parameters, strict: true };
const question = "How many bees are in hive 7?";

// Chat completions.
const messages = [{ role: "user", content: "Say hello to the bees." }];
const answer = await client.chat.completions.create({ ...greedy, messages, max_tokens: 16 });
const stream = client.chat.completions.stream({ ...greedy, messages, max_tokens: 16 });
assert.equal(await stream.finalContent(), answer.choices[0].message.content);

const tools = [{ type: "function", function: counts }];
const ask = [{ role: "user", content: question }];
const calling = client.chat.completions.stream({ ...greedy, messages: ask, tools, tool_choice: "required", max_tokens: 60 });
const [call] = (await calling.finalMessage()).tool_calls;
assert.equal(call.function.name, "count_bees");
assert.ok(JSON.parse(call.function.arguments).hive >= 1);
const history = [...ask, { role: "assistant", tool_calls: [call] }, { role: "tool", tool_call_id: call.id, content: "41000" }];
const said = await client.chat.completions.create({ ...greedy, messages: history, tools, tool_choice: "none", max_tokens: 24 });
assert.ok(said.choices[0].message.content.length > 0);

const format = { type: "json_schema", json_schema: { name: "hive", strict: true, schema: parameters } };
const shaped = await client.chat.completions.create({ ...greedy, messages: ask, response_format: format, max_tokens: 60 });
assert.ok(JSON.parse(shaped.choices[0].message.content).hive <= 99);

// Responses.
const response = await client.responses.create({ ...greedy, input: "Say hello to the bees.", max_output_tokens: 16 });
assert.equal(response.output_text, answer.choices[0].message.content);
const responding = client.responses.stream({
  ...greedy, input: question, tools: [{ type: "function", ...counts }], tool_choice: "required", max_output_tokens: 60,
});
let streamed = "";
responding.on("response.function_call_arguments.delta", ({ delta }) => (streamed += delta));
const called = await responding.finalResponse();
const item = called.output.find(({ type }) => type === "function_call");
assert.equal(item.arguments, streamed);
const output = { type: "function_call_output", call_id: item.call_id, output: "41000" };
const final = await client.responses.create({ ...greedy, input: [output], previous_response_id: called.id, max_output_tokens: 24 });
assert.ok(final.output_text.length > 0);
const text = { format: { type: "json_schema", name: "hive", strict: true, schema: parameters } };
const structured = await client.responses.create({ ...greedy, input: question, text, max_output_tokens: 60 });
assert.ok(JSON.parse(structured.output_text).hive <= 99);

await assert.rejects(client.responses.create({ ...greedy, model: "no-such-model", input: "x" }), OpenAI.NotFoundError);
console.log("all checks passed");
