/** The panel beside the conversation: one answer's timeline, live while it arrives. */

import { byId, download, element } from "./dom.mjs";
import { DOCUMENTED, readable, summary, timelineJson } from "./timeline.mjs";
import { timelineDrawings, timelineSvg } from "./timeline_chart.mjs";

const REDRAW_MS = 200; // the server may need the same processor
const NARROW = "(max-width: 64rem)";
let current = null;
let due = null;

/** Connects the panel's buttons. */
export function setUpTimelinePanel() {
  byId("export-json").addEventListener("click", () => download(fileName("json"), "application/json", timelineJson(current)));
  byId("export-svg").addEventListener("click", () => download(fileName("svg"), "image/svg+xml", timelineSvg(current)));
  byId("show-timeline").addEventListener("click", () => setOpen(byId("timeline").hidden));
  byId("timeline-events").addEventListener("toggle", redraw);
  new ResizeObserver(redrawSoon).observe(byId("chart"));
  setOpen(!matchMedia(NARROW).matches);
  showTimeline(null);
}

/** Opens or closes the panel. */
export function setOpen(open) {
  byId("timeline").hidden = !open;
  byId("show-timeline").setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("with-timeline", open);
  if (open) redraw();
}

/** Shows a timeline, or that there is none. */
export function showTimeline(timeline) {
  current = timeline;
  redraw();
}

/** Redraws a growing timeline, not more often than can be seen. */
export function redrawSoon() {
  due ??= setTimeout(redraw, REDRAW_MS);
}

/** Redraws at once. */
export function redraw() {
  clearTimeout(due);
  due = null;
  byId("timeline-none").hidden = current !== null;
  byId("timeline-shown").hidden = current === null;
  if (!current || byId("timeline").hidden) return;
  byId("figures").replaceChildren(...figures(current));
  const drawings = timelineDrawings(current, Math.max(byId("chart").clientWidth, 240));
  for (const [part, drawing] of Object.entries(drawings)) {
    const place = byId(`chart-${part}`);
    keepingEnd(place, () => place.replaceChildren(drawing));
  }
  byId("server-metrics").replaceChildren(...serverMetrics(current));
  byId("server-reports").hidden = !byId("server-metrics").hasChildNodes();
  if (byId("timeline-events").open) byId("event-rows").replaceChildren(...current.events.map(eventRow));
}

/** Makes a change; what was scrolled to its right end stays there. */
function keepingEnd(scrolled, change) {
  const atEnd = scrolled.scrollLeft + scrolled.clientWidth >= scrolled.scrollWidth - 4;
  change();
  if (atEnd) scrolled.scrollLeft = scrolled.scrollWidth;
}

function figures(timeline) {
  const facts = summary(timeline);
  return [
    figure("First event", facts.firstEvent, `documented ${DOCUMENTED.first_event_ms} ms`, DOCUMENTED.first_event_ms),
    figure("First token", facts.firstToken, "prompt and one step"),
    figure("Between tokens, median", facts.median, `documented ${DOCUMENTED.token_ms} ms`, DOCUMENTED.token_ms),
    figure("95th percentile", facts.p95, "of the same gaps"),
  ];
}

function figure(name, ms, remark, limit = Infinity) {
  const value = element("dd", { class: ms !== null && ms > limit ? "value above" : "value" }, readable(ms));
  return element("div", {}, element("dt", {}, name), value, element("dd", { class: "remark" }, remark));
}

function serverMetrics({ metrics, usage }) {
  const rows = { ...usage, ...metrics };
  return Object.entries(rows)
    .filter(([, value]) => typeof value === "number")
    .map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, String(value))));
}

function eventRow({ kind, ms, gap_ms: gap }) {
  return element("tr", {}, element("td", {}, kind), element("td", {}, ms.toFixed(1)), element("td", {}, gap.toFixed(1)));
}

function fileName(extension) {
  return `timeline-${current.started.replaceAll(/[:.]/g, "-")}.${extension}`;
}
