// Words about the served model.

import { count } from "./dom.js";

const paddedWords = ({ source, like }) => `${source}, padded to ${like} compute`;

// A note about padded demo models; "" for other models.
export const scaledWords = (card) => card.scaled?.length
  ? `Demo: ${card.scaled.map(paddedWords).join("; ")}. Small models make the text at that speed.`
  : "";

export function bytesWords(bytes) {
  const units = ["bytes", "KB", "MB", "GB", "TB"];
  const power = bytes ? Math.min(4, Math.floor(Math.log10(bytes) / 3)) : 0;
  const size = bytes / 1000 ** power;
  return `${power && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[power]}`;
}

// The memory and the context length of a model, as a list.
export function memoryFacts(card) {
  const parts = [];
  if (card.weights?.num_bytes) parts.push(`${bytesWords(card.weights.num_bytes)} of weights`);
  if (card.draft_weights?.num_bytes) {
    parts.push(`${bytesWords(card.draft_weights.num_bytes)} for the draft model`);
  }
  if (card.kv_dtype) parts.push(`KV cache in ${card.kv_dtype}`);
  if (card.max_model_len) parts.push(`context of ${count(card.max_model_len)} tokens`);
  return parts;
}

// Advice for faster responses: {text, command}; null if a draft model or head is in use.
export function speedAdvice(card) {
  const sources = card.sources ?? [];
  if (card.row_invariant === false) {
    return { text: "Results of this model depend on the batch, so drafting is off." };
  }
  if (card.demo && !card.scaled) {
    return { text: "The demo model is so small that drafting saves little. Pad it to the compute of "
      + "a 0.6B model, with the same text:", command: "specserve serve --demo-compute qwen3-0.6b" };
  }
  if (!sources.length) {
    return { text: "Drafting is off on this server. N-grams need no memory.",
      command: "specserve serve MODEL --drafter auto" };
  }
  if (card.draft_weights || card.draft_head || sources.includes("eagle")) return null;
  return {
    text: "This server has only n-grams for free text. A draft model, or a draft head with "
      + "`--draft-head`, makes more texts faster. If you know most of the response, send it as "
      + "`prediction`.",
    command: "specserve serve MODEL --draft-model SMALL_MODEL",
  };
}
