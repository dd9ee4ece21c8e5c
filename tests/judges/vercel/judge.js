// `node judge.js URL`: makes calls with the Vercel AI SDK, of which only the base URL is changed, and prints what each got.
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateText, jsonSchema, Output, streamText, tool } from "ai";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "sk-any" });
const model = openai.chat("gpt-4o");
const schema = jsonSchema({
  type: "object",
  required: ["at"],
  properties: { at: { type: "string" } },
  additionalProperties: false,
});
const about = { model, maxRetries: 0 };

const pieces = async (stream) => {
  const found = [];
  for await (const piece of stream.textStream) found.push(piece);
  return found;
};

const calls = {
  text: async () => (await generateText({ ...about, prompt: "tell me “a story” 🦊" })).text,
  usage: async () => (await generateText({ ...about, prompt: "a story" })).usage,
  stream: async () => pieces(streamText({ ...about, prompt: "a story" })),
  tool: async () =>
    (await generateText({ ...about, prompt: "where", tools: { look: tool({ inputSchema: schema }) } })).toolCalls,
  structured: async () => (await generateText({ ...about, prompt: "here", output: Output.object({ schema }) })).output,
  responses: async () => (await generateText({ ...about, model: openai("gpt-4o"), prompt: "a story" })).text,
  "responses, stream": async () =>
    pieces(streamText({ ...about, model: openai("gpt-4o"), prompt: "a story" })),
  embeddings: async () =>
    (await embedMany({ model: openai.embedding("text-embedding-3-small"), values: ["a", "b"] })).embeddings.map(
      (vector) => vector.slice(0, 4),
    ),
  "unknown model": async () => (await generateText({ ...about, model: openai.chat("nobody"), prompt: "x" })).text,
};

const found = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    found[`Vercel AI SDK: ${name}`] = await call();
  } catch (error) {
    found[`Vercel AI SDK: ${name}`] = [error.name, error.statusCode, error.responseBody];
  }
}
console.log(JSON.stringify(found));
