// Uses the AI SDK with its providers against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed".
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";

const [host, name] = process.argv.slice(2);
const baseURL = `${host}/v1`;
const apiKey = "unused";
// The provider of Workers AI knows only one address, whose routes the host has too.
const original = globalThis.fetch;
globalThis.fetch = (input, init) => original(String(input).replace("https://api.cloudflare.com", host), init);
const models = {
  responses: createOpenAI({ baseURL, apiKey })(name),
  chat: createOpenAI({ baseURL, apiKey }).chat(name),
  compatible: createOpenAICompatible({ name: "skep", baseURL, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
  workers: createWorkersAI({ accountId: "local", apiKey })(`@cf/local/${name}`),
};
const hive = z.object({ hive: z.number().int().min(1).max(99) });

for (const [kind, model] of Object.entries(models)) {
  const greedy = { model, temperature: 0, maxRetries: 0 };
  const plain = await generateText({ ...greedy, prompt: "Say hello to the bees.", maxOutputTokens: 16 });
  assert.ok(plain.text.length > 0, kind);

  // The model calls the tool, and the SDK sends the history with the result back.
  let counted = [];
  const count_bees = tool({
    description: "Counts the bees of a hive.",
    inputSchema: hive,
    execute: async ({ hive }) => (counted.push(hive), { bees: 41000 }),
  });
  const conversation = streamText({
    ...greedy,
    prompt: "How many bees are in hive 7?",
    tools: { count_bees },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    maxOutputTokens: 60,
    onError: ({ error }) => { throw error; },
  });
  let streamed = "";
  for await (const delta of conversation.textStream) streamed += delta;
  const steps = await conversation.steps;
  assert.equal(steps.length, 2, `${kind}: the call and the answer`);
  assert.ok(counted.length >= 1 && counted.every((hive) => hive >= 1 && hive <= 99), kind);
  assert.ok(streamed.includes(steps[1].text) && steps[1].text.length > 0, kind);

  const shaped = await generateText({
    ...greedy, prompt: "How many bees are in hive 7?", output: Output.object({ schema: hive }), maxOutputTokens: 60,
  });
  assert.ok(shaped.output.hive >= 1 && shaped.output.hive <= 99, kind);
  console.log(`${kind}: passed`);
}
console.log("all checks passed");
