// Elements, icons and small helpers for both pages.

export const at = (id) => document.getElementById(id);

// Make an element. Properties are set as properties if they exist, else as attributes.
export function element(tag, { text, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

// Make an element of a drawing.
export function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM13 8l3 3",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  close: "M6 6l12 12M18 6L6 18",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  theme: "M12 4a8 8 0 1 0 8 8 6 6 0 0 1-8-8z",
  help: "M9 9a3 3 0 1 1 4 3c-1 .5-1 1-1 2M12 17.5v.5",
  race: "M4 8h9M4 16h15M10 5l3 3-3 3M16 13l3 3-3 3",
  tree: "M4 12h5l5-6h6M9 12l5 6h6",
  export: "M12 15V4M8 8l4-4 4 4M5 15v4h14v-4",
  import: "M12 4v11M8 11l4 4 4-4M5 15v4h14v-4",
};

export function icon(name) {
  return shape("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" },
    shape("path", { d: ICONS[name] }));
}

// A button with an icon. The label is read aloud and shown as a tooltip.
export function iconButton(name, label, onclick) {
  return element("button", { className: "plain", type: "button", "aria-label": label,
    title: label, onclick }, icon(name));
}

// Add the icons that the HTML names.
export function addIcons() {
  for (const each of document.querySelectorAll("[data-icon]")) {
    each.prepend(icon(each.dataset.icon));
    each.title ||= each.ariaLabel ?? "";
  }
}

export const isTyping = () => document.activeElement?.matches("input, textarea, select") ?? false;

const whole = new Intl.NumberFormat("en-US");
export const count = (number) => whole.format(number);
export const inMs = (ms) => {
  if (ms == null) return undefined;
  return ms >= 1000 ? `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s` : `${ms.toFixed(ms < 10 ? 2 : 0)} ms`;
};

// Copy a text; the button shows the result for a moment.
export async function copy(text, button) {
  const label = button.getAttribute("aria-label") ?? "Copy";
  let result = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    result = "The browser blocked copying";
  }
  button.replaceChildren(icon(result === "Copied" ? "check" : "close"));
  button.setAttribute("aria-label", result);
  setTimeout(() => {
    button.replaceChildren(icon("copy"));
    button.setAttribute("aria-label", label);
  }, 1500);
}
