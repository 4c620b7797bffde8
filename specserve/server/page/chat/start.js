// The start screen: what specserve does, the model, sample prompts and advice.

import { at, copy, element, icon, iconButton } from "../shared/dom.js";
import { swatch } from "../shared/drafters.js";
import { memoryFacts, speedAdvice } from "../shared/facts.js";

const GENERAL = [
  ["Explain an idea", "Explain how a hash map works, in five short points."],
  ["Write code", "Write a Python function that merges two sorted lists, with a docstring."],
  ["Compare", "Compare TCP and UDP in a table with four rows."],
  ["Rewrite", "Rewrite this sentence in a friendly tone: The deadline is Friday, no exceptions."],
];
const DEMO = [ // from the training topics of the demo models
  ["Explain a function", "What does re.sub do?"],
  ["Look up the standard library", "What does urllib.parse.unquote do?"],
  ["Show a signature", "Show the signature of shutil.copytree."],
  ["Understand a call", "What does subprocess.check_call do?"],
];

export const samplesOf = (card) => (card?.demo ? DEMO : GENERAL);

// send(text) asks in the chat; race(text) opens the race.
export function drawStart(card, { send, race }) {
  at("start-name").textContent = card.id;
  at("start-memory").replaceChildren(...memoryFacts(card).map((text) => element("li", { text })));
  const sources = card.sources ?? [];
  at("start-drafters").replaceChildren(...(sources.length
    ? [element("span", { className: "quiet", text: "Drafters" }), ...sources.map(swatch)]
    : ["Drafting is off."]));
  const cards = samplesOf(card).map(([title, text]) =>
    element("button", { className: "sample", type: "button", onclick: () => send(text) },
      element("strong", { text: title }), element("span", { text })));
  at("samples").replaceChildren(...cards);
  const first = samplesOf(card)[0][1];
  at("start-race").replaceChildren(element("button", { className: "wide", type: "button",
    disabled: !sources.length, onclick: () => race(first) }, icon("race"),
  element("span", {}, element("strong", { text: "Race" }),
    " the same prompt with drafting off and on")));
  drawAdvice(speedAdvice(card));
}

function drawAdvice(advice) {
  at("advice").hidden = !advice;
  if (!advice) return;
  const { text, command } = advice;
  const parts = [element("strong", { text: "Faster: " }), ...marked(text)];
  if (command) {
    const button = iconButton("copy", "Copy command", () => copy(command, button));
    const code = element("code", { text: command });
    parts.push(element("span", { className: "command" }, code, button));
  }
  at("advice").replaceChildren(...parts);
}

// A text whose parts in backticks are code.
const marked = (text) => text.split("`").map((part, i) =>
  (i % 2 ? element("code", { text: part }) : part));
