// What the clients of JavaScript make of a stream that an error ends: `node broken.mjs BASE_URL`.
// Prints a line for each stream that has begun, then one JSON object: what each client raised.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";

const url = `${process.argv[2]}/v1`;
const asked = { messages: [{ role: "user", content: "the cat" }], seed: 50 };

async function openai() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", stream: true, max_tokens: 400, ...asked };
  let begun = false;
  try {
    for await (const chunk of await client.chat.completions.create(body)) {
      if (!begun) console.log("begun");
      begun = true;
    }
  } catch (error) {
    return error.message;
  }
}

async function responses() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", input: asked.messages, seed: asked.seed, stream: true };
  let begun = false;
  try {
    for await (const event of await client.responses.create(body)) {
      if (!begun && event.type === "response.output_text.delta") {
        console.log("begun");
        begun = true;
      }
    }
  } catch (error) {
    return error.message;
  }
}

async function sdk() {
  const provider = createOpenAICompatible({ name: "specserve", baseURL: url });
  let begun = false;
  let seen;
  const onError = ({ error }) => (seen = error);
  const stream = streamText({
    model: provider("tiny"), maxOutputTokens: 400, maxRetries: 0, onError, ...asked,
  });
  for await (const piece of stream.textStream) {
    if (!begun) console.log("begun");
    begun = true;
  }
  return seen?.message ?? (seen === undefined ? undefined : JSON.stringify(seen));
}

const told = await Promise.all([openai(), responses(), sdk()]);
const [first, second, third] = told.map((each) => each ?? null);
console.log(JSON.stringify({ openai: first, responses: second, sdk: third }));
