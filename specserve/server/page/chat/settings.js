// The served model, and the settings of requests.

import { Refusal, get } from "../shared/api.js";
import { at, count, element } from "../shared/dom.js";
import { swatch } from "../shared/drafters.js";
import { put, take } from "../shared/storage.js";
import { plainSeconds } from "./answer.js";

const form = at("controls"), KEPT = "specserve.settings";
const controls = [...form.elements].filter((control) => control.name); // without the drafters
const { values, off, hasColors } = Object(take(KEPT));
const refused = new Set(Array.isArray(off) ? off : []); // names of drafters that are off
let colors = typeof hasColors === "boolean" ? hasColors : null; // null: not chosen
for (const control of controls) {
  if (typeof values?.[control.name] === "string") control.value = values[control.name];
}

function store() {
  const entries = controls.map(({ name, value }) => [name, value]);
  put(KEPT, { values: Object.fromEntries(entries), off: [...refused], hasColors: colors });
}

form.oninput = ({ target }) => {
  if (target.type === "checkbox") refused[target.checked ? "delete" : "add"](target.name);
  store();
};
form.onsubmit = (event) => event.preventDefault();

export const model = { card: null, plain() {} }; // see figures()

// Whether tokens are colored by drafter: the user's choice, or on for the demo.
export const showsDrafting = () => colors ?? Boolean(model.card?.demo);

export function setShowsDrafting(are) {
  colors = are;
  store();
}

export async function connect() {
  const { data } = await get("v1/models");
  [model.card] = data;
  const boxes = (model.card.sources ?? []).map((name) =>
    element("label", {},
      element("input", { type: "checkbox", name, checked: !refused.has(name) }), swatch(name)));
  const none = element("span", { className: "quiet", text: "speculation is off" });
  at("sources").replaceChildren(at("sources").firstElementChild, ...(boxes.length ? boxes : [none]));
  form.max_nodes.max = model.card.max_nodes ?? 0;
  if (form.max_nodes.validity.rangeOverflow) form.max_nodes.value = ""; // from another server
  showDefaults();
  await learnCosts();
}

// The values of parameters that the page sends, or that the server uses if they are unset.
const defaults = () => ({ ...model.card.defaults, ...model.card.chat_defaults });

function showDefaults() {
  const known = defaults();
  const longest = known.max_tokens ?? model.card.max_model_len;
  form.max_tokens.placeholder = longest ? count(longest) : "";
  for (const name of ["temperature", "top_p", "min_p"]) form[name].placeholder = known[name] ?? "";
  form.max_nodes.placeholder = `up to ${model.card.max_nodes ?? 0}`;
}

// Fetch the measured time of steps without draft tokens.
export async function learnCosts() {
  const { plain_steps: measured } = await get("v1/speculation");
  model.plain = (context) => plainSeconds(measured, context);
}

const labelOf = (control) => control.labels[0].firstChild.textContent.trim();

// The number in a control, undefined if it is empty; throws Refusal if it is invalid.
function numberOf(name) {
  const control = form[name], { value, min, max, step, validity } = control;
  const isWhole = step === "1";
  const isWrong = validity.badInput || validity.rangeUnderflow || validity.rangeOverflow
    || (isWhole && value && !Number.isSafeInteger(Number(value)));
  if (!isWrong) return value === "" ? undefined : Number(value);
  openSettings(true);
  control.focus();
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  throw new Refusal(400,
    `${labelOf(control)}: set a ${isWhole ? "whole " : ""}number ${range}, or leave it empty`);
}

// An error's message, with the label of the setting that the server refused.
export function wordsOf({ message, param }) {
  const control = controls.find(({ name }) => name === param?.replace("speculation.", ""));
  return control ? `${labelOf(control)}: ${message}` : message;
}

// The fields of a request's body: the defaults for chats, and what the controls set.
export function fields() {
  const speculation = {};
  const boxes = [...document.querySelectorAll("#sources input")];
  if (boxes.some((box) => !box.checked)) {
    speculation.sources = boxes.filter((box) => box.checked).map((box) => box.name);
  }
  const most = numberOf("max_nodes");
  if (most !== undefined) speculation.max_nodes = most;
  const seed = numberOf("seed");
  const names = ["temperature", "top_p", "min_p", "max_tokens"];
  const set = names.map((name) => [name, numberOf(name)]).filter(([, value]) => value !== undefined);
  return {
    ...model.card?.chat_defaults,
    ...Object.fromEntries(set),
    seed: seed < 0 ? undefined : seed, // below 0: random
    ...(Object.keys(speculation).length ? { speculation } : {}),
  };
}

// The messages of a request: with the system prompt, and without the page's own fields.
export function conversation(messages) {
  const system = form.system.value.trim();
  const plain = messages.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...plain] : plain;
}

export function openSettings(is) {
  at("settings").hidden = !is;
  at("show-settings").setAttribute("aria-expanded", is);
}
