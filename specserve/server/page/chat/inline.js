// Markdown within a paragraph. Nodes refer to places in the source, so that tokens can be colored.

const MAX_LENGTH = 20_000, MAX_DEPTH = 12; // characters and levels that are parsed
const SAFE = /^(https?:\/\/|mailto:)[^\s<>]+$/i;
const BARE = /https?:\/\/[^\s<>"'`*]+/y;
const WORD = /[\p{L}\p{N}]/u, SPACE = /\s/;

// lines: [{text, at}]: texts and their places in the source.
// Return nodes: {from, to} for text, or {tag, children, href}.
export function inline(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const places = []; // {index, at}: begin of each line in the text and in the source
  let index = 0;
  for (const line of lines) {
    places.push({ index, at: line.at });
    index += line.text.length + 1;
  }
  const parser = new Inline(text, places);
  return text.length > MAX_LENGTH ? parser.plain(0, text.length) : parser.parse(0, text.length, 0);
}

class Inline {
  constructor(text, places) {
    Object.assign(this, { text, places, closers: new Map() });
  }

  // Text nodes of a range: one for each line, because prefixes of lines are left out.
  plain(from, to) {
    const found = [];
    let number = this.lineOf(from);
    while (from < to) {
      const { index, at } = this.places[number];
      const end = Math.min(to, this.places[number + 1]?.index ?? Infinity);
      found.push({ from: at + from - index, to: at + end - index });
      from = end;
      number += 1;
    }
    return found;
  }

  lineOf(place) {
    let low = 0, high = this.places.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.places[middle].index <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  parse(from, to, depth) {
    const nodes = [];
    let begin = from;
    const add = (place, node, end) => {
      nodes.push(...this.plain(begin, place), ...(node ? [node] : []));
      begin = end;
    };
    for (let i = from; i < to;) {
      const found = depth < MAX_DEPTH ? this.nodeAt(i, to, depth) : null;
      if (found) add(i, found.node, found.end);
      i = found ? found.end + (found.node ? 0 : 1) : i + this.step(i); // not into an escaped sign
    }
    nodes.push(...this.plain(begin, to));
    return nodes;
  }

  // The length of what cannot begin a node at this place.
  step(i) {
    const run = /[`*_~]+/y;
    run.lastIndex = i;
    return run.exec(this.text)?.[0].length ?? 1;
  }

  nodeAt(i, to, depth) {
    switch (this.text[i]) {
      case "`": return this.code(i, to);
      case "*": case "_": case "~": return this.emphasis(i, to, depth);
      case "[": return this.link(i, i, to, depth);
      case "!": return this.text[i + 1] === "[" ? this.link(i + 1, i, to, depth) : null;
      case "h": return this.bare(i, to);
      case "\\": return /[!-/:-@[-`{-~]/.test(this.text[i + 1] ?? "")
        ? { node: null, end: i + 1 } : null;
      default: return null;
    }
  }

  code(i, to) {
    const run = this.text.slice(i).match(/^`+/)[0];
    const end = this.find(run, i + run.length, to, (at) =>
      this.text[at - 1] !== "`" && this.text[at + run.length] !== "`");
    if (end < 0) return null;
    const node = { tag: "code", children: this.plain(i + run.length, end) };
    return { node, end: end + run.length };
  }

  emphasis(i, to, depth) {
    const { text } = this, sign = text[i];
    const length = Math.min(text.slice(i, i + 3).match(/^(.)\1*/)[0].length, sign === "~" ? 2 : 3);
    const mark = sign.repeat(length), begin = i + length;
    if (sign === "~" && length < 2) return null;
    if (SPACE.test(text[begin] ?? " ")) return null;
    if (sign === "_" && WORD.test(text[i - 1] ?? " ")) return null;
    const end = this.find(mark, begin + 1, to, (at) => !SPACE.test(text[at - 1])
      && text[at - 1] !== "\\" && text[at + length] !== sign
      && (sign !== "_" || !WORD.test(text[at + length] ?? " ")));
    if (end < 0) return null;
    const children = this.parse(begin, end, depth + 1);
    const tags = { "~": ["del"], 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };
    const node = (tags[sign] ?? tags[length])
      .reduceRight((inner, tag) => [{ tag, children: inner }], children)[0];
    return { node, end: end + length };
  }

  // A link; an image is a link, too, because the page loads nothing from other hosts.
  link(i, start, to, depth) {
    const { text } = this;
    const close = this.find("](", i + 1, to, () => true);
    if (close < 0 || close - i > 1000) return null;
    const end = this.find(")", close + 2, Math.min(to, close + 2000), () => true);
    if (end < 0) return null;
    const [href] = text.slice(close + 2, end).trim().split(/\s+/);
    if (!SAFE.test(href)) return null;
    const children = this.parse(i + 1, close, depth + 1);
    return { node: { tag: "a", href, children }, end: end + 1 };
  }

  bare(i, to) {
    if (WORD.test(this.text[i - 1] ?? " ")) return null;
    BARE.lastIndex = i;
    const found = BARE.exec(this.text)?.[0].slice(0, to - i).replace(/[.,;:!?)\]]+$/, "");
    if (!found || !SAFE.test(found)) return null;
    const end = i + found.length;
    return { node: { tag: "a", href: found, children: this.plain(i, end) }, end };
  }

  // The first place of a mark from `from` on that is accepted; -1 without one. Failures are kept,
  // so that a text of many openers takes linear time.
  find(mark, from, to, accepts) {
    const key = `${mark} ${to}`;
    if (from >= (this.closers.get(key) ?? Infinity)) return -1;
    for (let at = this.text.indexOf(mark, from); at >= 0 && at + mark.length <= to;
      at = this.text.indexOf(mark, at + 1)) {
      if (accepts(at)) return at;
    }
    this.closers.set(key, from);
    return -1;
  }
}
