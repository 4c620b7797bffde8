// A step's tree where it is not beside the text: a sheet over it, with the focus, until it is closed.

const sheet = document.querySelector("#step"), narrow = matchMedia("(max-width: 999px)");
let opener = null; // the word to which the focus returns

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
