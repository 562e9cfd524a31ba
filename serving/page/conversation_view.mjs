/** The conversation on the page; conversation.mjs says what it consists of. */

import { byId, element } from "./dom.mjs";
import { copyButton, showMarkdown } from "./markdown_view.mjs";
import { inPlainWords, serverDetail } from "./problems.mjs";

const ENDS = { length: "Ended at the limit of tokens.", stopped: "Stopped." };
const shown = new WeakMap(); // the elements of questions and answers
const growing = new WeakMap(); // what shows more of an answer that arrives

/** Shows all turns; what was shown already keeps its elements. `running` is the request under way, or null, as main.mjs
 * has it. `actions` are `retry()` and `edit()`, which are about the last turn, and `show(timeline)`. */
export function showConversation(turns, running, actions) {
  const items = turns.flatMap((turn) => turnElements(turn, running, actions));
  keepingEnd(() => {
    arrange(byId("messages"), items);
    byId("empty").hidden = turns.length > 0;
  });
}

/** Shows what has come of an answer that arrives. */
export function growAnswer(answer) {
  keepingEnd(growing.get(answer));
}

/** Brings the end of the conversation into view. */
export function scrollToEnd() {
  const view = byId("conversation");
  view.scrollTop = view.scrollHeight;
}

/** Makes a change; where the end was in view, it stays in view. */
function keepingEnd(change) {
  const view = byId("conversation");
  const atEnd = view.scrollTop + view.clientHeight >= view.scrollHeight - 48;
  change();
  if (atEnd) scrollToEnd();
}

/** Makes these nodes the children. Those that are at their place are not touched: they keep focus and selection. */
function arrange(parent, nodes) {
  const staying = new Set(nodes);
  for (const child of [...parent.children]) if (!staying.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

function turnElements({ id, question, answer }, running, actions) {
  const asked = elementOf(question, questionElement);
  if (id === running?.id) return [asked, elementOf(running.answer, arrivingElement)];
  return [asked, answer ? elementOf(answer, () => answerElement(answer, actions)) : unanswered(actions)];
}

function elementOf(part, make) {
  if (!shown.has(part)) shown.set(part, make(part));
  return shown.get(part);
}

function questionElement({ text, pictures }) {
  const images = pictures.map((picture) => element("img", { src: picture.url, alt: picture.name }));
  const drawn = images.length ? element("div", { class: "pictures" }, ...images) : null;
  const words = text ? element("div", { class: "text plain", dir: "auto" }, text) : null;
  return element("li", { class: "question" }, author("You"), drawn, words);
}

function arrivingElement(answer) {
  const body = element("div", { class: "text", dir: "auto" });
  const thinking = thinkingElement(answer);
  growing.set(answer, () => {
    thinking.grow();
    showMarkdown(body, answer.text);
  });
  return element("li", { class: "answer arriving" }, author(answer.timeline.model), thinking.shown, body);
}

function answerElement(answer, actions) {
  const { text, finish, problem, timeline } = answer;
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
  return element("li", { class: "answer" }, author(timeline.model), thinkingElement(answer).shown, body, foot, trouble);
}

function timelineButton(click) {
  return element("button", { type: "button", class: "quiet", "aria-label": "Show the timeline of this answer", click }, "Timeline");
}

/** What the model thought before it answered: closed, and not there as long as there is none. */
function thinkingElement(answer) {
  const text = element("div", { class: "plain", dir: "auto" });
  const details = element("details", { class: "thinking" }, element("summary", {}, "Thinking"), text);
  const grow = () => {
    text.textContent = answer.thinking;
    details.hidden = !answer.thinking;
  };
  grow();
  return { shown: details, grow };
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

/** After a reload in the middle of a request, and while another tab receives the answer. */
function unanswered(actions) {
  return element("li", { class: "notice unanswered" }, element("p", {}, "This message has not been answered yet."), ways(actions));
}

/** The ways on from here. style.css shows them only at the end of the conversation, and while nothing arrives. */
function ways({ retry, edit }) {
  const button = (text, click) => element("button", { type: "button", click }, text);
  return element("div", { class: "ways" }, button("Try again", retry), button("Edit message", edit));
}
