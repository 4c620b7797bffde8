// The text of a response as Markdown, and its tokens in the colors of their drafters.

import { colorOf, namesOf } from "../shared/drafters.js";
import { at, element } from "../shared/dom.js";
import { blocksOf, build, linesOf } from "./markdown.js";

const NEAR = 40, SHARE = 0.3; // px from the end; maximum share of time for drawing

// Show a text without drafting data.
export function showText(box, text) {
  const plain = (from, to) => [text.slice(from, to)];
  box.replaceChildren(...blocksOf(linesOf(text)).map((block) => build(block, plain)));
}

// Change an element to a new version of it. Equal parts stay in the page, so that a click, a
// selection or the focus survives. Return false if the element itself differs.
function updated(old, made) {
  if (old.nodeType !== made.nodeType) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (made.data.startsWith(old.data)) old.appendData(made.data.slice(old.length));
    else if (old.data.startsWith(made.data)) old.deleteData(made.length, old.length);
    else return false;
    return true;
  }
  if (old.matches("button") && made.matches("button")) return true;
  if (made.matches(".token")) {
    return old.dataset.step === made.dataset.step && old.textContent === made.textContent;
  }
  if (!old.cloneNode().isEqualNode(made.cloneNode())) return false;
  const parts = [...made.childNodes], olds = [...old.childNodes];
  parts.forEach((part, i) => {
    if (!olds[i]) old.append(part);
    else if (!updated(olds[i], part)) olds[i].replaceWith(part);
  });
  for (const rest of olds.slice(parts.length)) rest.remove();
  return true;
}

export class TextView {
  // box: the element of the text. onChoose(answer, step, element | null) runs for chosen tokens.
  constructor(box, { onChoose = () => {}, isFollowed = false, hasColors = false } = {}) {
    Object.assign(this, { box, onChoose, isFollowed, hasColors, answer: null });
    Object.assign(this, { stable: 0, isDue: false, next: 0, drawn: "", open: null });
    this.listening = new AbortController();
    const { signal } = this.listening;
    box.addEventListener("click", (e) => this.choose(e.target.closest(".token"), true), { signal });
    box.addEventListener("focusin", (e) => this.choose(e.target.closest(".token")), { signal });
    box.addEventListener("keydown", (e) => this.move(e), { signal });
  }

  // Draw at most once per frame, and less often if a drawing takes long.
  update(answer) {
    this.answer = answer;
    if (this.isDue) return;
    this.isDue = true;
    const look = (now) => {
      if (!this.isDue) return;
      if (now < this.next) return requestAnimationFrame(look);
      this.isDue = false;
      const begun = performance.now();
      this.draw();
      const took = performance.now() - begun;
      this.next = took > 4 ? performance.now() + took / SHARE : 0;
    };
    requestAnimationFrame(look);
  }

  // Draw, and keep the end of the text visible unless the user scrolled away.
  draw() {
    const log = at("log");
    const hidden = () => log.scrollHeight - log.scrollTop - log.clientHeight;
    const isAtEnd = this.isFollowed && hidden() < NEAR;
    this.add();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  // Draw the blocks behind the stable ones. All blocks but the last are stable then.
  add() {
    const { answer, box } = this;
    if (answer.text === this.drawn) return;
    this.drawn = answer.text;
    const blocks = blocksOf(linesOf(answer.text, this.stable));
    const made = blocks.map((block) => this.built(block));
    if (made.length && this.open && updated(this.open, made[0])) made.shift();
    else if (made.length) this.open?.remove();
    box.append(...made);
    this.open = made.at(-1) ?? this.open;
    this.stable = blocks.at(-1)?.at ?? this.stable;
    if (this.hasColors && !box.querySelector("[tabindex='0'].token")) {
      box.querySelector(".token")?.setAttribute("tabindex", "0");
    }
  }

  built(block) {
    const { answer } = this;
    const isColored = this.hasColors && answer.hasPlaces;
    return build(block, isColored ? (from, to) => this.tokens(from, to)
      : (from, to) => [answer.text.slice(from, to)]);
  }

  // Draw all of it again, for example after a change of the colors.
  again(hasColors = this.hasColors) {
    this.isDue = false;
    Object.assign(this, { hasColors, stable: 0, drawn: "", open: null });
    this.box.replaceChildren();
    if (this.answer) this.draw();
  }

  end() {
    this.isDue = false;
    this.draw();
  }

  close() {
    this.isDue = false;
    this.listening.abort();
  }

  *tokens(from, to) {
    const { answer } = this;
    for (const piece of answer.pieces(from, to)) {
      const text = answer.text.slice(piece.from, piece.to);
      if (piece.step === null) {
        yield text;
        continue;
      }
      const names = namesOf(piece.bits, answer.sources);
      const colors = names.length ? ` draft ${colorOf(names[0])}${names.length > 1 ? " several" : ""}` : "";
      const title = names.length ? `drafted by ${names.join(" and ")}` : "from the target model";
      const made = element("span", { className: `token${colors}`, title, tabIndex: -1, text });
      made.dataset.step = piece.step;
      if (piece.step === this.chosen) made.classList.add("chosen");
      yield made;
    }
  }

  // isOpened: by a click or Enter, not by moving the focus.
  choose(token, isOpened = false) {
    if (!token) return;
    for (const other of document.querySelectorAll(".token.chosen")) other.classList.remove("chosen");
    for (const other of this.box.querySelectorAll(".token[tabindex='0']")) other.tabIndex = -1;
    this.chosen = Number(token.dataset.step);
    for (const each of this.of(this.chosen)) each.classList.add("chosen");
    token.tabIndex = 0;
    this.onChoose(this.answer, this.chosen, isOpened ? token : null);
  }

  of(step) {
    return this.box.querySelectorAll(`.token[data-step="${step}"]`);
  }

  // The arrow keys move to the next step that has text.
  move(event) {
    const here = event.target.closest(".token");
    if (here && event.key === "Enter") this.choose(here, true);
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!here || !way) return;
    event.preventDefault();
    for (let step = Number(here.dataset.step) + way; this.answer.steps[step]; step += way) {
      const [next] = this.of(step);
      if (next) return next.focus();
    }
  }
}
