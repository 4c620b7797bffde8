// The color scheme: the system's, or the user's choice.

import { put, take } from "./storage.js";

const KEY = "specserve.theme", SCHEMES = ["light", "dark"];
const isDark = matchMedia("(prefers-color-scheme: dark)");

function apply(chosen) {
  if (SCHEMES.includes(chosen)) document.documentElement.dataset.theme = chosen;
}

export function addThemeSwitch(button) {
  apply(take(KEY));
  button.onclick = () => {
    const shown = document.documentElement.dataset.theme ?? (isDark.matches ? "dark" : "light");
    const next = shown === "dark" ? "light" : "dark";
    apply(next);
    put(KEY, next);
  };
}

addEventListener("storage", (event) => event.key === KEY && apply(take(KEY)));
