// The draft tokens of a step as a tree, in a panel. On narrow screens the panel covers the text.

import { textOf } from "../shared/api.js";
import { at, element, shape } from "../shared/dom.js";
import { colorOf, describe, namesOf, swatch } from "../shared/drafters.js";

const ROW = 30, CHAR = 7.3, GAP = 14, MOST = 18; // px, px, px, characters
const NO_STEP = "Select a token of a response to see the draft tokens of its step.";
const narrow = matchMedia("(max-width: 1099px)");

const counted = ({ length }, one, several) => `${length} ${length === 1 ? one : several}`;

const visible = (text) => {
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return shown.length > MOST ? `${shown.slice(0, MOST - 1)}…` : shown || "∅";
};

// The places of a tree's nodes: one row per depth, one column per leaf, the accepted path on the left.
export function layout({ parents, accepted }) {
  const children = Array.from({ length: parents.length + 1 }, () => []);
  parents.forEach((parent, i) => children[parent].push(i + 1));
  for (const each of children) each.sort((a, b) => accepted.includes(b) - accepted.includes(a));
  const places = [];
  let columns = 0;
  const place = (node, depth) => {
    places[node] = { depth, column: columns };
    children[node].forEach((child, i) => {
      if (i) columns += 1;
      place(child, depth + 1);
    });
  };
  place(0, 0);
  return places;
}

// A step's tree as a drawing and as text.
async function drawTree(answer, number) {
  const { tree, tokens } = answer.steps[number];
  const places = layout(tree);
  const texts = ["", ...(await Promise.all(tree.tokens.map(textOf)))].map(visible);
  texts[0] = "●";
  const widthOf = (node) => texts[node].length * CHAR + 12;
  const widths = [];
  places.forEach(({ column }, node) => {
    widths[column] = Math.max(widths[column] ?? 0, widthOf(node));
  });
  const lefts = widths.map((_, i) => widths.slice(0, i).reduce((sum, w) => sum + w + GAP, 1));
  const height = ROW * Math.max(...places.map(({ depth }) => depth)) + 26;
  const drawing = shape("svg", { width: lefts.at(-1) + widths.at(-1) + 2, height, role: "img",
    class: "tree" });
  const accepted = new Set([0, ...tree.accepted]);
  const left = (node) => lefts[places[node].column], top = (node) => places[node].depth * ROW + 1;
  tree.parents.forEach((parent, i) => {
    const node = i + 1, from = left(parent) + 10, to = left(node) + 10;
    const bend = top(node) - 6, below = top(parent) + 23;
    drawing.append(shape("path", { class: accepted.has(node) ? "accepted" : "",
      d: `M${from} ${below}V${bend}H${to}V${top(node)}` }));
  });
  texts.forEach((text, node) => {
    const isAccepted = accepted.has(node);
    const names = node ? namesOf(tree.sources[node - 1], answer.sources) : [];
    const color = names.length && isAccepted ? colorOf(names[0]) : "";
    const label = shape("text", { x: left(node) + 6, y: top(node) + 15,
      class: isAccepted ? "accepted-text" : "rejected-text" }, text);
    drawing.append(shape("rect", { class: `node ${color} ${isAccepted ? "accepted" : ""}`,
      x: left(node), y: top(node), width: widthOf(node), height: 22, rx: 5 }), label);
    label.append(shape("title", {}, node
      ? `${names.join(" and ")}: ${isAccepted ? "accepted" : "rejected"}`
      : "the last token before this step"));
  });
  const drafts = tree.tokens.length
    ? `${counted(tree.tokens, "draft token", "draft tokens")}, ${tree.accepted.length} accepted`
    : "no draft tokens";
  const words = `Step ${number + 1}: ${drafts}, ${counted(tokens, "new token", "new tokens")}.`;
  drawing.setAttribute("aria-label", words);
  return { drawing, words };
}

let shownNumber = 0; // of drawings; a later one replaces an earlier one
let opener = null; // the token that gets the focus back from the panel over the text

// Draw the tree of a step. from: the token that opened the panel; null if the focus stays there.
export async function showStep(answer, number, from) {
  const mine = ++shownNumber;
  let shown;
  try {
    shown = await drawTree(answer, number);
  } catch (error) {
    shown = { words: error.message };
  }
  if (mine !== shownNumber) return; // another step was chosen
  at("tree-words").textContent = shown.words;
  at("tree").replaceChildren(...(shown.drawing ? [shown.drawing] : []));
  if (from && narrow.matches) openSheet(from);
}

export function clearStep() {
  closeSheet();
  shownNumber += 1;
  at("tree-words").textContent = NO_STEP;
  at("tree").replaceChildren();
}

function openSheet(from) {
  opener = from;
  at("drafting").hidden = false;
  at("drafting").classList.add("sheet");
  at("tree").focus();
  opener.scrollIntoView({ block: "nearest" });
}

export function closeSheet() {
  if (!opener) return;
  const hadFocus = at("drafting").contains(document.activeElement);
  const to = opener;
  opener = null;
  at("drafting").classList.remove("sheet");
  if (hadFocus) to.focus();
}

export function drawLegend(sources) {
  const item = (mark, text) => element("li", {}, mark, element("span", { className: "quiet", text }));
  const several = element("span", { className: "swatch several", text: "several" });
  at("legend").replaceChildren(
    ...sources.map((name) => item(swatch(name), describe(name))),
    ...(sources.length > 1 ? [item(several, "several drafters proposed it")] : []),
    item(element("span", { className: "swatch", text: "no color" }), "the target model only"),
  );
}

at("close-step").onclick = closeSheet;
at("drafting").onkeydown = (event) => {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  closeSheet();
};
