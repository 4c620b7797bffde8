// Conversations, kept in this browser: {id, messages: [{role, content}]}, the latest first.

const PLACE = "specserve.conversations", MOST = 50;

export function read() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? [];
  } catch {
    return []; // nothing can be kept here, or something else was
  }
}

function write(kept) {
  for (; kept.length; kept.pop()) {
    try {
      localStorage.setItem(PLACE, JSON.stringify(kept));
      return;
    } catch {
      // no room: without the oldest
    }
  }
  localStorage.removeItem(PLACE);
}

export const keep = (one) => write([one, ...read().filter((k) => k.id !== one.id)].slice(0, MOST));
export const forget = (id) => write(read().filter((kept) => kept.id !== id));
export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });
export const titleOf = ({ messages }) => messages.find((m) => m.role === "user")?.content ?? "empty";
