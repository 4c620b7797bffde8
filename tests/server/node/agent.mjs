// The AI SDK's agent calls a tool of a model whose template shows none: `node agent.mjs URL`.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, ToolLoopAgent, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "own", baseURL: `${process.argv[2]}/v1` });
const weather = tool({
  description: "Tells the weather.",
  inputSchema: z.object({ city: z.string(), days: z.number().int() }),
  execute: ({ city, days }) => {
    assert.deepEqual([city, days], ["Rome", 2]);
    return "22 degrees";
  },
});
const prompt = "What is the weather in Rome?";
const asked = { model: provider("tiny"), tools: { weather }, stopWhen: stepCountIs(4), maxRetries: 0 };
const agent = new ToolLoopAgent({ ...asked, instructions: "You know the weather." });
const streams = [streamText({ ...asked, prompt }), await agent.stream({ prompt })];
for (const stream of streams) await stream.consumeStream();
const all = [
  (await generateText({ ...asked, prompt })).steps,
  (await agent.generate({ prompt })).steps,
  ...(await Promise.all(streams.map((stream) => stream.steps))),
];
for (const steps of all) {
  assert.deepEqual(steps.map((step) => step.text.trim()), ["Let me see.", "It is 22 degrees."]);
  assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ city: "Rome", days: 2 }]);
}
