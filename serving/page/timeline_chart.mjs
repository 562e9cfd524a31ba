/** A timeline drawn: the way to the first token, and a bar for every gap between pieces of text. */

import { svgElement } from "./dom.mjs";
import { DOCUMENTED, readable, summary } from "./timeline.mjs";

const LEFT = 44;
const RIGHT = 12;
const STRIP = { top: 30, height: 14 };
const BARS = { top: 104, height: 130 };
const HEIGHT = BARS.top + BARS.height + 24;
const WIDEST_BAR = 9;
const NARROWEST_BAR = 3;
const EXPORT_WIDTH = 720;
const EXPORT_STYLE = `
  svg { background: #ffffff; font: 11px system-ui, sans-serif; }
  text { fill: #55524b; } .title { fill: #1f1e1b; font-weight: 600; } .track { fill: #ece8e0; }
  .waiting { fill: #9dbdd2; } .prefill, .within { fill: #3f7ca5; } .above { fill: #b65c26; }
  .axis { stroke: #b9b4a8; } .documented { stroke: #1f1e1b; stroke-dasharray: 4 3; } .documented-label { fill: #1f1e1b; }
`;

/** The drawing at a width in CSS pixels; wider if there are more gaps than fit. Colours come from the style sheet. */
export function timelineChart(timeline, width) {
  const facts = summary(timeline);
  const step = Math.min(Math.max((width - LEFT - RIGHT) / Math.max(facts.gaps.length, 1), NARROWEST_BAR), WIDEST_BAR);
  const drawn = Math.max(width, Math.ceil(LEFT + RIGHT + step * facts.gaps.length));
  const attributes = { viewBox: `0 0 ${drawn} ${HEIGHT}`, width: drawn, height: HEIGHT, role: "img", "aria-label": inWords(facts) };
  return svgElement("svg", attributes, ...strip(facts, width), ...bars(facts, drawn, step));
}

/** The same as the text of an SVG file, with its own colours and a title. */
export function timelineSvg(timeline) {
  const chart = timelineChart(timeline, EXPORT_WIDTH);
  const title = `${timeline.model}, ${timeline.started}: ${inWords(summary(timeline))}`;
  chart.prepend(svgElement("title", {}, title), svgElement("style", {}, EXPORT_STYLE));
  return new XMLSerializer().serializeToString(chart);
}

/** What the drawing says, as a sentence. */
function inWords({ firstEvent, firstToken, gaps, median, slow }) {
  if (firstEvent === null) return "No event has come yet.";
  const start = `First event after ${readable(firstEvent)} (documented: ${DOCUMENTED.first_event_ms} ms), `;
  const first = firstToken === null ? "no token yet." : `first token after ${readable(firstToken)}.`;
  const rest = ` ${gaps.length} gaps between tokens, median ${readable(median)}, ${slow} above the documented ${DOCUMENTED.token_ms} ms.`;
  return start + first + (gaps.length ? rest : "");
}

function strip({ firstEvent, firstToken, total }, width) {
  const { top, height } = STRIP;
  const longest = Math.max(firstToken ?? total ?? 0, DOCUMENTED.first_event_ms * 1.25);
  const x = (ms) => LEFT + ((width - LEFT - RIGHT) * ms) / longest;
  const box = (kind, from, to) =>
    svgElement("rect", { class: kind, x: x(from), y: top, width: Math.max(x(to) - x(from), 1), height });
  const parts = [heading("Until the first token", 12), box("track", 0, longest)];
  if (firstEvent !== null) parts.push(box("waiting", 0, firstEvent));
  if (firstToken !== null) parts.push(box("prefill", firstEvent, firstToken));
  const line = x(DOCUMENTED.first_event_ms);
  parts.push(
    svgElement("line", { class: "documented", x1: line, x2: line, y1: top - 5, y2: top + height + 5 }),
    label(`${DOCUMENTED.first_event_ms} ms`, line, top + height + 18, "documented-label", line > width - 70 ? "end" : "middle"),
    label("0", LEFT, top + height + 18, "", "middle"),
  );
  if (line < width * 0.75) parts.push(label(readable(longest), width - RIGHT, top + height + 18, "", "end"));
  return parts;
}

function bars({ gaps, p95 }, width, step) {
  const { top, height } = BARS;
  const bottom = top + height;
  const highest = niceAbove(Math.max(DOCUMENTED.token_ms * 1.5, (p95 ?? 0) * 1.25));
  const y = (ms) => bottom - (height * Math.min(ms, highest)) / highest;
  const thick = Math.max(step - 1, 2);
  const path = (accepts) =>
    gaps.map((gap, index) => (accepts(gap) ? barPath(LEFT + index * step, Math.min(y(gap), bottom - 1), thick, bottom) : "")).join("");
  const line = y(DOCUMENTED.token_ms);
  const limit = DOCUMENTED.token_ms;
  return [
    heading("Between tokens", top - 16),
    svgElement("path", { class: "within", d: path((gap) => gap <= limit) }),
    svgElement("path", { class: "above", d: path((gap) => gap > limit) }),
    svgElement("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bottom + 0.5, y2: bottom + 0.5 }),
    svgElement("line", { class: "documented", x1: LEFT, x2: width - RIGHT, y1: line, y2: line }),
    label(`${limit} ms`, LEFT - 6, line + 4, "documented-label", "end"),
    ...(highest < limit * 1.2 ? [] : [label(readable(highest).replace(".0 ", " "), LEFT - 6, top + 4, "", "end")]),
    label("0", LEFT - 6, bottom + 4, "", "end"),
    gaps.length ? label(String(gaps.length), LEFT + gaps.length * step, bottom + 17, "", "end") : null,
  ];
}

function barPath(x, y, width, bottom) {
  return `M${x.toFixed(1)} ${bottom}V${y.toFixed(1)}h${width.toFixed(1)}V${bottom}z`;
}

/** The next of 75, 100, 150, 200, 300, 500, 750, 1000, ... */
function niceAbove(ms) {
  const power = 10 ** Math.floor(Math.log10(ms));
  const factor = [1, 1.5, 2, 3, 5, 7.5, 10].find((candidate) => candidate * power >= ms);
  return factor * power;
}

function heading(text, y) {
  return svgElement("text", { class: "title", x: 0, y }, text);
}

function label(text, x, y, kind, anchor) {
  return svgElement("text", { class: kind || null, x, y, "text-anchor": anchor }, text);
}
