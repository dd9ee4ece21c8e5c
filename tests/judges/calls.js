// node calls.js URL < calls.json: makes calls with Anthropic's TypeScript SDK, and prints what it got. calls.py does the
// same in Python.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const AT_ONCE = 8;

function failed(error) {
  const found = { class: error.constructor.name };
  if (error.status === undefined && !error.error) return found;
  const told = error.error?.error ?? error.error;
  return { ...found, status: error.status ?? null, error: told, "retry-after": error.headers?.get("retry-after") ?? null };
}

async function made(call) {
  const client = new Anthropic({ baseURL: process.argv[2], apiKey: "sk-ant-any", maxRetries: call.retries });
  const { body, headers, timeout_s } = JSON.parse(JSON.stringify(call).replaceAll("CLIENT", "typescript"));
  const options = { timeout: 1000 * timeout_s, headers };
  const found = [];
  try {
    for (let n = 0; n < call.times; n++) {
      if (call.how === "create") found.push(await client.messages.create(body, options));
      if (call.how === "events") for await (const event of await client.messages.create({ ...body, stream: true }, options)) found.push(structuredClone(event));
      if (call.how === "final") found.push(await client.messages.stream(body, options).finalMessage());
      if (call.how === "count") found.push(await client.messages.countTokens(body, options));
      if (call.how === "models") for await (const model of client.models.list({}, options)) found.push(model);
      if (call.how === "model") found.push(await client.models.retrieve(body.model_id, {}, options));
    }
  } catch (error) {
    found.push(failed(error));
  }
  return found;
}

const calls = JSON.parse(readFileSync(0));
const found = {};
const left = [...calls];
await Promise.all(
  Array.from({ length: AT_ONCE }, async () => {
    for (let call = left.shift(); call; call = left.shift()) found[call.name] = await made(call);
  }),
);
console.log(JSON.stringify({ typescript: found }));
