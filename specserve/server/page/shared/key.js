// The question for an API key.

import { givenKey, setKey } from "./api.js";
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

// Show the form after a status 401, or hide it.
export function showKeyForm(isAsked) {
  at("key-asked").hidden = !isAsked;
  at("key-error").textContent = isAsked && givenKey()
    ? "The server refused the key. Enter a valid key." : "";
  if (isAsked) at("key").focus();
}
