// Asks a server through the clients that JavaScript has: `node clients.mjs BASE_URL`.
// Prints one JSON object: for each client the answer whole, the same streamed, and a refusal.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = `${process.argv[2]}/v1`;
const messages = [{ role: "user", content: "the cat sat on the mat" }];
const asked = { temperature: 0.8, seed: 3 };
const limit = 40;

function numbers(usage) {
  return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens];
}

function refusal(error) {
  const status = error.status ?? error.statusCode;
  return { name: error.constructor.name, status, message: error.message };
}

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return refusal(error);
  }
}

async function streamError(body) {
  let seen;
  const stream = streamText({ ...body, onError: ({ error }) => (seen = error) });
  await stream.consumeStream();
  return refusal(seen);
}

async function openai() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", messages, max_tokens: limit, ...asked };
  const completions = client.chat.completions;

  const answer = await completions.create(body);
  const [choice] = answer.choices;
  const whole = {
    text: choice.message.content,
    reason: choice.finish_reason,
    usage: numbers(answer.usage),
  };

  const streamed = { text: "" };
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await completions.create({ ...body, ...options })) {
    const [piece] = chunk.choices;
    streamed.text += piece?.delta.content ?? "";
    streamed.reason = piece?.finish_reason ?? streamed.reason;
    streamed.usage = chunk.usage ? numbers(chunk.usage) : streamed.usage;
  }

  return {
    whole,
    streamed,
    wrong: await refused(() => completions.create({ ...body, temperature: -1 })),
    nobody: await refused(() => completions.create({ ...body, model: "nobody", stream: true })),
  };
}

// The newer route, by the same client.
async function responses() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", input: messages, max_output_tokens: limit, ...asked };
  const read = (response) => ({
    text: response.output_text,
    reason: response.incomplete_details?.reason ?? response.status,
    usage: numbers({
      prompt_tokens: response.usage.input_tokens,
      completion_tokens: response.usage.output_tokens,
      total_tokens: response.usage.total_tokens,
    }),
  });

  const whole = read(await client.responses.create(body));
  let text = "";
  let last;
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  const weather = {
    type: "function",
    name: "weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { enum: ["Rome", "Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  };
  const calling = { ...body, tools: [weather], tool_choice: "required", max_output_tokens: 200 };
  const [called] = (await client.responses.create(calling)).output;
  const pieces = [];
  for await (const event of await client.responses.create({ ...calling, stream: true })) {
    if (event.type === "response.function_call_arguments.delta") pieces.push(event.delta);
  }
  const helped = await client.responses.stream(body).finalResponse();
  return {
    whole,
    streamed: { ...read(last.response), text },
    helped: { ...read(helped), text: helped.output_text },
    called: { name: called.name, arguments: called.arguments, streamed: pieces.join("") },
    wrong: await refused(() => client.responses.create({ ...body, temperature: -1 })),
    nobody: await refused(() => client.responses.create({ ...body, model: "nobody" })),
  };
}

async function sdk() {
  const provider = createOpenAICompatible({ name: "specserve", baseURL: url, includeUsage: true });
  const model = provider("tiny");
  const body = { model, messages, maxOutputTokens: limit, maxRetries: 0, ...asked };
  const read = (usage) => [usage.inputTokens, usage.outputTokens, usage.totalTokens];

  const answer = await generateText(body);
  const whole = { text: answer.text, reason: answer.finishReason, usage: read(answer.usage) };

  const stream = streamText(body);
  const streamed = { text: "" };
  for await (const piece of stream.textStream) streamed.text += piece;
  streamed.reason = await stream.finishReason;
  streamed.usage = read(await stream.usage);

  return {
    whole,
    streamed,
    wrong: await refused(() => generateText({ ...body, temperature: -1 })),
    nobody: await streamError({ ...body, model: provider("nobody") }),
  };
}

// This provider asks the newer route, which has no seed there.
async function sdkResponses() {
  const model = createOpenAI({ baseURL: url, apiKey: "none" })("tiny");
  const body = { model, messages, maxOutputTokens: limit, maxRetries: 0, temperature: 0 };
  const read = (usage) => [usage.inputTokens, usage.outputTokens, usage.totalTokens];

  const answer = await generateText(body);
  const whole = { text: answer.text, reason: answer.finishReason, usage: read(answer.usage) };

  const stream = streamText(body);
  const streamed = { text: "" };
  for await (const piece of stream.textStream) streamed.text += piece;
  streamed.reason = await stream.finishReason;
  streamed.usage = read(await stream.usage);

  return {
    whole,
    streamed,
    wrong: await refused(() => generateText({ ...body, temperature: -1 })),
    nobody: await refused(() =>
      generateText({ ...body, model: createOpenAI({ baseURL: url, apiKey: "none" })("nobody") }),
    ),
  };
}

// Anthropic's client, whole and streamed.
async function anthropic() {
  const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", messages, max_tokens: limit, ...asked };
  const read = (message) => ({
    text: message.content.map((block) => block.text).join(""),
    reason: message.stop_reason,
    tokens: message.usage.output_tokens,
  });
  const weather = {
    name: "weather",
    input_schema: {
      type: "object",
      properties: { city: { enum: ["Rome", "Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  };
  const calling = { ...body, tools: [weather], tool_choice: { type: "any" }, max_tokens: 200 };
  const [called] = (await client.messages.create(calling)).content;
  const [streamedCall] = (await client.messages.stream(calling).finalMessage()).content;
  return {
    whole: read(await client.messages.create(body)),
    streamed: read(await client.messages.stream(body).finalMessage()),
    calls: [called, streamedCall].map((call) => [call.name, call.input]),
    wrong: await refused(() => client.messages.create({ ...body, temperature: -1 })),
    nobody: await refused(() => client.messages.create({ ...body, model: "nobody" })),
  };
}

const told = {
  anthropic: await anthropic(),
  openai: await openai(),
  responses: await responses(),
  sdk: await sdk(),
  sdkResponses: await sdkResponses(),
};
console.log(JSON.stringify(told));
