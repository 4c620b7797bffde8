// The server's HTTP API.

const KEY = "specserve.key"; // in sessionStorage
const SILENCE = 60_000; // ms without a byte after which a stream is aborted

export class Refusal extends Error {
  constructor(status, message, param) {
    super(message);
    Object.assign(this, { status, param }); // param: the wrong field of the request
  }
}

let key = ""; // used if sessionStorage is disabled

export function setKey(given) {
  if (!/^[\x21-\x7e]+$/.test(given)) {
    throw new Refusal(401, "invalid key: use printable ASCII characters without spaces");
  }
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // the page asks again after a reload
  }
}

export function givenKey() {
  try {
    return key || sessionStorage.getItem(KEY) || "";
  } catch {
    return key; // no sessionStorage
  }
}

const headers = () => (givenKey() ? { Authorization: `Bearer ${givenKey()}` } : {});

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
    throw new Refusal(0, "cannot connect to the server: is it running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Refusal(response.status, told.error?.message ?? `HTTP status ${response.status}`,
    told.error?.param);
}

export const get = async (path) => (await call(path)).json();

// The data of a stream's events, until [DONE]; throws Refusal.
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
      throw new Refusal(0, "the connection broke before the response was complete");
    } finally {
      clearTimeout(timer);
    }
    if (read.done) throw new Refusal(0, "the stream ended before the response was complete");
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

export const ODD = "cannot read the server's reply: page and server may differ in version";

function parse(data) {
  try {
    const event = JSON.parse(data);
    if (event && Array.isArray(event.choices ?? (event.error && []))) return event;
  } catch {
    // throws below
  }
  throw new Refusal(0, ODD);
}

const texts = new Map(); // token id -> text

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
