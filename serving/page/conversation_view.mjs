/** The conversation on the page. A message is `{role, text, pictures}` or `{role, text, thinking,
 * finish, problem, timeline}`. */

import { byId, element } from "./dom.mjs";
import { copyButton, showMarkdown } from "./markdown_view.mjs";
import { inPlainWords, serverDetail } from "./problems.mjs";

const ENDS = { length: "Ended at the limit of tokens.", stopped: "Stopped." };

/** Shows all messages. `actions` are `retry()`, `edit()` and `show(timeline)`. */
export function showConversation(messages, actions) {
  byId("messages").replaceChildren(...messages.map((message) => messageElement(message, actions)));
  byId("empty").hidden = messages.length > 0;
  const last = messages.at(-1);
  if (last?.role === "user") byId("messages").append(unanswered(actions));
  scrollToEnd();
}

/** Adds an answer that is about to arrive. Returns what shows its text as it grows, and its end. */
export function addAnswer(message, actions) {
  const body = element("div", { class: "text", dir: "auto" });
  const thinking = thinkingElement(message);
  const item = element("li", { class: "answer arriving" }, author(message.timeline.model), thinking.shown, body);
  byId("messages").querySelector(".unanswered")?.remove();
  byId("messages").append(item);
  scrollToEnd();
  return {
    grow: () =>
      keepingEnd(() => {
        thinking.grow();
        showMarkdown(body, message.text);
      }),
    end: () => keepingEnd(() => item.replaceWith(messageElement(message, actions))),
  };
}

function messageElement(message, actions) {
  return message.role === "user" ? question(message) : answer(message, actions);
}

function question({ text, pictures }) {
  const images = pictures.map((picture) => element("img", { src: picture.url, alt: picture.name }));
  const shown = images.length ? element("div", { class: "pictures" }, ...images) : null;
  const words = text ? element("div", { class: "text plain", dir: "auto" }, text) : null;
  return element("li", { class: "question" }, author("You"), shown, words);
}

function answer(message, actions) {
  const { text, finish, problem, timeline } = message;
  const body = element("div", { class: "text", dir: "auto" });
  showMarkdown(body, text);
  const end = ENDS[finish] ?? (finish === "stop" && !text ? "The answer is empty." : null);
  const foot = element(
    "div",
    { class: "foot" },
    end ? element("span", {}, end) : null,
    text ? copyButton(text, "Copy answer") : null,
    timeline.events.length ? timelineButton(() => actions.show(timeline)) : null,
  );
  const trouble = problem ? notice(problem, actions) : null;
  return element("li", { class: "answer" }, author(timeline.model), thinkingElement(message).shown, body, foot, trouble);
}

function timelineButton(click) {
  return element("button", { type: "button", class: "quiet", "aria-label": "Show the timeline of this answer", click }, "Timeline");
}

/** What the model thought before it answered: closed, and not there as long as there is none. */
function thinkingElement(message) {
  const text = element("div", { class: "plain", dir: "auto" });
  const shown = element("details", { class: "thinking" }, element("summary", {}, "Thinking"), text);
  const grow = () => {
    text.textContent = message.thinking;
    shown.hidden = !message.thinking;
  };
  grow();
  return { shown, grow };
}

function author(name) {
  return element("h2", { class: "author" }, name);
}

function notice(problem, actions) {
  const said = serverDetail(problem);
  const detail = said ? element("p", { class: "detail" }, `The server says: ${said}`) : null;
  const words = element("p", {}, inPlainWords(problem));
  return element("div", { class: "notice", role: "alert" }, words, detail, ways(actions));
}

/** After a reload in the middle of a request. */
function unanswered(actions) {
  return element("li", { class: "notice unanswered" }, element("p", {}, "This message has not been answered."), ways(actions));
}

function ways({ retry, edit }) {
  const button = (text, click) => element("button", { type: "button", click }, text);
  return element("div", { class: "ways" }, button("Try again", retry), button("Edit message", edit));
}

/** Makes a change; where the end was in view, it stays in view. */
function keepingEnd(change) {
  const view = byId("conversation");
  const atEnd = view.scrollTop + view.clientHeight >= view.scrollHeight - 48;
  change();
  if (atEnd) scrollToEnd();
}

function scrollToEnd() {
  const view = byId("conversation");
  view.scrollTop = view.scrollHeight;
}
