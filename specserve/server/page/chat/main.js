// The chat page.

import { addIcons, at } from "../shared/dom.js";
import { scaledWords } from "../shared/facts.js";
import { addKeyForm, showKeyForm } from "../shared/key.js";
import { addThemeSwitch } from "../shared/theme.js";
import { messageBox } from "./messages.js";
import { addRace, isRacing } from "./race.js";
import { Reply } from "./reply.js";
import { connect, fields, model, openSettings, setShowsDrafting, showsDrafting, wordsOf }
  from "./settings.js";
import { addShortcuts } from "./shortcuts.js";
import { addSidebar, showConversations } from "./sidebar.js";
import { drawStart, samplesOf } from "./start.js";
import * as store from "./store.js";
import { clearStep, closeSheet, drawLegend, showStep } from "./tree.js";

let current = store.opened();
let edited = null; // {number, draft}: the edited message, the earlier text of the box
let running = null; // the Reply that streams
let replies = []; // of the shown conversation, with their drafting data

async function begin() {
  try {
    await connect();
  } catch (error) {
    const needsKey = error.status === 401;
    at("model").textContent = needsKey ? "not connected" : error.message;
    if (needsKey) showKeyForm(true);
    return;
  }
  showKeyForm(false);
  at("error").textContent = "";
  at("model").textContent = model.card.id;
  at("model").title = model.card.id;
  at("scaled").textContent = scaledWords(model.card);
  at("scaled").hidden = !at("scaled").textContent;
  drawLegend(model.card.sources ?? []);
  drawStart(model.card, { send, race: startRace });
  if (!at("race-prompt").value) at("race-prompt").value = samplesOf(model.card)[0][1];
  showDrafting(showsDrafting());
  showStart();
}

function showStart() {
  at("start").hidden = !model.card || current.messages.length > 0;
  showPanel();
}

// The panel of draft trees is open with messages in the chat, or with a step in the race.
function showPanel() {
  const isChat = !at("chat").hidden;
  const isUsed = isChat ? showsDrafting() && current.messages.length > 0 : at("tree").firstChild;
  at("drafting").hidden = !isUsed;
}

async function choose(answer, step, opener) {
  await showStep(answer, step, opener);
  showPanel();
}

function show() {
  replies = replies.filter((reply) => reply.one.id === current.id);
  at("messages").replaceChildren();
  current.messages.slice(0, edited?.number).forEach((message, number) => {
    const reply = replies.find((each) => each.message === message);
    at("messages").append(reply ? reply.made.box : boxOf(message, number).box);
  });
  at("cancel").hidden = !edited;
  showStart();
  showConversations(current.id);
  at("log").scrollTop = current.messages.length ? at("log").scrollHeight : 0;
}

const boxOf = (message, number) => messageBox(message, number, { edit, again });

// Remove the tree.
function clear() {
  closeSheet(); // moves the focus to a step, which chooses the step
  clearStep();
  showPanel();
}

function open(one) {
  view("chat");
  showSidebar(false);
  if (one.id === current.id && running) return;
  stop();
  cancel();
  current = one;
  replies = [];
  store.setOpen(one);
  status("");
  clear();
  show();
}

function remove(one) {
  if (running?.one.id === one.id) running.drop();
  store.forget(one.id);
  if (one.id === current.id) open(store.fresh());
  else showConversations();
}

function rename(id, title) {
  store.rename(id, title);
  if (id === current.id) current.title = title;
}

function edit(number) {
  stop();
  edited = { number, draft: edited?.draft ?? at("prompt").value };
  fillPrompt(current.messages[number].content);
  show();
  status("Editing a message: Send replaces it and the later ones.");
  at("prompt").focus();
}

// Restore the messages before Edit.
function cancel() {
  if (!edited) return;
  fillPrompt(edited.draft);
  edited = null;
  status("");
  show();
  at("prompt").focus();
}

function again(number) {
  const asked = fieldsOrError();
  if (!asked) return;
  running?.drop();
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
  fillPrompt("");
  show();
  reply(asked);
}

async function reply(asked) {
  const { messages } = current;
  const message = { role: "assistant", content: "" };
  const made = boxOf(message, messages.length);
  at("messages").append(made.box);
  at("log").scrollTop = at("log").scrollHeight;
  const mine = new Reply(current, message, made, { onChoose: choose, onFirst: () => say("") });
  const say = (text) => running === mine && current === mine.one && status(text);
  running = mine;
  replies.push(mine);
  isBusy(true);
  clear();
  store.setOpen(current);
  store.keep(current);
  say("Waiting for the first token");
  try {
    await mine.run(asked);
    say("");
    at("log").dataset.ended = "complete";
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped" : "");
    if (error.name !== "AbortError") failed(error, mine, messages);
  }
  if (running === mine) {
    running = null;
    isBusy(false);
  }
  showConversations();
}

// Show an error. A request without any response goes back to the box.
function failed(error, mine, messages) {
  if (error.status === 401) showKeyForm(true);
  if (mine.answer || running !== mine || at("prompt").value) {
    mine.fail(wordsOf(error));
    return;
  }
  at("error").textContent = error.status === 401 ? "" : wordsOf(error); // the form says it
  fillPrompt(messages.at(-1).content);
  mine.one.messages = messages.slice(0, -1);
  if (mine.one.messages.length) store.keep(mine.one);
  else store.forget(mine.one.id);
  show();
}

function stop() {
  running?.stop();
}

function isBusy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  if (is) delete at("log").dataset.ended;
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
  if (name === "race") race.fill();
  clear();
}

function startRace(prompt) {
  view("race");
  race.start(prompt);
}

function showDrafting(is) {
  at("show-drafting").setAttribute("aria-checked", is);
  if (!is) clear();
  showPanel();
  for (const { view: text } of replies) text.again(is);
}

function showSidebar(is) {
  at("sidebar").classList.toggle("open", is);
  at("show-sidebar").setAttribute("aria-expanded", is);
}

// Set the text of the box, and its height.
function fillPrompt(text) {
  at("prompt").value = text;
  fitPrompt();
}

function fitPrompt() {
  const box = at("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, 220)}px`;
}

const toggle = {
  settings: () => openSettings(at("settings").hidden),
  drafting: () => {
    setShowsDrafting(!showsDrafting());
    showDrafting(showsDrafting());
  },
};
const focusOn = (id) => {
  view("chat");
  at(id).focus();
};

addIcons();
addThemeSwitch(at("theme"));
addKeyForm(begin);
addSidebar({ open, remove, rename });
const race = addRace({ onChoose: choose, onStart: clear, isChatting: () => running !== null });
addShortcuts([
  ["N", "New conversation", () => open(store.fresh())],
  ["/", "Write a message", () => focusOn("prompt")],
  ["S", "Search conversations", () => {
    showSidebar(true);
    at("search").focus();
  }],
  [",", "Settings", toggle.settings],
  ["D", "Show drafting", toggle.drafting],
  ["C", "Chat", () => view("chat")],
  ["R", "Race", () => view("race")],
  ["T", "Light or dark", () => at("theme").click()],
]);
at("show-chat").onclick = () => view("chat");
at("show-race").onclick = () => view("race");
at("show-sidebar").onclick = () => showSidebar(!at("sidebar").classList.contains("open"));
at("show-settings").onclick = toggle.settings;
at("close-settings").onclick = () => {
  openSettings(false);
  at("show-settings").focus();
};
at("show-drafting").onclick = toggle.drafting;
at("new").onclick = () => open(store.fresh());
at("stop").onclick = (event) => event.detail > 1 || stop(); // not for a double click on Send
at("cancel").onclick = cancel;
at("composer").onsubmit = (event) => {
  event.preventDefault();
  send(at("prompt").value);
};
at("prompt").oninput = fitPrompt;
at("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(at("prompt").value);
};
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || at("help").open) return;
  if (edited) cancel();
  else if (at("sidebar").classList.contains("open")) showSidebar(false);
  else if (!at("settings").hidden) at("close-settings").click();
  else if (isRacing()) race.stop();
  else stop();
});
addEventListener("pagehide", () => running?.save(true));
clear();
show();
begin();
