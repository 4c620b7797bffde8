// Keyboard shortcuts, and the dialog that lists them.

import { at, element, isTyping } from "../shared/dom.js";

// shortcuts: [key, words, action(event)]
export function addShortcuts(shortcuts) {
  const all = [...shortcuts, ["?", "List of shortcuts", () => at("help").showModal()]];
  const shown = [["Enter", "Send the message"], ["Shift+Enter", "New line in the message"],
    ["Esc", "Stop, cancel or close"], ["← →", "Select another step of a response"], ...all];
  at("shortcuts").append(...shown.flatMap(([key, words]) =>
    [element("dt", {}, element("kbd", { text: key })), element("dd", { text: words })]));
  at("show-help").onclick = () => at("help").showModal();
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (isTyping() || at("help").open) return;
    const found = all.find(([key]) => key.toLowerCase() === event.key.toLowerCase());
    if (!found) return;
    event.preventDefault();
    found[2](event);
  });
}
