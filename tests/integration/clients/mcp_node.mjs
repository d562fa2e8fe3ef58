// Uses the reference client of the Model Context Protocol for TypeScript with an agent of a Skep host: URL -> exit code 0 and "all
// checks passed".
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {
  CreateMessageRequestSchema, ElicitRequestSchema, LoggingMessageNotificationSchema,
} from "@modelcontextprotocol/sdk/types.js";

const client = new Client({ name: "test", version: "1" }, { capabilities: { elicitation: {}, sampling: {} } });
client.setRequestHandler(ElicitRequestSchema, ({ params }) => {
  assert.match(params.message, /name/);
  return { action: "accept", content: { username: "ada", email: "ada@example.com" } };
});
client.setRequestHandler(CreateMessageRequestSchema, ({ params }) => {
  const [{ content }] = params.messages;
  const text = (Array.isArray(content) ? content[0] : content).text.toUpperCase();
  return { role: "assistant", content: { type: "text", text }, model: "test" };
});
const logged = [];
client.setNotificationHandler(LoggingMessageNotificationSchema, ({ params }) => void logged.push(params.data));
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));

const names = (await client.listTools()).tools.map(({ name }) => name);
assert.ok(names.includes("test_sampling"));
const call = async (name, args = {}, options = {}) => client.callTool({ name, arguments: args }, undefined, options);
assert.equal((await call("test_simple_text")).content[0].text, "This is a simple text response for testing.");
assert.equal((await call("test_audio_content")).content[0].type, "audio");
assert.equal((await call("test_error_handling")).isError, true);
const seen = [];
await call("test_tool_with_progress", {}, { onprogress: ({ progress, total }) => seen.push([progress, total]) });
assert.deepEqual(seen, [[0, 100], [50, 100], [100, 100]]);
assert.equal((await call("test_sampling", { prompt: "bees" })).content[0].text, "LLM response: BEES");
const form = await call("test_elicitation", { message: "What is your name?" });
assert.equal(form.content[0].text, "User response: ada at ada@example.com");
await call("test_tool_with_logging");

const prompt = await client.getPrompt({ name: "test_prompt_with_arguments", arguments: { arg1: "one", arg2: "two" } });
assert.match(prompt.messages[0].content.text, /arg1='one'/);
const resources = (await client.listResources()).resources.map(({ uri }) => uri);
assert.ok(resources.includes("test://static-text"));
const read = await client.readResource({ uri: "test://template/7/data" });
assert.match(read.contents[0].text, /Data for ID: 7/);
await client.subscribeResource({ uri: "test://watched-resource" });
await client.unsubscribeResource({ uri: "test://watched-resource" });
for (let wait = 0; wait < 50 && logged.length < 3; wait++) await new Promise((resolve) => setTimeout(resolve, 100));
assert.deepEqual(logged.slice(-3), ["Tool execution started", "Tool processing data", "Tool execution completed"]);
await client.close();
console.log("all checks passed");
