// A streaming response: its text and the engine steps that made it.

import { ODD, Refusal, events } from "./api.js";

export class Answer {
  constructor() {
    this.begun = performance.now();
    this.chars = []; // code points: `ends` of tokens count them
    this.thought = "";
    this.sources = [];
    this.steps = []; // {at: ms, tokens, ends, sources, tree}
    this.last = null; // the event with timings and metrics
    this.first = null; // ms until the first token
  }

  get text() {
    return this.chars.join("");
  }

  add(event) {
    const [choice] = event.choices;
    if (event.timings) this.last = event;
    if (!choice) return;
    this.chars.push(...(choice.delta.content ?? ""));
    this.thought += choice.delta.reasoning_content ?? "";
    const told = choice.speculation;
    if (!told) return;
    const at = performance.now() - this.begun;
    this.first ??= at;
    this.sources = told.sources;
    for (const step of told.steps) {
      const lists = [step.tokens, step.ends, step.sources, step.tree?.parents, step.tree?.accepted];
      if (!lists.every(Array.isArray)) throw new TypeError("a step without its lists");
      this.steps.push({ at, ...step });
    }
  }

  // The text from a character on, one piece per step: {number, step, begin, end}. A step's text may
  // arrive after its tokens.
  *pieces(from = 0) {
    for (const [number, step] of this.steps.entries()) {
      const end = step.ends.at(-1) ?? 0;
      if (end > this.chars.length) return;
      const begin = number ? (this.steps[number - 1].ends.at(-1) ?? 0) : 0;
      if (end > from && end > begin) yield { number, step, begin, end };
    }
  }

  // Whether `ends` are places in this text. If there is reasoning, they count it, too.
  get isTold() {
    return !this.thought && this.steps.length > 0;
  }

  // plain(context): measured seconds of a step without draft tokens, or undefined.
  figures(plain) {
    const { timings, metrics, usage } = this.last ?? {};
    if (!timings) return {};
    const drafts = metrics.speculative_decoding;
    const perToken = timings.predicted_per_second ? 1000 / timings.predicted_per_second : null;
    const steps = drafts?.mean_acceptance_length;
    const context = (usage?.prompt_tokens ?? timings.prompt_n) + timings.predicted_n / 2;
    const without = 1000 * plain(context) * (timings.predicted_n - 1); // prefill makes the first
    return {
      TTFT: inMs(metrics.time_to_first_token_ms),
      TPOT: inMs(perToken),
      "Tokens/s": timings.predicted_per_second?.toFixed(1),
      "Tokens/step": steps?.toFixed(2),
      "Estimated gain": without && timings.predicted_ms
        ? `${(without / timings.predicted_ms).toFixed(2)} times` : undefined,
      Tokens: timings.predicted_n,
    };
  }
}

// Measured seconds of a step without draft tokens, at 0.5 to 2 times this context.
export const plainSeconds = (measured, context) =>
  measured?.find((step) => Math.abs(Math.log2(step.context / context)) <= 1)?.seconds;

export const inMs = (ms) => (ms == null ? undefined : `${ms.toFixed(ms < 10 ? 2 : 0)} ms`);

// Stream a response; calls onChange(answer) after each event.
export async function answer(body, signal, onChange) {
  const got = new Answer();
  const asked = {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation_details: true,
  };
  for await (const event of events("v1/chat/completions", asked, signal)) {
    try {
      got.add(event);
    } catch {
      throw new Refusal(0, ODD);
    }
    onChange(got);
  }
  return got;
}
