/** Markdown as a tree of plain objects: the parts of it that language models write. Work grows linearly with the text,
 * whatever the text is; nesting is limited, and what is deeper stays text. */

const DEEPEST = 6;
const LONGEST_LABEL = 1000;
const LONGEST_MARK = 16;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const QUOTE = /^ {0,3}> ?/;

/** The blocks of a text. */
export function parseBlocks(text, depth = 0) {
  return blocksOf(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), depth);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const { block, end } = blockAt(lines, at, depth);
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const readers = depth < DEEPEST ? [fence, heading, rule, quote, list, table] : [fence, heading, rule];
  for (const read of readers) {
    const found = read(lines, at, depth);
    if (found) return found;
  }
  return paragraph(lines, at);
}

function fence(lines, at) {
  const opening = FENCE.exec(lines[at]);
  if (!opening) return null;
  const [, indent, mark, info] = opening;
  const closes = (line) => {
    const run = line.trim();
    return run.length >= mark.length && run === mark[0].repeat(run.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  return { block: { kind: "code", language: info.trim().split(" ")[0], text: body.join("\n") }, end: end + 1 };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  return { block: { kind: "heading", level: found[1].length, text: found[2].trim() }, end: at + 1 };
}

function rule(lines, at) {
  const marks = lines[at].replaceAll(" ", "");
  const isRule = marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
  return isRule ? { block: { kind: "rule" }, end: at + 1 } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { block: { kind: "quote", blocks: blocksOf(inner, depth + 1) }, end };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const marker = ITEM.exec(lines[next]);
    if (!marker || /\d/.test(marker[2]) !== ordered || rule(lines, next)) break;
    const { inner, end } = item(lines, next, marker);
    items.push(blocksOf(inner, depth + 1));
    next = end;
  }
  if (!items.length) return null;
  return { block: { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : null, items }, end: next };
}

/** An item's own lines: what is indented as its text, across empty lines, and what continues its paragraph. */
function item(lines, at, marker) {
  const indent = marker[1].length + marker[2].length + 1;
  const inner = [lines[at].slice(marker[0].length)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const empty = line.trim() === "";
    const indented = line.search(/\S/) >= Math.min(indent, 2 + marker[1].length);
    const continues = inner.at(-1).trim() !== "" && !startsBlock(lines, end);
    if (!empty && !indented && !continues) break;
    inner.push(line.slice(Math.min(indent, Math.max(line.search(/\S/), 0))));
  }
  while (inner.length > 1 && inner.at(-1).trim() === "") inner.pop();
  return { inner, end };
}

function startsBlock(lines, at) {
  return [FENCE, HEADING, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) || rule(lines, at) !== null;
}

function startsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.length === cells(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

/** A table. Its rows have no more cells than its head; they may have fewer. */
function table(lines, at) {
  if (!startsTable(lines, at)) return null;
  const [head, marks] = [cells(lines[at]), cells(lines[at + 1])];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => cells(line).slice(0, head.length));
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  return { block: { kind: "table", head, align, rows }, end };
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines, end) && !startsTable(lines, end)) end += 1;
  return { block: { kind: "paragraph", text: lines.slice(at, end).join("\n").trim() }, end };
}

/** Searches that only ever move forward: a place found, or not found, is not searched for again. */
class Search {
  #known = new Map();
  #target = { close: -1, found: null };

  constructor(text) {
    this.text = text;
  }

  /** The first place from `from` on where `accepts` holds for `needle`, or -1. */
  next(needle, from, accepts = () => true) {
    const known = this.#known.get(needle);
    if (known && known.from <= from && (known.place === -1 || known.place >= from)) return known.place;
    let place = this.text.indexOf(needle, from);
    while (place !== -1 && !accepts(place)) place = this.text.indexOf(needle, place + 1);
    this.#known.set(needle, { from, place });
    return place;
  }

  /** The address of the link whose text ends at `close`, and where the link ends; null if it is none. */
  target(close) {
    if (this.#target.close === close) return this.#target.found;
    const pattern = /[ \n]{0,9}<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:[ \n]{1,9}"[^"\n]*")?[ \n]{0,9}\)/y;
    pattern.lastIndex = close + 2;
    const match = pattern.exec(this.text.slice(0, close + 2 + LONGEST_LABEL));
    this.#target = { close, found: match && { address: match[1], end: pattern.lastIndex } };
    return this.#target.found;
  }
}

/** The texts (as strings) and marked parts of a line or paragraph. */
export function parseInline(text, depth = 0) {
  const nodes = [];
  const search = new Search(text);
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = special(text, at, depth, search);
    if (!found) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (found.node.kind && plain) {
      nodes.push(plain);
      plain = "";
    }
    if (found.node.kind) nodes.push(found.node);
    else plain += found.node;
    at = found.end;
  }
  return plain ? [...nodes, plain] : nodes;
}

function special(text, at, depth, search) {
  switch (text[at]) {
    case "\n":
      return { node: { kind: "break" }, end: at + 1 };
    case "\\":
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`":
      return code(text, at, search);
    case "!":
      return text[at + 1] === "[" ? link(text, at + 1, depth, search, "picture") : null;
    case "[":
      return link(text, at, depth, search, "link");
    case "h":
      return address(text, at);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth, search);
    default:
      return null;
  }
}

function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return text.slice(at, end);
}

function code(text, at, search) {
  const mark = run(text, at);
  const start = at + mark.length;
  if (mark.length > LONGEST_MARK) return { node: mark, end: start };
  const end = search.next(mark, start, (place) => text[place + mark.length] !== "`" && text[place - 1] !== "`");
  if (end <= start) return { node: mark, end: start };
  return { node: { kind: "code", text: text.slice(start, end).replaceAll("\n", " ") }, end: end + mark.length };
}

const EMPHASIS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "~~": ["del"], "*": ["em"], _: ["em"] };

function emphasis(text, at, depth, search) {
  const mark = run(text, at);
  const literal = { node: mark, end: at + mark.length };
  const kinds = EMPHASIS[mark];
  const start = at + mark.length;
  const word = (place) => /\w/.test(text[place] ?? "");
  const inWord = mark[0] === "_" && word(at - 1);
  if (!kinds || depth >= DEEPEST || inWord || /^\s?$/.test(text[start] ?? "")) return literal;
  const end = search.next(mark, start, (place) => {
    const alone = text[place - 1] !== mark[0] && text[place + mark.length] !== mark[0];
    return alone && !/\s/.test(text[place - 1]) && !(mark[0] === "_" && word(place + mark.length));
  });
  if (end <= start) return literal;
  const inner = parseInline(text.slice(start, end), depth + 1);
  const node = kinds.reduceRight((children, kind) => [{ kind, children }], inner)[0];
  return { node, end: end + mark.length };
}

function link(text, at, depth, search, kind) {
  const close = search.next("](", at + 1);
  if (close === -1 || close - at > LONGEST_LABEL || depth >= DEEPEST) return null;
  const target = search.target(close);
  if (!target) return null;
  const label = text.slice(at + 1, close);
  const children = kind === "picture" ? [`picture: ${label}`] : parseInline(label, depth + 1);
  return { node: linked(target.address, children), end: target.end };
}

function address(text, at) {
  if (/\w/.test(text[at - 1] ?? "")) return null;
  const pattern = /https?:\/\/[^\s<>"'`，。；、（）]+/y;
  pattern.lastIndex = at;
  const found = pattern.exec(text)?.[0].replace(/[.,;:!?)\]*_]{1,9}$/, "");
  return found ? { node: linked(found, [found]), end: at + found.length } : null;
}

/** A link, or the same text without one if its address is not for the web or mail. */
function linked(url, children) {
  const safe = safeAddress(url);
  return { kind: safe ? "link" : "text", url: safe, children };
}

/** The address, normalised, if it is an absolute one of a kind that runs nothing; otherwise null. */
export function safeAddress(url) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
}
