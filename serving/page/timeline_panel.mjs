/** The panel beside the conversation: one answer's timeline, live while it arrives. */

import { byId, download, element } from "./dom.mjs";
import { DOCUMENTED, readable, summary, timelineJson } from "./timeline.mjs";
import { timelineChart, timelineSvg } from "./timeline_chart.mjs";

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

/** The timeline that is shown. */
export function shownTimeline() {
  return current;
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
  const chart = byId("chart");
  const atEnd = chart.scrollLeft + chart.clientWidth >= chart.scrollWidth - 4;
  chart.replaceChildren(timelineChart(current, Math.max(chart.clientWidth, 240)));
  if (atEnd) chart.scrollLeft = chart.scrollWidth;
  byId("server-metrics").replaceChildren(...serverMetrics(current));
  if (byId("timeline-events").open) byId("event-rows").replaceChildren(...current.events.map(eventRow));
}

function figures(timeline) {
  const facts = summary(timeline);
  return [
    figure("First event", facts.firstEvent, `documented ${DOCUMENTED.first_event_ms} ms`, DOCUMENTED.first_event_ms),
    figure("First token", facts.firstToken, "with the prompt read"),
    figure("Between tokens", facts.median, `median; documented ${DOCUMENTED.token_ms} ms`, DOCUMENTED.token_ms),
    figure("Slowest 5 %", facts.p95, "gaps from here on"),
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
