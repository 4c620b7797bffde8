// The list of conversations: open, search, rename, delete, export and import.

import { at, element, iconButton } from "../shared/dom.js";
import * as store from "./store.js";

let actions = { open() {}, remove() {} };
let currentId = null, renamedId = null;

export function showConversations(id = currentId) {
  currentId = id;
  const found = store.search(at("search").value);
  at("kept").replaceChildren(...found.map(row));
  at("no-conversations").hidden = found.length > 0;
  at("no-conversations").textContent = at("search").value.trim()
    ? "No conversation contains this text." : "Your conversations appear here.";
}

function row(one) {
  const title = store.titleOf(one), time = store.timeOf(one);
  const name = time ? `${title}, ${time}` : title;
  if (one.id === renamedId) return element("li", {}, renameField(one, title));
  const opening = element("button", { className: "plain title", type: "button",
    onclick: () => actions.open(one) }, element("span", { dir: "auto", text: title }));
  if (time) opening.append(element("small", { className: "quiet", text: time }));
  if (one.id === currentId) opening.setAttribute("aria-current", "true");
  const renaming = iconButton("edit", `Rename ${name}`, () => {
    renamedId = one.id;
    showConversations();
    at("kept").querySelector("input").select();
  });
  const removing = iconButton("trash", `Delete ${name}`, () => actions.remove(one));
  return element("li", {}, opening, renaming, removing);
}

function renameField(one, title) {
  const input = element("input", { value: title, "aria-label": `New name of ${title}` });
  const end = (isKept) => {
    if (renamedId !== one.id) return;
    renamedId = null;
    if (isKept && input.value.trim()) actions.rename(one.id, input.value.trim());
    showConversations();
  };
  input.onblur = () => end(true);
  input.onkeydown = (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") {
      event.stopPropagation();
      end(false);
    }
  };
  return input;
}

function exportAll() {
  const url = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  element("a", { href: url, download: "specserve-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function importFile(event) {
  const [file] = event.target.files;
  if (!file) return;
  const result = at("import-result");
  try {
    const number = store.importFrom(await file.text());
    result.textContent = `Imported ${number} ${number === 1 ? "conversation" : "conversations"}.`;
  } catch (error) {
    result.textContent = error.message;
  }
  event.target.value = "";
  showConversations();
}

export function addSidebar(given) {
  actions = given;
  at("search").oninput = () => showConversations();
  at("export").onclick = exportAll;
  at("import").onclick = () => at("import-file").click();
  at("import-file").onchange = importFile;
  addEventListener("storage", (event) => event.key?.startsWith("specserve.conv") && showConversations());
}
