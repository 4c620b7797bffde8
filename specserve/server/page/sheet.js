// On narrow screens, a step's tree is a sheet over the text, which has the focus while it is open.

const sheet = document.querySelector("#step"), narrow = matchMedia("(max-width: 999px)");
let opener = null; // the word that gets the focus back

export function openSheet(from) {
  if (!narrow.matches) return;
  opener = from;
  sheet.classList.add("sheet");
  sheet.querySelector("#tree").focus();
  opener.scrollIntoView({ block: "nearest" });
}

export function closeSheet() {
  if (!opener) return;
  const hadFocus = sheet.contains(document.activeElement);
  const to = opener;
  opener = null;
  sheet.classList.remove("sheet");
  if (hadFocus) to.focus();
}

sheet.querySelector("#close-step").onclick = closeSheet;
sheet.onkeydown = (event) => {
  if (event.key === "Escape") closeSheet();
};
