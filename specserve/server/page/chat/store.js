// Conversations in the browser: {id, at: ms, title?, messages: [{role, content, thought?, speed?,
// isPartial?}]}, latest first.

import { put, take } from "../shared/storage.js";

const PLACE = "specserve.conversations", OPEN = "specserve.open", MOST = 200;

const isText = (value) => value === undefined || typeof value === "string";
const isMessage = (m) => typeof m?.role === "string" && typeof m.content === "string"
  && isText(m.thought) && isText(m.speed);
const isConversation = (one) => typeof one?.id === "string" && isText(one.title)
  && Array.isArray(one.messages) && one.messages.every(isMessage);

// Entries of another form are from another version or page, and are skipped.
export function read() {
  const kept = take(PLACE);
  return Array.isArray(kept) ? kept.filter(isConversation) : [];
}

function write(kept) {
  for (; kept.length; kept.pop()) {
    if (put(PLACE, kept)) return; // no space: drop the oldest
  }
  try {
    localStorage.removeItem(PLACE);
  } catch {
    // no localStorage
  }
}

export function keep(one) {
  one.at = Date.now();
  write([one, ...read().filter((kept) => kept.id !== one.id)].slice(0, MOST));
}

export function rename(id, title) {
  const kept = read(), one = kept.find((each) => each.id === id);
  if (one) one.title = title;
  write(kept);
}

// One per tab: two tabs in one conversation would lose responses.
export const setOpen = ({ id }) => put(OPEN, id, "sessionStorage");

export function opened() {
  const id = take(OPEN, "sessionStorage");
  return read().find((kept) => kept.id === id) ?? fresh();
}

export const forget = (id) => write(read().filter((kept) => kept.id !== id));
const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");
export const fresh = () => ({ id: newId(), messages: [] });

export const titleOf = ({ title, messages }) =>
  title || (messages.find((m) => m.role === "user")?.content ?? "empty");

// The time of its last response; "" if unknown.
export function timeOf({ at }) {
  const then = new Date(at);
  if (typeof at !== "number" || isNaN(then)) return "";
  const isToday = then.toDateString() === new Date().toDateString();
  return then.toLocaleString([], isToday ? { timeStyle: "short" }
    : { dateStyle: "medium", timeStyle: "short" });
}

// Conversations whose title or messages contain a text.
export function search(text) {
  const wanted = text.trim().toLowerCase();
  const has = (part) => part.toLowerCase().includes(wanted);
  return read().filter((one) => has(titleOf(one)) || one.messages.some((m) => has(m.content)));
}

export const exported = () => JSON.stringify({ format: "specserve.conversations", version: 1,
  conversations: read() }, null, 1);

// Add the conversations of an exported file. Return their number; throws Error for other files.
export function importFrom(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Choose a file that this page exported.");
  }
  const given = found?.format === "specserve.conversations" ? found.conversations : null;
  if (!Array.isArray(given) || !given.every(isConversation)) {
    throw new Error("This file has no conversations of specserve. Choose a file that this page "
      + "exported.");
  }
  const ids = new Set(given.map(({ id }) => id));
  const merged = [...given, ...read().filter(({ id }) => !ids.has(id))];
  merged.sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
  write(merged.slice(0, MOST));
  return given.length;
}
