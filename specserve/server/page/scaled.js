// A note about padded demo models; "" for other models.
const words = ({ source, like }) => `${source}, padded to ${like} compute`;
export const scaledWords = (card) => card.scaled?.length
  ? `Demo: ${card.scaled.map(words).join("; ")}. `
    + "The small model makes the text, at the speed of the large one."
  : "";
