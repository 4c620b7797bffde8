// The chat page.

import { answer } from "./answer.js";
import { setKey } from "./api.js";
import * as kept from "./kept.js";
import { isRacing, openRace } from "./race.js";
import { scaledWords } from "./scaled.js";
import { conversation, connect, fields, learnCosts, model, wordsOf } from "./settings.js";
import { closeSheet, openSheet } from "./sheet.js";
import { TextView, drawFigures, drawLegend, drawTree, element } from "./view.js";

const at = (id) => document.getElementById(id);
const SAMPLES = [ // from the training topics of the demo models
  "What does shutil.copytree do?",
  "How do I read a file line by line?",
  "What is the difference between a list and a tuple?",
  "What does os.path.join return?",
];

const NO_STEP = "Click a word, or use Tab and arrow keys, to see the draft tokens of its step.";

let current = kept.opened();
let edited = null; // {number, draft}: the edited message, the earlier text of the box.
let running = null; // AbortController of the streaming response
let chosen = 0; // number of steps shown
// Ids of deleted conversations, which may still stream.
const forgotten = new Set();

async function begin() {
  try {
    await connect();
  } catch (error) {
    at("model").textContent = error.message;
    at("key-asked").hidden = error.status !== 401;
    return;
  }
  at("key-asked").hidden = true;
  at("model").textContent = model.card.id;
  at("scaled").textContent = scaledWords(model.card);
  at("scaled").hidden = !at("scaled").textContent;
  drawLegend(at("legend"), model.card.sources ?? []);
}

// opener: the element that gets the focus back from the tree; null: the tree gets no focus.
async function choose(answered, number, opener) {
  const mine = ++chosen;
  let shown;
  try {
    shown = await drawTree(answered, number);
  } catch (error) {
    shown = { words: error.message };
  }
  if (mine !== chosen) return; // another step was chosen
  at("tree-words").textContent = shown.words;
  at("tree").replaceChildren(...(shown.drawing ? [shown.drawing] : []));
  if (opener) openSheet(opener);
}

// Remove the figures and the tree.
function clear() {
  closeSheet(); // moves the focus to a step, which chooses the step
  chosen += 1;
  at("tree-words").textContent = NO_STEP;
  at("tree").replaceChildren();
  drawFigures(at("figures"), {});
}

const button = (text, onclick, label) => element("button", { text, onclick, type: "button",
  ...(label ? { "aria-label": label } : {}) });

function showMessage(message, number) {
  const text = element("div", { className: "text", text: message.content });
  const actions = message.role === "user"
    ? [button("Edit", () => edit(number))]
    : [button("Copy", (e) => copy(e.target, text)), button("Ask again", () => askAgain(number))];
  const who = message.role === "user" ? "You " : "Model ";
  const box = element("article", { className: `message ${message.role}` },
    element("header", {}, who, ...actions), text);
  at("log").append(box);
  return { box, text };
}

async function copy(pressed, from) {
  try {
    await navigator.clipboard.writeText(from.textContent);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "The browser blocked copying";
  }
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

function show() {
  at("log").replaceChildren();
  current.messages.slice(0, edited?.number).forEach(showMessage);
  at("cancel").hidden = !edited;
  at("samples").hidden = current.messages.length > 0;
  showKept();
}

function showKept() {
  at("kept").replaceChildren(...kept.read().map((one) => {
    const title = kept.titleOf(one), time = kept.timeOf(one);
    const opening = button(title, () => open(one));
    if (time) opening.append(element("small", { className: "quiet", text: time }));
    const name = time ? `${title}, ${time}` : title;
    return element("li", {}, opening, button("×", () => remove(one), `Delete ${name}`));
  }));
}

function open(one) {
  if (one.id === current.id && running) return;
  stop();
  cancel();
  current = one;
  kept.setOpen(one);
  status("");
  clear();
  show();
}

function remove(one) {
  forgotten.add(one.id);
  kept.forget(one.id);
  if (one.id === current.id) open(kept.fresh());
  else showKept();
}

function edit(number) {
  stop();
  edited = { number, draft: edited?.draft ?? at("prompt").value };
  at("prompt").value = current.messages[number].content;
  show();
  at("prompt").focus();
}

// Restore the messages before Edit.
function cancel() {
  if (!edited) return;
  at("prompt").value = edited.draft;
  edited = null;
  show();
  at("prompt").focus();
}

function askAgain(number) {
  const asked = fieldsOrError();
  if (!asked) return;
  stop();
  cancel();
  current.messages = current.messages.slice(0, number);
  show();
  reply(asked);
}

// The request's fields; null if a setting is wrong, which shows an error.
function fieldsOrError() {
  try {
    status("");
    return fields();
  } catch (error) {
    at("error").textContent = error.message;
    return null;
  }
}

function send(content) {
  if (running || !content.trim()) return;
  if (isRacing()) {
    status("A race is running. Wait until it ends.");
    return;
  }
  const asked = fieldsOrError();
  if (!asked) return;
  current.messages = [...current.messages.slice(0, edited?.number), { role: "user", content }];
  edited = null;
  at("prompt").value = "";
  show();
  reply(asked);
}

async function reply(settings) {
  const asked = current, { messages } = current;
  const control = new AbortController();
  const say = (text) => running === control && status(text);
  running = control;
  isBusy(true);
  clear();
  kept.setOpen(asked);
  say("waiting for the first token");
  const message = { role: "assistant", content: "" };
  const { box, text } = showMessage(message, messages.length);
  const view = new TextView(text, choose, at("foot"));
  let last = null;
  try {
    const body = { ...settings, messages: conversation(messages) };
    last = await answer(body, control.signal, (got) => {
      last = got;
      if (got.first !== null) say("");
      view.update(got);
    });
    say(`complete: ${last.chars.length} characters`);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : "");
    if (error.name !== "AbortError") {
      if (last || running !== control || at("prompt").value) {
        box.append(element("p", { className: "error", role: "alert", text: wordsOf(error) }));
      } else {
        at("error").textContent = wordsOf(error);
        at("prompt").value = messages.at(-1).content;
        asked.messages = messages.slice(0, -1);
        show();
      }
    }
  }
  if (running === control) {
    running = null;
    isBusy(false);
  }
  if (!last) return;
  view.answer = last;
  view.end();
  message.content = last.text;
  if (asked.messages !== messages || forgotten.has(asked.id)) return; // edited or deleted
  messages.push(message);
  kept.keep(asked);
  showKept();
  await learnCosts().catch(() => {});
  if (current !== asked || running) return; // another response is shown
  drawFigures(at("figures"), last.figures(model.plain));
}

function stop() {
  running?.abort();
}

function isBusy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

function status(text) {
  at("error").textContent = "";
  at("status").textContent = text;
}

function view(name) {
  for (const each of ["chat", "race"]) {
    at(each).hidden = each !== name;
    at(`show-${each}`).setAttribute("aria-pressed", each === name);
  }
}

at("use-key").onclick = () => {
  try {
    setKey(at("key").value.trim());
    begin();
  } catch (error) {
    at("model").textContent = error.message;
  }
};
at("show-chat").onclick = () => view("chat");
at("show-race").onclick = () => view("race");
addEventListener("pagehide", () => running && kept.keep(current)); // stores the question
at("new").onclick = () => open(kept.fresh());
at("stop").onclick = (event) => event.detail > 1 || stop(); // not for a double click on Send
at("controls").onsubmit = (event) => event.preventDefault();
at("cancel").onclick = cancel;
at("composer").onkeydown = (event) => {
  if (event.key === "Escape" && !event.isComposing) cancel();
};
at("composer").onsubmit = (event) => {
  event.preventDefault();
  send(at("prompt").value);
};
at("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(at("prompt").value);
};
at("samples").append(...SAMPLES.map((text) => button(text, () => send(text))));
at("settings").open = matchMedia("(min-width: 1000px)").matches;
openRace({ choose, clear, sample: SAMPLES[0], isChatting: () => running !== null });
clear();
show();
begin();
