// What is said of a demo at a larger model's cost; nothing of other models.
export const scaledWords = (card) => card.scaled?.length
  ? `A demo: ${card.scaled.map(({ source, like }) => `${source} at the cost of ${like}`).join(", ")}. `
    + "The words are the small model's, the time is the large one's."
  : "";
