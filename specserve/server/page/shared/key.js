// The question for an API key.

import { setKey } from "./api.js";
import { at } from "./dom.js";

// Ask for a key. `use` runs after the user entered one.
export function addKeyForm(use) {
  at("key-asked").onsubmit = (event) => {
    event.preventDefault();
    try {
      setKey(at("key").value.trim());
      at("key-error").textContent = "";
      use();
    } catch (error) {
      at("key-error").textContent = error.message;
    }
  };
}

export function showKeyForm(isAsked, message = "") {
  at("key-asked").hidden = !isAsked;
  at("key-error").textContent = message;
  if (isAsked) at("key").focus();
}
