// Conversations, kept in this browser: {id, messages: [{role, content}]}, the latest first.

const PLACE = "specserve.conversations", MOST = 50;

const isMessage = (m) => typeof m?.role === "string" && typeof m.content === "string";
const isOne = (kept) => typeof kept?.id === "string" && Array.isArray(kept.messages)
  && kept.messages.every(isMessage);

// What is not of this form is of another version or another page, and is not shown.
export function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(PLACE));
    return Array.isArray(kept) ? kept.filter(isOne) : [];
  } catch {
    return [];
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
  try {
    localStorage.removeItem(PLACE);
  } catch {
    // this browser keeps nothing
  }
}

export const keep = (one) => write([one, ...read().filter((k) => k.id !== one.id)].slice(0, MOST));
export const forget = (id) => write(read().filter((kept) => kept.id !== id));
export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });
export const titleOf = ({ messages }) => messages.find((m) => m.role === "user")?.content ?? "empty";
