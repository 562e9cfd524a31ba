/** When the events of one answer arrived, in milliseconds since the request was sent. */

/** The figures that Kestrel-LLM documents: its first event, and a token of its steady run. */
export const DOCUMENTED = { first_event_ms: 130, token_ms: 50 };

const TEXT = ["token", "thinking"];

/** An empty timeline; `settings` is what the request asked for besides messages. */
export function newTimeline(model, settings) {
  return { model, started: new Date().toISOString(), settings, events: [], metrics: null, usage: null };
}

/** Notes a frame as chat_client.mjs yields it; `ms` is the time since the request was sent. Returns the event's kind. */
export function note(timeline, frame, ms) {
  const kind = kindOf(frame);
  const event = { kind, ms: round(ms), gap_ms: round(ms - (timeline.events.at(-1)?.ms ?? 0)) };
  if (TEXT.includes(kind)) event.characters = [...textOf(frame)].length;
  timeline.events.push(event);
  if (frame?.metrics) timeline.metrics = frame.metrics;
  if (frame?.usage) timeline.usage = frame.usage;
  return kind;
}

/** The text that a frame brings; that of the model's thinking has a field of its own. */
export function textOf(frame) {
  const delta = frame?.choices?.[0]?.delta;
  return delta?.content || delta?.reasoning_content || "";
}

function kindOf(frame) {
  if (frame === null) return "comment";
  if (frame === "[DONE]") return "done";
  const choice = frame.choices?.[0];
  if (choice?.finish_reason) return "finish";
  if (choice?.delta?.content) return "token";
  if (choice?.delta?.reasoning_content) return "thinking";
  if (choice?.delta?.role) return "role";
  if (frame.metrics) return "metrics";
  return frame.usage ? "usage" : "other";
}

/** What a timeline shows: null where an event has not come (yet). A gap is the time between two pieces of text. */
export function summary({ events }) {
  const firstOf = (kind) => events.find((event) => event.kind === kind)?.ms ?? null;
  const tokens = events.filter((event) => TEXT.includes(event.kind)).map((event) => event.ms);
  const gaps = tokens.slice(1).map((ms, index) => round(ms - tokens[index]));
  return {
    firstEvent: events.find((event) => event.kind !== "comment")?.ms ?? null,
    role: firstOf("role"),
    firstToken: tokens[0] ?? null,
    gaps,
    median: quantile(gaps, 0.5),
    p95: quantile(gaps, 0.95),
    slow: gaps.filter((gap) => gap > DOCUMENTED.token_ms).length,
    total: events.at(-1)?.ms ?? null,
  };
}

/** The smallest value that at least this share of the values does not exceed. */
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(Math.ceil(share * sorted.length) - 1, 0)];
}

/** The timeline as a file: raw events, what follows from them, and what they are compared with. */
export function timelineJson(timeline) {
  return JSON.stringify({ documented: DOCUMENTED, ...timeline, summary: summary(timeline) }, null, 2);
}

/** Milliseconds as people read them. */
export function readable(ms) {
  if (ms === null) return "–";
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function round(ms) {
  return Math.round(ms * 10) / 10;
}
