// A safe subset of Markdown as DOM nodes. No HTML of a text is ever parsed: it stays text.

import { copy, element, iconButton } from "../shared/dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8; // of lists and quotes
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;

// The lines of a text from a place on: {text, at}.
export function linesOf(source, from = 0) {
  const lines = [];
  for (let at = from; at < source.length;) {
    const end = source.indexOf("\n", at);
    const to = end < 0 ? source.length : end;
    lines.push({ text: source.slice(at, to), at });
    at = to + 1;
  }
  return lines;
}

const without = ({ text, at }, length) => ({ text: text.slice(length), at: at + length });

// Parse lines to blocks, each with the place of its first line.
export function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (BLANK.test(lines[i].text)) {
      i += 1;
      continue;
    }
    const [block, next] = blockAt(lines, i, depth);
    blocks.push({ at: lines[i].at, ...block });
    i = next;
  }
  return blocks;
}

function blockAt(lines, i, depth) {
  const { text } = lines[i];
  let found;
  if ((found = text.match(FENCE))) return fence(lines, i, found);
  if (/^( {4}|\t)/.test(text)) return indented(lines, i);
  if ((found = text.match(HEADING))) {
    const line = without(lines[i], found[0].length);
    line.text = line.text.replace(/[ \t]+#+[ \t]*$/, "");
    return [{ type: "heading", level: found[1].length, lines: [line] }, i + 1];
  }
  if (RULE.test(text)) return [{ type: "rule" }, i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(text)) return quote(lines, i, depth);
  if (depth < MAX_DEPTH && ITEM.test(text)) return list(lines, i, depth);
  if (text.includes("|") && TABLE.test(lines[i + 1]?.text ?? "x")) return table(lines, i);
  let end = i + 1;
  while (end < lines.length && !BLANK.test(lines[end].text) && !begins(lines[end].text)) end += 1;
  return [{ type: "paragraph", lines: lines.slice(i, end) }, end];
}

// Whether a line ends the paragraph before it.
const begins = (text) => FENCE.test(text) || HEADING.test(text) || RULE.test(text)
  || QUOTE.test(text) || ITEM.test(text);

function fence(lines, i, [, mark, language]) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end].text)) end += 1;
  return [{ type: "code", language, lines: lines.slice(i + 1, end) }, end + 1];
}

function indented(lines, i) {
  let end = i, last = i;
  for (; end < lines.length && /^( {4}|\t|\s*$)/.test(lines[end].text); end += 1) {
    if (!BLANK.test(lines[end].text)) last = end;
  }
  const kept = lines.slice(i, last + 1);
  const code = kept.map((line) => without(line, line.text.match(/^( {1,4}|\t)?/)[0].length));
  return [{ type: "code", language: "", lines: code }, last + 1];
}

function quote(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
  const inner = lines.slice(i, end).map((line) => without(line, line.text.match(QUOTE)[0].length));
  return [{ type: "quote", blocks: blocksOf(inner, depth + 1) }, end];
}

function list(lines, i, depth) {
  const [, , mark] = lines[i].text.match(ITEM);
  const isOrdered = /\d/.test(mark), items = [];
  let end = i;
  while (end < lines.length) {
    const found = lines[end].text.match(ITEM);
    if (!found || RULE.test(lines[end].text) || /\d/.test(found[2]) !== isOrdered) break;
    const width = found[3].length > 4 ? found[0].length - found[3].length + 1 : found[0].length;
    const indent = Math.max(width, found[1].length + found[2].length + 1);
    const inner = [without(lines[end], found[0].length)];
    end += 1;
    for (; end < lines.length; end += 1) {
      const { text } = lines[end];
      const space = text.match(/^ */)[0].length, isBlank = BLANK.test(text);
      const isAfterBlank = BLANK.test(lines[end - 1].text);
      const isInside = space >= Math.min(indent, isAfterBlank ? indent : 2);
      if (!isBlank && !isInside && (isAfterBlank || begins(text))) break;
      inner.push(without(lines[end], Math.min(space, indent)));
    }
    items.push(blocksOf(inner, depth + 1));
  }
  return [{ type: "list", isOrdered, start: Number.parseInt(mark) || 1, items }, end];
}

function cells({ text, at }) {
  const found = [];
  let begin = /^\s*\|/.test(text) ? text.indexOf("|") + 1 : 0;
  for (let i = begin; i <= text.length; i += 1) {
    if (i < text.length && (text[i] !== "|" || text[i - 1] === "\\")) continue;
    if (i === text.length && BLANK.test(text.slice(begin))) break;
    const cell = text.slice(begin, i), lead = cell.length - cell.trimStart().length;
    found.push({ text: cell.trim(), at: at + begin + lead });
    begin = i + 1;
  }
  return found;
}

function table(lines, i) {
  const sides = cells(lines[i + 1]).map(({ text }) =>
    (text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : "left"));
  let end = i + 2;
  while (end < lines.length && lines[end].text.includes("|")) end += 1;
  return [{ type: "table", sides, head: cells(lines[i]), rows: lines.slice(i + 2, end).map(cells) },
    end];
}

// Build the DOM of a block. emit(from, to) returns the nodes of a range of the source.
export function build(block, emit) {
  const texts = (lines) => spans(inline(lines), emit);
  const all = (blocks) => blocks.map((each) => build(each, emit));
  switch (block.type) {
    case "paragraph": return element("p", { dir: "auto" }, ...texts(block.lines));
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, { dir: "auto" }, ...texts(block.lines));
    case "rule": return element("hr");
    case "quote": return element("blockquote", { dir: "auto" }, ...all(block.blocks));
    case "code": return codeBlock(block, emit);
    case "table": return tableOf(block, texts);
    default: {
      const items = block.items.map((blocks) => element("li", { dir: "auto" }, ...all(blocks)));
      if (!block.isOrdered) return element("ul", {}, ...items);
      return element("ol", { start: block.start }, ...items);
    }
  }
}

function spans(nodes, emit) {
  return nodes.flatMap((node) => {
    if (!node.tag) return [...emit(node.from, node.to)];
    const link = node.tag === "a" ? { href: node.href, target: "_blank", rel: "noopener noreferrer",
      title: node.href } : {};
    return [element(node.tag, link, ...spans(node.children, emit))];
  });
}

function codeBlock({ language, lines }, emit) {
  const code = element("code", {});
  lines.forEach((line, i) => {
    code.append(...emit(line.at, line.at + line.text.length));
    if (i + 1 < lines.length) code.append("\n");
  });
  const button = iconButton("copy", "Copy code", () => copy(code.textContent, button));
  const head = element("div", { className: "code-head" },
    element("span", { text: language || "text" }), button);
  const region = { tabIndex: 0, role: "region", "aria-label": "Code" };
  return element("div", { className: "code" }, head, element("pre", region, code));
}

function tableOf({ sides, head, rows }, texts) {
  const cell = (tag, line, i) =>
    element(tag, { className: `side-${sides[i] ?? "left"}`, dir: "auto" }, ...texts([line]));
  const row = (tag, line) =>
    element("tr", {}, ...line.slice(0, sides.length).map((each, i) => cell(tag, each, i)));
  return element("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" },
    element("table", {}, element("thead", {}, row("th", head)),
      element("tbody", {}, ...rows.map((line) => row("td", line)))));
}
