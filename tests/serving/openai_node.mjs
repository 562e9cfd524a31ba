// What openai-node makes of a server: `node openai_node.mjs URL`, with the package beside this file or in NODE_PATH.
// Prints one object of JSON.
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.env.PACKAGES}/`)("openai");
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello 😀\u2028 wörld" }];
const model = "scripted";

const pieces = [];
const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
let usage = null;
for await (const chunk of stream) {
  pieces.push(chunk.choices[0]?.delta.content ?? "");
  usage = chunk.usage ?? usage;
}

const helper = client.chat.completions.stream({ model, messages });
const deltas = [];
helper.on("content", (delta) => deltas.push(delta));
const final = await helper.finalChatCompletion();

const whole = await client.chat.completions.create({ model, messages, logprobs: true });

let refused = null;
try {
  await client.chat.completions.create({ model, messages, temperature: 3 });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, param: error.param };
}

const left = await client.chat.completions.create({ model, messages, stream: true });
for await (const _ of left) break; // closes the connection

console.log(
  JSON.stringify({
    streamed: pieces.join(""),
    usage,
    helper: deltas.join(""),
    final: final.choices[0],
    whole: whole.choices[0],
    refused,
    models: (await client.models.list()).data.map((each) => each.id),
  }),
);
