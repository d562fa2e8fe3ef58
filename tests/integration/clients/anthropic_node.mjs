// Uses the official `@anthropic-ai/sdk` client against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed".
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "unused", maxRetries: 0 });
const greedy = { model, temperature: 0 };
const messages = [{ role: "user", content: "Say hello to the bees." }];

const answer = await client.messages.create({ ...greedy, messages, max_tokens: 16 });
assert.equal(answer.content[0].type, "text");
assert.ok(answer.usage.output_tokens <= 16);

const stream = client.messages.stream({ ...greedy, messages, max_tokens: 16 });
let text = "";
stream.on("text", (delta) => (text += delta));
const whole = await stream.finalMessage();
assert.equal(text, answer.content[0].text);
assert.equal(whole.stop_reason, answer.stop_reason);
assert.ok(whole.usage.cache_read_input_tokens > 0);

const tools = [
  {
    name: "count_bees",
    description: "Counts the bees of a hive.",
    input_schema: {
      type: "object",
      additionalProperties: false,
      required: ["hive"],
      properties: { hive: { type: "integer", minimum: 1, maximum: 99 } },
    },
  },
];
const ask = [{ role: "user", content: "How many bees are in hive 7?" }];
const calling = client.messages.stream({ ...greedy, messages: ask, tools, tool_choice: { type: "any" }, max_tokens: 60 });
const called = await calling.finalMessage();
assert.equal(called.stop_reason, "tool_use");
const call = called.content.at(-1);
assert.equal(call.name, "count_bees");
assert.ok(call.input.hive >= 1 && call.input.hive <= 99);

const result = { type: "tool_result", tool_use_id: call.id, content: "41000" };
const history = [...ask, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
const final = await client.messages.create({ ...greedy, messages: history, tools, tool_choice: { type: "none" }, max_tokens: 24 });
assert.ok(final.content[0].text.length > 0);

const schema = {
  type: "object",
  additionalProperties: false,
  required: ["name", "age"],
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 0, maximum: 120 } },
};
const shaped = await client.messages.create({
  ...greedy,
  messages: [{ role: "user", content: "Ada is 36 years old." }],
  output_config: { format: { type: "json_schema", schema } },
  max_tokens: 60,
});
const person = JSON.parse(shaped.content[0].text);
assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
assert.ok(person.age >= 0 && person.age <= 120);

await assert.rejects(client.messages.create({ ...greedy, model: "no-such-model", messages, max_tokens: 4 }), Anthropic.NotFoundError);
console.log("all checks passed");
