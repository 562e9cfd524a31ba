/** What can go wrong with a request, and what to tell the reader. */

/** A request that failed. `status` is 0 without a reply, and for what fails inside a stream. */
export class Problem extends Error {
  constructor({ status = 0, code = null, message = "", retryAfter = null, started = false }) {
    super(message);
    this.facts = { status, code, message, retryAfter, started };
  }

  /** From a reply that is not 200; the body should be OpenAI's error object. */
  static async fromResponse(response) {
    const body = await response.json().catch(() => null);
    return new Problem({
      status: response.status,
      code: body?.error?.code ?? null,
      message: String(body?.error?.message ?? ""),
      retryAfter: Number(response.headers.get("Retry-After")) || null,
    });
  }

  /** From an error frame in a stream. */
  static fromFrame(error) {
    const code = error?.code ?? "stream_error";
    return new Problem({ code, message: String(error?.message ?? ""), started: true });
  }

  /** No connection, or one that ended before the answer did. */
  static disconnected(started) {
    return new Problem({ code: "disconnected", started });
  }

  /** An answer of which the rest may or may not be received. */
  static incomplete() {
    return new Problem({ code: "incomplete", started: true });
  }
}

const WORDS = {
  disconnected: "There is no connection to the server.",
  incomplete: "This answer is not complete.",
  queue_full: "Too many requests are waiting for the server.",
  loading: "The model is still loading.",
  draining: "The server is shutting down.",
  error: "The server’s engine has failed. It has to be restarted.",
  engine_error: "The server failed while computing this answer.",
  context_length_exceeded: "This conversation is longer than the model can read. Start a new one, or edit the last message.",
  model_not_found: "The server no longer has this model. Reload the page.",
};
const WORDS_BY_STATUS = {
  400: "The server cannot use this message as it is.",
  401: "The server wants an API key. Enter it in the settings.",
  403: "The server wants an API key. Enter it in the settings.",
  408: "The message took too long to reach the server.",
  413: "This conversation and its pictures are larger than the server takes. Start a new one, or edit the last message.",
  429: "Too many requests are waiting for the server.",
  503: "The server cannot take requests at the moment.",
};

/** What the server itself said, where that tells more than the plain words; otherwise an empty text. */
export function serverDetail({ code, message }) {
  return ["loading", "draining", "engine_error", "invalid_api_key"].includes(code) ? "" : message;
}

/** A sentence or two about a problem's facts. */
export function inPlainWords({ status, code, message, retryAfter, started }) {
  if (code === "disconnected" && started) return "The connection was lost before the answer was complete.";
  const words = WORDS[code] ?? WORDS_BY_STATUS[status] ?? "The server could not answer.";
  return retryAfter ? `${words} Try again in ${retryAfter} ${retryAfter === 1 ? "second" : "seconds"}.` : words;
}
