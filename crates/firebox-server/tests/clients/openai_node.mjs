// Drives a server by the official `openai` package. Usage: node openai_node.mjs http://HOST:PORT/v1

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ["llama", "pocket"]);

const whole = await client.chat.completions.create({ model: "pocket", messages, max_tokens: 12, temperature: 0 });
const stream = await client.chat.completions.create({
  model: "pocket",
  messages,
  max_tokens: 12,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
let usage;
for await (const part of stream) {
  text += part.choices[0]?.delta.content ?? "";
  usage = part.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const lamp = {
  type: "object",
  properties: { on: { type: "boolean" } },
  required: ["on"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "lamp", parameters: lamp } };
const wish = { model: "pocket", messages, tools: [tool], tool_choice: "required", temperature: 0 };
const called = await client.chat.completions.create(wish);
const [call] = called.choices[0].message.tool_calls;
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");
const final = await client.chat.completions.stream(wish).finalChatCompletion();
assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
const answered = [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "on" }];
await client.chat.completions.create({ model: "pocket", messages: answered, tools: [tool], max_tokens: 4 });

const schema = { name: "answer", strict: true, schema: lamp };
const formed = await client.chat.completions.create({
  model: "llama",
  messages,
  response_format: { type: "json_schema", json_schema: schema },
});
assert.equal(typeof JSON.parse(formed.choices[0].message.content).on, "boolean");

const vectors = await client.embeddings.create({ model: "llama", input: ["Hello", "there"] });
assert.deepEqual(vectors.data.map((entry) => entry.embedding.length), [32, 32]);

const response = await client.responses.create({ model: "pocket", input: "Hello", max_output_tokens: 12, temperature: 0 });
let deltas = "";
const events = client.responses.stream({ model: "pocket", input: "Hello", max_output_tokens: 12, temperature: 0 });
for await (const event of events) if (event.type === "response.output_text.delta") deltas += event.delta;
assert.equal(deltas, response.output_text);
assert.equal((await events.finalResponse()).output_text, response.output_text);
const flat = { type: "function", name: "lamp", parameters: lamp, strict: true };
const lit = await client.responses.create({ model: "pocket", input: "Light!", tools: [flat], tool_choice: "required" });
assert.equal(lit.output[0].type, "function_call");

// Leaving in the middle, by either way there is.
const left = await client.completions.create({ model: "llama", prompt: "Once", max_tokens: 200, stream: true, n: 8 });
for await (const _ of left) break;
const controller = new AbortController();
const aborted = client.completions.create(
  { model: "llama", prompt: "Once", max_tokens: 200, n: 8, logprobs: 1 },
  { signal: controller.signal },
);
setTimeout(() => controller.abort(), 20);
await assert.rejects(aborted.then(() => Promise.reject(new OpenAI.APIUserAbortError())), OpenAI.APIUserAbortError);

await assert.rejects(
  client.chat.completions.create({ model: "none", messages }),
  (error) => error instanceof OpenAI.NotFoundError && error.param === "model",
);
console.log("done");
