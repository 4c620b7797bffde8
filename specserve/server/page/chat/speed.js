// The line of speed figures below a response.

import { element, inMs } from "../shared/dom.js";

const TIPS = {
  rate: "Output tokens per second, without the first token.",
  ttft: "TTFT: time from the request to the first token.",
  step: "Tokens per step of the target model. Without drafting, each step makes one token.",
  gain: "Measured time of steps without draft tokens at this context, times the tokens of this "
    + "response, divided by the time of this response. The server measured these steps.",
  tokens: "Tokens of this response.",
};

// figures: from Answer.figures, or null.
export function speedParts(figures) {
  if (!figures) return [];
  const { tokens, ttft, perSecond, perStep, gain } = figures;
  return [
    ["rate", `${perSecond >= 100 ? perSecond.toFixed(0) : perSecond?.toFixed(1)} tokens/s`, perSecond],
    ["ttft", `TTFT ${inMs(ttft)}`, ttft != null],
    ["step", `${perStep?.toFixed(2)} tokens/step`, perStep],
    ["gain", `${gain?.toFixed(2)}× speed-up`, gain],
    ["tokens", `${tokens} ${tokens === 1 ? "token" : "tokens"}`, tokens],
  ].filter(([, , isKnown]) => isKnown).map(([kind, text]) => ({ kind, text, tip: TIPS[kind] }));
}

export function drawSpeed(line, figures) {
  const parts = speedParts(figures);
  // Keep the elements while only their texts change: the pointer may rest on one of them.
  while (line.children.length > parts.length) line.lastChild.remove();
  parts.forEach(({ kind, text, tip }, i) => {
    const part = line.children[i] ?? line.appendChild(element("span"));
    Object.assign(part, { textContent: text, title: tip, className: `figure ${kind}` });
  });
}

const SIGN = " · ";
export const speedWords = (figures) => speedParts(figures).map(({ text }) => text).join(SIGN);

// Show figures that were stored as words.
export const drawSpeedWords = (line, words) => line.replaceChildren(
  ...words.split(SIGN).map((text) => element("span", { className: "figure", text })));
