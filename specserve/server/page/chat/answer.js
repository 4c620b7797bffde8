// A streaming response: its text and the engine steps that made it.

import { ODD, Refusal, events } from "../shared/api.js";

export class Answer {
  constructor() {
    this.begun = performance.now();
    this.text = "";
    this.length = 0; // code points of the text
    this.wide = []; // places, in code points, of characters with two UTF-16 units
    this.thought = "";
    this.sources = [];
    this.steps = []; // {at: ms, tokens, ends, sources, tree}
    this.tokens = []; // {end: code points, step, bits}
    this.last = null; // the event with timings and metrics
    this.first = null; // ms until the first token
  }

  add(event) {
    const [choice] = event.choices;
    if (event.timings) this.last = event;
    if (!choice) return;
    this.append(choice.delta.content ?? "");
    this.thought += choice.delta.reasoning_content ?? "";
    const details = choice.speculation;
    if (!details) return;
    const at = performance.now() - this.begun;
    this.first ??= at;
    this.sources = details.sources;
    for (const step of details.steps) {
      const lists = [step.tokens, step.ends, step.sources, step.tree?.parents, step.tree?.accepted];
      if (!lists.every(Array.isArray)) throw new TypeError("a step without its lists");
      const number = this.steps.push({ at, ...step }) - 1;
      step.ends.forEach((end, i) => this.tokens.push({ end, step: number, bits: step.sources[i] }));
    }
  }

  append(text) {
    this.text += text;
    for (const char of text) {
      if (char.length > 1) this.wide.push(this.length);
      this.length += 1;
    }
  }

  // The place in the text, in UTF-16 units, of a place in code points.
  unit(place) {
    let low = 0, high = this.wide.length; // the number of wide characters before the place
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.wide[middle] < place) low = middle + 1;
      else high = middle;
    }
    return place + low;
  }

  // The tokens of a range of the text: {from, to, step, bits}.
  *pieces(from, to) {
    let low = 0, high = this.tokens.length; // the first token that ends behind `from`
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.unit(this.tokens[middle].end) <= from) low = middle + 1;
      else high = middle;
    }
    for (; from < to && low < this.tokens.length; low += 1) {
      const { end, step, bits } = this.tokens[low], until = Math.min(to, this.unit(end));
      if (until <= from) continue; // a later token has its characters
      yield { from, to: until, step, bits };
      from = until;
    }
    if (from < to) yield { from, to, step: null, bits: 0 };
  }

  // Whether tokens have places in this text. If there is reasoning, they count it, too.
  get hasPlaces() {
    return !this.thought && this.steps.length > 0;
  }

  // Speed figures. plain(context): measured seconds of a step without draft tokens, or undefined.
  figures(plain, now = performance.now()) {
    const { timings, metrics, usage } = this.last ?? {};
    const number = timings?.predicted_n ?? this.tokens.length;
    if (!number || this.first === null) return null;
    const ms = timings ? timings.predicted_ms : now - this.begun - this.first;
    const steps = this.steps.filter((step) => step.tokens.length).length;
    const drafts = metrics?.speculative_decoding;
    const context = (usage?.prompt_tokens ?? timings?.prompt_n ?? 0) + number / 2;
    const without = 1000 * plain(context || number) * (number - 1); // prefill makes the first
    return {
      tokens: number,
      ttft: metrics?.time_to_first_token_ms ?? this.first,
      perSecond: timings?.predicted_per_second ?? (number > 1 && ms ? 1000 * (number - 1) / ms : null),
      perStep: drafts?.mean_acceptance_length ?? (steps > 1 ? (number - 1) / (steps - 1) : null),
      gain: without && ms ? without / ms : null,
    };
  }
}

// Measured seconds of a step without draft tokens, at 0.5 to 2 times this context.
export const plainSeconds = (measured, context) =>
  measured?.find((step) => Math.abs(Math.log2(step.context / context)) <= 1)?.seconds;

// Stream a response; calls onChange(answer) after each event.
export async function answer(body, signal, onChange) {
  const got = new Answer();
  const request = {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation_details: true,
  };
  for await (const event of events("v1/chat/completions", request, signal)) {
    try {
      got.add(event);
    } catch {
      throw new Refusal(0, ODD);
    }
    onChange(got);
  }
  return got;
}
