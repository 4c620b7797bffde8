// The server's HTTP API, as the page uses it.

const KEY = "specserve.key"; // of this tab's session
const SILENCE = 60_000; // ms without a byte, not even a comment: the connection is taken for dead

export class Refusal extends Error {
  constructor(status, message, param) {
    super(message);
    Object.assign(this, { status, param }); // param: the field of the request that is wrong
  }
}

let key = ""; // where the browser keeps nothing for the page, until it is left

export function setKey(given) {
  if (!/^[\x21-\x7e]+$/.test(given)) {
    throw new Refusal(401, "this is no key: one has letters, digits and signs of ASCII, no spaces");
  }
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // then it is asked for again after a reload
  }
}

function headers() {
  let kept = key;
  try {
    kept ||= sessionStorage.getItem(KEY);
  } catch {
    // nothing is kept
  }
  return kept ? { Authorization: `Bearer ${kept}` } : {};
}

export async function call(path, body, signal) {
  const sent = body && {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headers() },
  };
  let response;
  try {
    response = await fetch(path, { signal, headers: headers(), ...sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the server cannot be reached: is it running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Refusal(response.status, told.error?.message ?? `HTTP status ${response.status}`,
    told.error?.param);
}

export const get = async (path) => (await call(path)).json();

// The data of a stream's events, until [DONE]; what fails is a Refusal.
export async function* events(path, body, signal) {
  const quiet = new AbortController();
  const response = await call(path, body, AbortSignal.any([signal, quiet.signal]));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const timer = setTimeout(() => quiet.abort(), SILENCE);
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new Refusal(0, "the connection to the server broke before the answer was complete");
    } finally {
      clearTimeout(timer);
    }
    if (read.done) throw new Refusal(0, "the stream ended before the answer was complete");
    const parts = (rest + read.value).replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment, which keeps the connection open
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = parse(data);
      if (event.error) throw new Refusal(0, event.error.message ?? "the server failed");
      yield event;
    }
  }
}

export const ODD = "the server sent what this page cannot read: is it specserve, of this version?";

function parse(data) {
  try {
    const event = JSON.parse(data);
    if (event && Array.isArray(event.choices ?? (event.error && []))) return event;
  } catch {
    // told below
  }
  throw new Refusal(0, ODD);
}

const texts = new Map(); // of tokens, by id

export async function textOf(token) {
  if (!texts.has(token)) {
    const answer = call("detokenize", { tokens: [token] }).then((r) => r.json());
    texts.set(token, answer.then((told) => told.prompt));
  }
  return texts.get(token).catch((error) => {
    texts.delete(token);
    throw error;
  });
}
