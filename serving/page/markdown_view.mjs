/** A model's answer on the page: Markdown as elements, made one by one. */

import { announce, element } from "./dom.mjs";
import { parseBlocks, parseInline } from "./markdown.mjs";

const shown = new WeakMap();

/** Shows a text in a container. Blocks that are as they were keep their elements, so that a growing answer costs little
 * and a selection in it survives. */
export function showMarkdown(container, text) {
  const blocks = parseBlocks(text);
  blocks.forEach((block, index) => {
    const content = JSON.stringify(block);
    const old = container.children[index];
    if (old && shown.get(old) === content) return;
    const made = blockElement(block);
    shown.set(made, content);
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function blockElement(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading": // the page's own headings are above these
      return element(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return element(block.ordered ? "ol" : "ul", { start: block.start }, ...block.items.map(listItem));
    case "table":
      return tableBlock(block);
    default:
      return element("p", {}, ...inline(block.text));
  }
}

/** An item whose first block is a paragraph shows it without one, as tight lists do. */
function listItem(blocks) {
  const [first, ...rest] = blocks;
  const start = first?.kind === "paragraph" ? inline(first.text) : blocks.slice(0, 1).map(blockElement);
  return element("li", {}, ...start, ...rest.map(blockElement));
}

function tableBlock({ head, align, rows }) {
  const cell = (name) => (text, index) => element(name, { class: `align-${align[index]}` }, ...inline(text));
  const body = rows.map((row) => element("tr", {}, ...row.map(cell("td"))));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map(cell("th")))), element("tbody", {}, ...body));
  return element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, table);
}

function codeBlock({ language, text }) {
  const pre = element("pre", { tabindex: 0 }, element("code", {}, text));
  const bar = element("div", { class: "code-bar" }, element("span", {}, language || "code"), copyButton(text, "Copy code"));
  return element("div", { class: "code" }, bar, pre);
}

/** A button that copies a text; null where the browser does not allow it (pages over http from another machine). */
export function copyButton(text, label) {
  if (!navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    announce("Copied");
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const button = element("button", { type: "button", class: "quiet", "aria-label": label, click: copy }, "Copy");
  return button;
}

function inline(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  if (typeof node === "string") return node;
  if (node.kind === "break") return element("br");
  if (node.kind === "code") return element("code", {}, node.text);
  const children = node.children.map(inlineNode);
  if (node.kind === "link") {
    return element("a", { href: node.url, title: node.url, target: "_blank", rel: "noopener noreferrer" }, ...children);
  }
  return element(node.kind === "text" ? "span" : node.kind, {}, ...children);
}
