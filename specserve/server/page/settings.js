// The model that is served, and what the page's controls ask of it.

import { plainSeconds } from "./answer.js";
import { Refusal, get } from "./api.js";
import { put, take } from "./kept.js";
import { element } from "./view.js";

const form = document.querySelector("#controls"), KEPT = "specserve.settings";
const controls = [...form.elements].filter((control) => control.name); // all but the sources
const { values, off } = Object(take(KEPT));
const refused = new Set(Array.isArray(off) ? off : []); // names of sources that may not guess
for (const control of controls) {
  if (typeof values?.[control.name] === "string") control.value = values[control.name];
}

form.oninput = ({ target }) => {
  if (target.type === "checkbox") refused[target.checked ? "delete" : "add"](target.name);
  const told = controls.map(({ name, value }) => [name, value]);
  put(KEPT, { values: Object.fromEntries(told), off: [...refused] });
};

export const model = { card: null, plain() {} }; // see figures()

export async function connect() {
  const { data } = await get("v1/models");
  [model.card] = data;
  const fieldset = document.querySelector("#sources");
  const boxes = (model.card.sources ?? []).map((name) =>
    element("label", {},
      element("input", { type: "checkbox", name, checked: !refused.has(name) }), ` ${name}`));
  const none = element("span", { className: "quiet", text: "this server makes no guesses" });
  fieldset.replaceChildren(fieldset.firstElementChild, ...(boxes.length ? boxes : [none]));
  form.max_nodes.max = model.card.max_nodes ?? 0;
  if (form.max_nodes.validity.rangeOverflow) form.max_nodes.value = ""; // kept of another server
  form.max_nodes.placeholder = `up to ${model.card.max_nodes ?? 0}`;
  await learnCosts();
}

// Learn what a step without draft tokens takes.
export async function learnCosts() {
  const { plain_steps: measured } = await get("v1/speculation");
  model.plain = (context) => plainSeconds(measured, context);
}

const labelOf = (control) => control.labels[0].textContent.trim();

// The number in a control, undefined where it is empty; a Refusal where it is none of those it takes.
function numberOf(name) {
  const control = form[name], { value, min, max, step, validity } = control;
  const isWhole = step === "1";
  const isWrong = validity.badInput || validity.rangeUnderflow || validity.rangeOverflow
    || (isWhole && value && !Number.isSafeInteger(Number(value)));
  if (!isWrong) return value === "" ? undefined : Number(value);
  document.querySelector("#settings").open = true;
  control.focus();
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  throw new Refusal(400,
    `${labelOf(control)}: set a ${isWhole ? "whole " : ""}number ${range}, or leave it empty`);
}

// An error's message, with the name on the page of the setting that the server refuses.
export function wordsOf({ message, param }) {
  const control = controls.find(({ name }) => name === param?.replace("speculation.", ""));
  return control ? `${labelOf(control)}: ${message}` : message;
}

// Fields of a request's body, as the controls say.
export function fields() {
  const speculation = {};
  const boxes = [...document.querySelectorAll("#sources input")];
  if (boxes.some((box) => !box.checked)) {
    speculation.sources = boxes.filter((box) => box.checked).map((box) => box.name);
  }
  const most = numberOf("max_nodes");
  if (most !== undefined) speculation.max_nodes = most;
  const seed = numberOf("seed");
  return {
    temperature: numberOf("temperature"),
    seed: seed < 0 ? undefined : seed, // drawn, as in other frontends
    max_tokens: numberOf("max_tokens"),
    ...(Object.keys(speculation).length ? { speculation } : {}),
  };
}

export function conversation(messages) {
  const system = form.system.value.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}
