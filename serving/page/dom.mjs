/** Building documents. Text only ever becomes text nodes: nothing here parses HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Functions among the attributes are listeners (`click: go`), `true` sets an empty attribute,
 * `false`, null and undefined set none. Children are nodes or texts. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svgElement(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** The element with this id, which index.html has. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no element "${id}"`);
  return found;
}

/** Says something to screen readers, without showing it. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Lets the reader keep data as a file. */
export function download(name, type, data) {
  const url = URL.createObjectURL(new Blob([data], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
