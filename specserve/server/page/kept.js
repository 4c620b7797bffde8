// Storage in the browser: conversations {id, at: ms, messages: [{role, content}]}, latest first;
// the id of the open one; and the settings.

const PLACE = "specserve.conversations", OPEN = "specserve.open", MOST = 50;

// The stored value at a place; null if it is missing or unreadable.
export function take(place, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(place));
  } catch {
    return null;
  }
}

// Returns whether the browser stored the value.
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

// Entries of another form are from another version or page, and are skipped.
export function read() {
  const kept = take(PLACE);
  return Array.isArray(kept) ? kept.filter(isOne) : [];
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

// One per tab: two tabs in one conversation would lose responses.
export const setOpen = ({ id }) => put(OPEN, id, "sessionStorage");

export function opened() {
  const id = take(OPEN, "sessionStorage");
  return read().find((kept) => kept.id === id) ?? fresh();
}

export const forget = (id) => write(read().filter((kept) => kept.id !== id));
export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });
export const titleOf = ({ messages }) => messages.find((m) => m.role === "user")?.content ?? "empty";

// The time of its last response; "" if unknown.
export function timeOf({ at }) {
  const then = new Date(at);
  if (typeof at !== "number" || isNaN(then)) return "";
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString() : then.toLocaleString();
}
