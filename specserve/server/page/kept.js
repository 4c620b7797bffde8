// What is kept in this browser: conversations, {id, at: ms, messages: [{role, content}]}, the latest
// first; which one is open; and the settings.

const PLACE = "specserve.conversations", OPEN = "specserve.open", MOST = 50;

// What is kept at a place; null where there is nothing that can be read.
export function take(place, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(place));
  } catch {
    return null;
  }
}

// Whether the browser keeps it.
export function put(place, value, storage = "localStorage") {
  try {
    window[storage].setItem(place, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const isMessage = (m) => typeof m?.role === "string" && typeof m.content === "string";
const isOne = (kept) => typeof kept?.id === "string" && Array.isArray(kept.messages)
  && kept.messages.every(isMessage);

// What is not of this form is of another version or another page, and is not shown.
export function read() {
  const kept = take(PLACE);
  return Array.isArray(kept) ? kept.filter(isOne) : [];
}

function write(kept) {
  for (; kept.length; kept.pop()) {
    if (put(PLACE, kept)) return; // else there is no room: without the oldest
  }
  try {
    localStorage.removeItem(PLACE);
  } catch {
    // this browser keeps nothing
  }
}

export function keep(one) {
  one.at = Date.now();
  write([one, ...read().filter((kept) => kept.id !== one.id)].slice(0, MOST));
}

// Of each tab its own: two tabs in one would lose answers.
export const setOpen = ({ id }) => put(OPEN, id, "sessionStorage");

export function opened() {
  const id = take(OPEN, "sessionStorage");
  return read().find((kept) => kept.id === id) ?? fresh();
}

export const forget = (id) => write(read().filter((kept) => kept.id !== id));
export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });
export const titleOf = ({ messages }) => messages.find((m) => m.role === "user")?.content ?? "empty";

// When its last answer came; nothing where that is not known.
export function timeOf({ at }) {
  const then = new Date(at);
  if (typeof at !== "number" || isNaN(then)) return "";
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString() : then.toLocaleString();
}
