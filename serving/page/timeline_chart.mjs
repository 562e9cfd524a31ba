/** A timeline drawn: the way to the first token, and a bar for every gap between pieces of text. */

import { svgElement } from "./dom.mjs";
import { DOCUMENTED, readable, summary } from "./timeline.mjs";

const LEFT = 48; // room for the scale of the bars
const RIGHT = 8;
const STRIP = { top: 24, thick: 14, height: 76 };
const BARS = { top: 32, tall: 120, height: 176 };
const WIDEST_BAR = 9;
const NARROWEST_BAR = 3;
const EXPORT_WIDTH = 720;
const EXPORT_STYLE = `
  svg { background: #ffffff; font: 11px system-ui, sans-serif; }
  text { fill: #5b5850; } .heading { fill: #1f1e1b; font-weight: 600; font-size: 12px; } .track { fill: #ece8e0; }
  .waiting { fill: #9dbdd2; } .prefill, .within { fill: #3f7ca5; } .above { fill: #b65c26; }
  .axis { stroke: #b9b4a8; } .documented { stroke: #1f1e1b; stroke-dasharray: 4 3; } .documented-label { fill: #1f1e1b; }
`;

/** The drawings for a panel `width` CSS pixels wide: the strip, the scale of the bars, and the bars, which may be wider
 * than what is left beside the scale. Colours come from the style sheet. */
export function timelineDrawings(timeline, width) {
  const facts = summary(timeline);
  const room = width - LEFT;
  const described = { role: "img", "aria-label": inWords(facts) };
  return {
    strip: drawing(width, STRIP.height, described, ...strip(facts, width)),
    scale: drawing(LEFT, BARS.height, { "aria-hidden": "true" }, ...scale(facts)),
    bars: drawing(barsWidth(facts, room), BARS.height, { "aria-hidden": "true" }, ...bars(facts, room)),
  };
}

/** The same in one piece, as the text of an SVG file with its own colours and a title. */
export function timelineSvg(timeline) {
  const facts = summary(timeline);
  const room = EXPORT_WIDTH - LEFT;
  const width = LEFT + barsWidth(facts, room);
  const moved = (x, y, parts) => svgElement("g", { transform: `translate(${x} ${y})` }, ...parts);
  const margin = 16;
  const chart = drawing(
    width + 2 * margin,
    STRIP.height + BARS.height + 2 * margin,
    {},
    svgElement("title", {}, `${timeline.model}, ${timeline.started}: ${inWords(facts)}`),
    svgElement("style", {}, EXPORT_STYLE),
    moved(margin, margin, strip(facts, width)),
    moved(margin, margin + STRIP.height, scale(facts)),
    moved(margin + LEFT, margin + STRIP.height, bars(facts, room)),
  );
  return new XMLSerializer().serializeToString(chart);
}

function drawing(width, height, attributes, ...parts) {
  return svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...attributes }, ...parts);
}

/** What the drawings say, as sentences. */
function inWords({ firstEvent, firstToken, gaps, median, slow }) {
  if (firstEvent === null) return "No event has come yet.";
  const start = `First event after ${readable(firstEvent)} (documented: ${DOCUMENTED.first_event_ms} ms), `;
  const first = firstToken === null ? "no token yet." : `first token after ${readable(firstToken)}.`;
  const rest = ` ${gaps.length} gaps between tokens, median ${readable(median)}, ${slow} above the documented ${DOCUMENTED.token_ms} ms.`;
  return start + first + (gaps.length ? rest : "");
}

function strip({ firstEvent, firstToken, total }, width) {
  const { top, thick } = STRIP;
  const longest = Math.max(firstToken ?? total ?? 0, DOCUMENTED.first_event_ms * 1.25);
  const x = (ms) => ((width - RIGHT) * ms) / longest;
  const box = (kind, from, to) =>
    svgElement("rect", { class: kind, x: x(from), y: top, width: Math.max(x(to) - x(from), 1), height: thick });
  const line = x(DOCUMENTED.first_event_ms);
  return [
    heading("Until the first token"),
    box("track", 0, longest),
    firstEvent === null ? null : box("waiting", 0, firstEvent),
    firstToken === null ? null : box("prefill", firstEvent, firstToken),
    svgElement("line", { class: "documented", x1: line, x2: line, y1: top - 5, y2: top + thick + 5 }),
    label(`${DOCUMENTED.first_event_ms} ms`, Math.max(line, 20), top + thick + 18, "documented-label", "middle"),
    line < width * 0.7 ? label(readable(longest), width - RIGHT, top + thick + 18, "", "end") : null,
  ];
}

/** Milliseconds at the top of the bars: a round number from 75 on, so that few gaps reach beyond it. */
function highest({ p95 }) {
  const needed = Math.max(DOCUMENTED.token_ms * 1.5, (p95 ?? 0) * 1.25);
  const power = 10 ** Math.floor(Math.log10(needed));
  return power * [1, 1.5, 2, 3, 5, 7.5, 10].find((factor) => factor * power >= needed);
}

function heightAt(ms, facts) {
  return BARS.top + BARS.tall * (1 - Math.min(ms / highest(facts), 1));
}

function scale(facts) {
  const mark = (ms, kind) => label(`${ms} ms`, LEFT - 6, heightAt(ms, facts) + 4, kind, "end");
  const limit = DOCUMENTED.token_ms;
  const legible = heightAt(0, facts) - heightAt(limit, facts) > 14;
  return [heading("Between tokens"), legible ? mark(0, "") : null, mark(limit, "documented-label"), mark(highest(facts), "")];
}

function barStep({ gaps }, room) {
  return Math.min(Math.max((room - RIGHT) / Math.max(gaps.length, 1), NARROWEST_BAR), WIDEST_BAR);
}

function barsWidth(facts, room) {
  return Math.max(room, Math.ceil(RIGHT + barStep(facts, room) * facts.gaps.length));
}

function bars(facts, room) {
  const bottom = BARS.top + BARS.tall;
  const step = barStep(facts, room);
  const width = barsWidth(facts, room);
  const thick = Math.max(step - 1, 2).toFixed(1);
  const bar = (gap, index) => {
    const top = Math.min(heightAt(gap, facts), bottom - 1);
    return `M${(index * step).toFixed(1)} ${bottom}V${top.toFixed(1)}h${thick}V${bottom}z`;
  };
  const path = (accepts) => facts.gaps.map((gap, index) => (accepts(gap) ? bar(gap, index) : "")).join("");
  const across = (kind, y) => svgElement("line", { class: kind, x1: 0, x2: width, y1: y, y2: y });
  const limit = DOCUMENTED.token_ms;
  const count = facts.gaps.length;
  return [
    svgElement("path", { class: "within", d: path((gap) => gap <= limit) }),
    svgElement("path", { class: "above", d: path((gap) => gap > limit) }),
    across("axis", bottom + 0.5),
    across("documented", heightAt(limit, facts)),
    count ? label(`${count}`, Math.max(step * count, 20), bottom + 18, "", "end") : null,
  ];
}

function heading(text) {
  return svgElement("text", { class: "heading", x: 0, y: 12 }, text);
}

function label(text, x, y, kind, anchor) {
  return svgElement("text", { class: kind || null, x, y, "text-anchor": anchor }, text);
}
