// The served model, and the settings of the page.

import { plainSeconds } from "./answer.js";
import { Refusal, get } from "./api.js";
import { put, take } from "./kept.js";
import { element } from "./view.js";

const form = document.querySelector("#controls"), KEPT = "specserve.settings";
const controls = [...form.elements].filter((control) => control.name); // without the drafters
const { values, off } = Object(take(KEPT));
const refused = new Set(Array.isArray(off) ? off : []); // names of drafters that are off
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
  const none = element("span", { className: "quiet", text: "speculation is off" });
  fieldset.replaceChildren(fieldset.firstElementChild, ...(boxes.length ? boxes : [none]));
  form.max_nodes.max = model.card.max_nodes ?? 0;
  if (form.max_nodes.validity.rangeOverflow) form.max_nodes.value = ""; // from another server
  form.max_nodes.placeholder = `up to ${model.card.max_nodes ?? 0}`;
  await learnCosts();
}

// Fetch the measured time of steps without draft tokens.
export async function learnCosts() {
  const { plain_steps: measured } = await get("v1/speculation");
  model.plain = (context) => plainSeconds(measured, context);
}

const labelOf = (control) => control.labels[0].textContent.trim();

// The number in a control, undefined if it is empty; throws Refusal if it is invalid.
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

// An error's message, with the label of the setting that the server refused.
export function wordsOf({ message, param }) {
  const control = controls.find(({ name }) => name === param?.replace("speculation.", ""));
  return control ? `${labelOf(control)}: ${message}` : message;
}

// The fields of a request's body that the controls set.
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
    seed: seed < 0 ? undefined : seed, // below 0: random
    max_tokens: numberOf("max_tokens"),
    ...(Object.keys(speculation).length ? { speculation } : {}),
  };
}

export function conversation(messages) {
  const system = form.system.value.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}
