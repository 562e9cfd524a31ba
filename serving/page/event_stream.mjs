/** Server-sent events out of bytes that arrive in pieces of any size.
 * https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream */

export class EventStreamParser {
  #decoder = new TextDecoder("utf-8"); // drops a byte order mark, and holds back incomplete characters
  #line = "";
  #afterReturn = false;
  #data = [];

  /** The events that these bytes complete: `{kind: "data", data}` and `{kind: "comment", text}`. */
  push(bytes) {
    const events = [];
    let text = this.#decoder.decode(bytes, { stream: true });
    if (this.#afterReturn && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#afterReturn = false;
    }
    const lines = text.split(/\r\n|\r|\n/);
    this.#afterReturn = text.endsWith("\r");
    for (const rest of lines.slice(0, -1)) {
      this.#take(this.#line + rest, events);
      this.#line = "";
    }
    this.#line += lines.at(-1);
    return events;
  }

  #take(line, events) {
    if (line === "") {
      if (this.#data.length) events.push({ kind: "data", data: this.#data.join("\n") });
      this.#data = [];
    } else if (line.startsWith(":")) {
      events.push({ kind: "comment", text: line.slice(1).trim() });
    } else if (line === "data") {
      this.#data.push("");
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}
