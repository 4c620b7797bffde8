// The messages of a conversation as elements, with their actions.

import { copy, element, iconButton } from "../shared/dom.js";
import { drawSpeedWords } from "./speed.js";
import { showText } from "./text_view.js";

const PARTIAL = "This response is incomplete.";

// actions: {edit(number), again(number)}. Return the elements that a response fills.
export function messageBox(message, number, actions) {
  const isUser = message.role === "user";
  const text = element("div", { className: "text" });
  const copying = iconButton("copy", "Copy", () => copy(message.content, copying));
  const own = isUser
    ? [iconButton("edit", "Edit", () => actions.edit(number))]
    : [iconButton("again", "Regenerate", () => actions.again(number))];
  const thought = element("details", { className: "thought", hidden: true },
    element("summary", { text: "Reasoning" }), element("div", { className: "thought-text" }));
  const speed = element("p", { className: "speed" });
  const note = element("p", { className: "note quiet" });
  const head = element("header", {}, element("span", { text: isUser ? "You" : "Model" }));
  const tools = element("div", { className: "actions", role: "group",
    "aria-label": `Actions of message ${number + 1}` }, copying, ...own);
  const parts = isUser ? [text, tools] : [thought, text, note, element("footer", {}, speed, tools)];
  const box = element("article", { className: `message ${message.role}` }, head, ...parts);
  const made = { box, text, thought, speed, note };
  if (isUser) Object.assign(text, { textContent: message.content, dir: "auto" });
  else showStored(made, message);
  return made;
}

// Show a stored response, without drafting data.
function showStored(made, message) {
  showText(made.text, message.content);
  showThought(made, message.thought ?? "");
  drawSpeedWords(made.speed, message.speed ?? "");
  made.note.textContent = message.isPartial ? PARTIAL : "";
}

export function showThought({ thought }, text) {
  if (!text) return;
  thought.hidden = false;
  thought.querySelector(".thought-text").textContent = text;
}
