// Calls an API with Anthropic's TypeScript SDK and prints what it got, as one JSON document: node calls.js BASE_URL
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "sk-ant-any", maxRetries: 0 });
const content = [{ type: "text", text: "tell me a “story” 🦊" }];
const asked = { model: "claude-sonnet-5-5", max_tokens: 100, messages: [{ role: "user", content }] };
const tool = {
  name: "look",
  input_schema: { type: "object", required: ["at"], properties: { at: { type: "string" } } },
};
const bodies = {
  text: {},
  blocks: { system: [{ type: "text", text: "Be brief." }], metadata: { user_id: "u-1" } },
  thinking: { max_tokens: 2000, thinking: { type: "enabled", budget_tokens: 1024 } },
  tools: { tools: [tool] },
};
const wrong = {
  model: { model: "claude-nobody" },
  fault: { messages: [{ role: "user", content: "[[fault: invalid]]" }] },
  overloaded: { messages: [{ role: "user", content: "[[fault: overloaded]]" }] },
};

const told = (error) => ({ class: error.constructor.name, status: error.status, type: error.error?.error });
const found = { create: {}, stream: {}, final: {}, errors: {} };
for (const [name, extra] of Object.entries(bodies)) {
  found.create[name] = await client.messages.create({ ...asked, ...extra });
  const stream = client.messages.stream({ ...asked, ...extra });
  found.stream[name] = [];
  for await (const event of stream) found.stream[name].push(structuredClone(event));
  found.final[name] = await stream.finalMessage();
}
for (const [name, extra] of Object.entries(wrong)) {
  for (const stream of [false, true]) {
    try {
      const got = await client.messages.create({ ...asked, ...extra, stream });
      if (stream) for await (const _ of got);
      found.errors[`${name} ${stream}`] = "none";
    } catch (error) {
      found.errors[`${name} ${stream}`] = told(error);
    }
  }
}
found.tokens = await client.messages.countTokens({ model: asked.model, messages: asked.messages });
found.models = (await client.models.list()).data.map((model) => model.id);
console.log(JSON.stringify(found));
