// Functions, forms and reasoning by the clients of JavaScript: `node tools.mjs URL SCRIPTED_URL`.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [random, scripted] = process.argv.slice(2);
const Weather = z.object({ city: z.enum(["Rome", "Paris"]), days: z.number().int().min(1).max(9) });
const Now = z.object({ zone: z.enum(["local", "utc"]) });
const question = { role: "user", content: "What is the weather in Rome?" };
const asked = { temperature: 1, seed: 3 };
const result = "22 degrees";

function tell({ city, days }) {
  assert.deepEqual([city, days], ["Rome", 2]);
  return result;
}

async function openai() {
  const chats = (url) =>
    new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 }).chat.completions;
  const body = { model: "tiny", messages: [question], max_tokens: 1000, ...asked };
  const tools = [
    zodFunction({ name: "weather", parameters: Weather }),
    zodFunction({ name: "now", parameters: Now }),
  ];
  const calls = (choice) => choice.message.tool_calls.map((call) => call.function.arguments);

  const named = { type: "function", function: { name: "weather" } };
  for (const [tool_choice, reason] of [["required", "tool_calls"], [named, "stop"]]) {
    const forced = { ...body, tools, tool_choice, parallel_tool_calls: false };
    const [whole] = (await chats(random).parse(forced)).choices;
    const [call] = whole.message.tool_calls;
    const known = { weather: Weather, now: Now }[call.function.name];
    assert.deepEqual(known.parse(call.function.parsed_arguments), JSON.parse(calls(whole)[0]));
    assert(tool_choice === "required" || call.function.name === "weather");
    const [pieces] = (await chats(random).stream(forced).finalChatCompletion()).choices;
    assert.deepEqual(calls(pieces), calls(whole));
    assert.deepEqual([whole.finish_reason, pieces.finish_reason], [reason, reason]);
  }

  const shaped = { ...body, response_format: zodResponseFormat(Weather, "weather") };
  const [whole] = (await chats(random).parse(shaped)).choices;
  const [pieces] = (await chats(random).stream(shaped).finalChatCompletion()).choices;
  assert.deepEqual(Weather.parse(whole.message.parsed), pieces.message.parsed);

  // The helper calls the function and sends its result back.
  const zod = (parameters) => z.toJSONSchema(parameters);
  const weather = { name: "weather", function: tell, parse: JSON.parse, parameters: zod(Weather) };
  for (const stream of [false, true]) {
    const run = chats(scripted).runTools({ ...body, stream, tools: [{ type: "function", function: weather }] });
    assert.equal(await run.finalContent(), `It is ${result}.`);
    const [, called] = run.messages;
    assert.equal(called.content, "Let me see.");
    if (!stream) assert.equal(called.reasoning_content, "I have to look.");
  }
  let thoughts = "";
  for await (const chunk of await chats(scripted).create({ ...body, tools, stream: true }))
    thoughts += chunk.choices[0]?.delta.reasoning_content ?? "";
  assert.equal(thoughts, "I have to look.");
}

async function sdk() {
  const model = (url) =>
    createOpenAICompatible({
      name: "specserve",
      baseURL: `${url}/v1`,
      supportsStructuredOutputs: true,
      includeUsage: true,
    })("tiny");
  const body = { messages: [question], maxOutputTokens: 1000, maxRetries: 0, ...asked };
  const forcedTools = { weather: tool({ inputSchema: Weather }), now: tool({ inputSchema: Now }) };
  const calls = (each) => each.map(({ toolName, input }) => [toolName, input]);

  for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
    const providerOptions = { specserve: { parallel_tool_calls: false } };
    const forced = { ...body, model: model(random), tools: forcedTools, toolChoice, providerOptions };
    const whole = await generateText(forced);
    const [call] = whole.toolCalls;
    assert(!call.invalid && (toolChoice === "required" || call.toolName === "weather"));
    const stream = streamText(forced);
    await stream.consumeStream();
    assert.deepEqual(calls(await stream.toolCalls), calls(whole.toolCalls));
  }

  const shaped = { ...body, model: model(random), schema: Weather };
  const { object } = await generateObject(shaped);
  Weather.parse(object);
  const objects = streamObject(shaped);
  const seen = [];
  for await (const partial of objects.partialObjectStream) seen.push(partial);
  assert.deepEqual([await objects.object, seen.at(-1)], [object, object]);
  const output = Output.object({ schema: Weather });
  assert.deepEqual((await generateText({ ...body, model: model(random), output })).output, object);

  const tools = { weather: tool({ inputSchema: Weather, execute: tell }) };
  const agent = { ...body, model: model(scripted), tools, stopWhen: stepCountIs(4) };
  const stream = streamText(agent);
  await stream.consumeStream();
  for (const steps of [(await generateText(agent)).steps, await stream.steps]) {
    assert.deepEqual(steps.map((step) => step.text), ["Let me see.", `It is ${result}.`]);
    assert.deepEqual(steps.map((step) => step.reasoningText), ["I have to look.", "It is warm."]);
    assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
    assert.deepEqual(calls(steps[0].toolCalls), [["weather", { city: "Rome", days: 2 }]]);
  }
  const messages = [{ role: "user", content: `${question.content} as JSON` }];
  const both = await generateText({ ...agent, messages, output });
  assert.deepEqual(both.output, { city: "Rome", days: 9 });
}

await openai();
await sdk();
