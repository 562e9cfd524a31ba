/** The server's API, as far as the page needs it. Addresses are relative, so that a prefix before the page is kept. */

import { EventStreamParser } from "./event_stream.mjs";
import { Problem } from "./problems.mjs";

const HEALTH_SECONDS = 5;

/** What the server says of itself, or null if it does not answer. */
export async function askHealth() {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(HEALTH_SECONDS * 1000) });
    return await response.json();
  } catch {
    return null;
  }
}

/** The frames of a streamed chat completion as `{at, frame}`; `at` is the moment of arrival on performance.now()'s
 * clock, `frame` an object, null for a comment, or "[DONE]", which comes last.
 * Throws a Problem, or an AbortError after `signal`. */
export async function* streamCompletion(request, { key, signal }) {
  const reader = (await send(request, key, signal)).body.getReader();
  const parser = new EventStreamParser();
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : Problem.disconnected(true);
    });
    if (done) throw Problem.disconnected(true);
    const at = performance.now();
    for (const event of parser.push(value)) {
      if (event.kind === "comment") yield { at, frame: null };
      else if (event.data === "[DONE]") return yield { at, frame: "[DONE]" };
      else yield { at, frame: checked(event.data) };
    }
  }
}

async function send(request, key, signal) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const options = { method: "POST", headers, body: JSON.stringify(request), signal };
  const response = await fetch("v1/chat/completions", options).catch((error) => {
    throw signal.aborted ? error : Problem.disconnected(false);
  });
  if (!response.ok) throw await Problem.fromResponse(response);
  return response;
}

function checked(data) {
  let frame;
  try {
    frame = JSON.parse(data);
  } catch {
    throw Problem.fromFrame({ message: `a frame is not JSON: ${data.slice(0, 80)}` });
  }
  if (frame?.error) throw Problem.fromFrame(frame.error);
  return frame ?? {};
}
