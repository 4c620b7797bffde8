// A response's text, colored by drafter, and the draft tokens of a step as a tree.

import { textOf } from "./api.js";

export function element(tag, { text, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const NAMED = ["ngram", "model", "grammar", "prediction"], NUM_SPARE = 4, NEAR = 120; // px
const named = (bits, sources) => sources.filter((_, i) => bits & (1 << i));

// The color of a draft source: depends only on its name.
export function colorOf(name) {
  const place = NAMED.indexOf(name);
  if (place >= 0) return `source-${place}`;
  let hash = 0;
  for (const char of name) hash = (31 * hash + char.codePointAt(0)) % 65521; // Adler-32's prime
  return `source-${NAMED.length + hash % NUM_SPARE}`;
}

// Shows a response's growing text in an element.
export class TextView {
  constructor(box, onChoose, floor = null) {
    Object.assign(this, { box, onChoose, floor, shown: 0, isAsked: false, answer: null });
    box.addEventListener("click", (e) => this.choose(e.target.closest(".step"), true));
    box.addEventListener("focusin", (e) => this.choose(e.target.closest(".step")));
    box.addEventListener("keydown", (e) => this.move(e));
  }

  // Draw at most once per frame.
  update(answer) {
    this.answer = answer;
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      this.draw();
    });
  }

  // Draw, and keep the end of the text visible above `floor` unless the user scrolled away.
  draw() {
    const hidden = () =>
      this.box.getBoundingClientRect().bottom - innerHeight + (this.floor?.offsetHeight ?? 0);
    const isFollowed = this.floor && hidden() < NEAR;
    this.add();
    if (isFollowed && hidden() > 0) scrollBy(0, hidden());
  }

  add() {
    const { answer, box } = this;
    if (!answer.isTold) {
      box.replaceChildren(
        ...(answer.thought ? [element("div", { className: "thought", text: answer.thought })] : []),
        answer.text,
      );
      return;
    }
    const added = document.createDocumentFragment();
    for (const piece of answer.pieces(this.shown)) {
      added.append(this.step(piece));
      this.shown = piece.end;
    }
    box.append(added);
  }

  // Draw the rest of the text, which a stop string may have cut within a step.
  end() {
    this.draw();
    if (this.answer.isTold) this.box.append(this.answer.chars.slice(this.shown).join(""));
  }

  step({ number, step, begin, end }) {
    const { answer, box } = this;
    const made = element("span", { className: "step", tabIndex: box.firstChild ? -1 : 0 });
    made.dataset.step = number;
    let from = begin;
    for (const [i, to] of step.ends.entries()) {
      if (to <= from) continue; // a later token has its characters
      const text = answer.chars.slice(from, Math.min(to, end)).join("");
      const bits = step.sources[i];
      const names = named(bits, answer.sources);
      const className = names.length ? `draft ${colorOf(names[0])}${names.length > 1 ? " several" : ""}` : "";
      const title = names.length ? `drafted by ${names.join(" and ")}` : "from the target model";
      made.append(element("span", { className, title, text }));
      from = to;
    }
    return made;
  }

  // isOpened: by a click or Enter, not by moving the focus.
  choose(step, isOpened = false) {
    if (!step) return;
    for (const other of document.querySelectorAll(".step.chosen")) other.classList.remove("chosen");
    for (const other of this.box.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    step.classList.add("chosen");
    step.tabIndex = 0;
    this.onChoose(this.answer, Number(step.dataset.step), isOpened ? step : null);
  }

  move(event) {
    const here = event.target.closest(".step");
    if (event.key === "Enter") this.choose(here, true);
    const to = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = here && to && here[to];
    if (!next?.classList.contains("step")) return;
    event.preventDefault();
    next.focus();
  }
}

export function drawLegend(list, sources) {
  const labels = sources.map((name) =>
    element("li", {}, element("span", { className: colorOf(name), text: name })));
  list.replaceChildren(
    ...labels,
    ...(sources.length > 1
      ? [element("li", {}, element("span", { className: "several", text: "several" }))] : []),
    element("li", { text: "no color: target model" }),
  );
}

export function drawFigures(list, figures) {
  const told = Object.entries(figures).filter(([, value]) => value !== undefined);
  list.replaceChildren(
    ...told.flatMap(([name, value]) => [
      element("dt", { text: name }), element("dd", { text: value }),
    ]),
  );
}

const SVG = "http://www.w3.org/2000/svg";
const ROW = 26, CHAR = 7.3, GAP = 26, MOST = 18; // px, px, px, characters

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const counted = ({ length }, one, several) => `${length} ${length === 1 ? one : several}`;

const visible = (text) => {
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return shown.length > MOST ? `${shown.slice(0, MOST - 1)}…` : shown || "∅";
};

// The places of a tree's nodes: one column per depth, one row per leaf, the accepted path on top.
export function layout({ parents, accepted }) {
  const children = Array.from({ length: parents.length + 1 }, () => []);
  parents.forEach((parent, i) => children[parent].push(i + 1));
  for (const each of children) each.sort((a, b) => accepted.includes(b) - accepted.includes(a));
  const places = [];
  let rows = 0;
  const place = (node, depth) => {
    const row = rows;
    places[node] = { depth, row };
    children[node].forEach((child, i) => {
      if (i) rows += 1;
      place(child, depth + 1);
    });
  };
  place(0, 0);
  return { places, rows: rows + 1 };
}

// A step's tree as a drawing and as text.
export async function drawTree(answer, number) {
  const { tree, tokens } = answer.steps[number];
  const { places, rows } = layout(tree);
  const texts = ["", ...(await Promise.all(tree.tokens.map(textOf)))].map(visible);
  texts[0] = "●";
  const widths = [];
  places.forEach(({ depth }, node) => {
    widths[depth] = Math.max(widths[depth] ?? 0, texts[node].length * CHAR + 10);
  });
  const lefts = widths.map((_, d) => widths.slice(0, d).reduce((sum, w) => sum + w + GAP, 0));
  const width = lefts.at(-1) + widths.at(-1) + 2;
  const drawing = shape("svg", { width, height: rows * ROW + 2, role: "img" });
  const right = new Set([0, ...tree.accepted]);
  const middle = (node) => places[node].row * ROW + ROW / 2 + 1;
  tree.parents.forEach((parent, i) => {
    const from = lefts[places[parent].depth] + texts[parent].length * CHAR + 10;
    const to = lefts[places[i + 1].depth];
    const bend = (to - GAP / 2).toFixed(1);
    drawing.append(shape("path", {
      class: right.has(i + 1) ? "right" : "",
      d: `M${from} ${middle(parent)}H${bend}V${middle(i + 1)}H${to}`,
    }));
  });
  texts.forEach((text, node) => {
    const x = lefts[places[node].depth] + 1, y = middle(node);
    const isRight = right.has(node), names = node ? named(tree.sources[node - 1], answer.sources) : [];
    drawing.append(
      shape("rect", {
        class: `node ${names.length && isRight ? colorOf(names[0]) : ""} ${isRight ? "right" : ""}`,
        x, y: y - 10, width: text.length * CHAR + 8, height: 20, rx: 4,
      }),
      shape("text", { x: x + 4, y: y + 4, class: isRight ? "right-text" : "wrong-text" }, text),
    );
    if (node) {
      const title = `${names.join(" and ")}: ${isRight ? "accepted" : "rejected"}`;
      drawing.lastChild.append(shape("title", {}, title));
    }
  });
  const words = `Step ${number + 1}: ${counted(tree.tokens, "draft token", "draft tokens")}, `
    + `${tree.accepted.length} accepted, ${counted(tokens, "new token", "new tokens")}.`;
  drawing.setAttribute("aria-label", words);
  return { drawing, words };
}
