// Names, colors and descriptions of draft sources.

import { element } from "./dom.js";

const NAMED = ["ngram", "model", "grammar", "prediction"], NUM_SPARE = 2;
const WORDS = {
  ngram: "repeats of earlier text",
  model: "a smaller draft model",
  grammar: "required by the response format",
  prediction: "expected by the request",
  eagle: "a draft head on the target model",
  recycle: "alternatives of earlier steps",
  suffix: "repeats of earlier responses",
};

export const describe = (name) => WORDS[name] ?? "a drafter of this server";

// The class of a draft source's color and line. It depends only on the name.
export function colorOf(name) {
  const place = NAMED.indexOf(name);
  if (place >= 0) return `source-${place}`;
  let hash = 0;
  for (const char of name) hash = (31 * hash + char.codePointAt(0)) % 65521; // Adler-32's prime
  return `source-${NAMED.length + hash % NUM_SPARE}`;
}

// The names of the sources whose bits are set.
export const namesOf = (bits, sources) => sources.filter((_, i) => bits & (1 << i));

export const swatch = (name) =>
  element("span", { className: `swatch ${colorOf(name)}`, text: name, title: describe(name) });
