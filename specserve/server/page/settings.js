// The model that is served, and what the page's controls ask of it.

import { get } from "./api.js";
import { element } from "./view.js";

const form = document.querySelector("#controls");

export const model = { card: null, plain: null }; // plain: seconds of a step of one row, by context

export async function connect() {
  const { data } = await get("v1/models");
  [model.card] = data;
  const fieldset = document.querySelector("#sources");
  const boxes = (model.card.sources ?? []).map((name) =>
    element("label", {}, element("input", { type: "checkbox", name, checked: true }), ` ${name}`));
  const none = element("span", { className: "quiet", text: "this server makes no guesses" });
  fieldset.replaceChildren(fieldset.firstElementChild, ...(boxes.length ? boxes : [none]));
  form.max_nodes.max = model.card.max_nodes ?? 0;
  form.max_nodes.placeholder = `up to ${model.card.max_nodes ?? 0}`;
  await learnCosts();
}

// What a step of one row takes, as the server's own steps have shown.
export async function learnCosts() {
  const { costs } = await get("v1/speculation");
  const target = costs.target ?? Object.values(costs)[0];
  const first = target?.steps[0];
  model.plain = first?.rows === 1 && first.is_known
    ? (context) => target.slowdown
      * (first.seconds + target.seconds_per_token * context + target.seconds_per_request)
    : null;
}

const numberOf = (name) => (form[name].value === "" ? undefined : Number(form[name].value));

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
