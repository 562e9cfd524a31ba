/** The page: takes a message, asks the server, shows the answer and when each part of it came. */

import { streamCompletion } from "./chat_client.mjs";
import { addQuestion, clearConversation, conversation, readConversation, removeTurn, setAnswer } from "./conversation.mjs";
import { growAnswer, scrollToEnd, showConversation } from "./conversation_view.mjs";
import { announce, byId } from "./dom.mjs";
import { picturesRead, putBackPictures, setUpPictures, takePictures } from "./pictures.mjs";
import { inPlainWords, Problem } from "./problems.mjs";
import { askNow, modelName, watchServer } from "./server_state.mjs";
import { apiKey, samplingFields, setUpSettings, systemPrompt } from "./settings.mjs";
import { newTimeline, note, textOf } from "./timeline.mjs";
import { redraw, redrawSoon, setOpen, setUpTimelinePanel, showTimeline } from "./timeline_panel.mjs";

let running = null; // the request under way: `{id, answer, controller}`, with the id of its turn
let conversationRead = null; // a promise
const question = byId("question");

async function start() {
  conversationRead = readConversation(follow);
  setUpSettings();
  setUpPictures(picturesSent);
  setUpTimelinePanel();
  setUpComposer();
  setUpClearing();
  watchServer();
  document.addEventListener("visibilitychange", keepPart);
  await conversationRead;
  show();
  scrollToEnd();
  showLatestTimeline();
  document.body.dataset.ready = "true";
}

function show() {
  showConversation(conversation(), running, { retry, edit, show: showOne });
}

/** Shows what another tab has made of the conversation. */
function follow() {
  if (running && !conversation().some(({ id }) => id === running.id)) dropRunning();
  show();
  if (!conversation().length) showTimeline(null);
}

/** If the page goes away now, this is all that there will be of the answer. */
function keepPart() {
  if (document.hidden && running) setAnswer(running.id, { ...running.answer, problem: Problem.incomplete().facts });
}

async function picturesSent() {
  await conversationRead;
  return conversation().flatMap((turn) => turn.question.pictures).length;
}

function setUpComposer() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("stop").addEventListener("click", stop);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) stop();
  });
  for (const example of document.querySelectorAll("[data-example]")) {
    example.addEventListener("click", () => {
      question.value = example.textContent;
      question.focus();
    });
  }
}

function setUpClearing() {
  const dialog = byId("clearing");
  byId("clear").addEventListener("click", () => (conversation().length ? dialog.showModal() : question.focus()));
  byId("keep").addEventListener("click", () => dialog.close());
  byId("confirm-clear").addEventListener("click", () => {
    dialog.close();
    dropRunning();
    clearConversation();
    show();
    showTimeline(null);
    announce("The conversation is deleted.");
    question.focus();
  });
}

async function ask() {
  await Promise.all([conversationRead, picturesRead()]);
  if (running) return announce("The answer is still arriving. Escape stops it.");
  const text = question.value.trim();
  const pictures = takePictures();
  if (!text && !pictures.length) return question.focus();
  question.value = "";
  answerTurn(addQuestion({ text, pictures }));
}

/** Drops an answer that failed, and asks again. */
function retry() {
  const { id } = conversation().at(-1);
  setAnswer(id, null);
  answerTurn(id);
  question.focus();
}

/** Takes the last message back into the field, before what has been written there since. */
function edit() {
  const last = conversation().at(-1);
  removeTurn(last.id);
  show();
  question.value = [last.question.text, question.value].filter(Boolean).join("\n");
  putBackPictures(last.question.pictures);
  question.focus();
}

function stop() {
  running?.controller.abort();
}

/** Stops a request whose turn has been removed. */
function dropRunning() {
  stop();
  setRunning(null);
}

async function answerTurn(id) {
  const timeline = newTimeline(modelName(), samplingFields());
  const answer = { text: "", thinking: "", finish: null, problem: null, timeline };
  const own = { id, answer, controller: new AbortController() };
  setRunning(own);
  show();
  scrollToEnd();
  showTimeline(timeline);
  announce("The answer is arriving.");
  await receive(own);
  if (running !== own) return;
  setRunning(null);
  setAnswer(id, { ...answer });
  show();
  redraw();
  announceEnd(answer);
  askNow();
}

function setRunning(value) {
  running = value;
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  if (!running && document.activeElement === document.body) question.focus(); // the stop button had it
}

/** Fills the answer with what arrives, until its end, however it ends. */
async function receive({ id, answer, controller: { signal } }) {
  const { timeline } = answer;
  const request = requestBody(id);
  const sent = performance.now();
  let due = 0;
  const showMore = () => {
    due = 0;
    growAnswer(answer);
  };
  try {
    for await (const { at, frame } of streamCompletion(request, { key: apiKey(), signal })) {
      const kind = note(timeline, frame, at - sent);
      if (kind === "token") answer.text += textOf(frame);
      if (kind === "thinking") answer.thinking += textOf(frame);
      if (kind === "finish") answer.finish = frame.choices[0].finish_reason;
      due ||= requestAnimationFrame(showMore);
      redrawSoon();
    }
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.problem = factsOf(error);
  } finally {
    cancelAnimationFrame(due);
  }
}

function factsOf(error) {
  if (error instanceof Problem) return error.facts;
  console.error(error);
  return new Problem({ message: String(error) }).facts;
}

/** The request for an answer to the turn with this id. Answers that failed or are empty are left out. */
function requestBody(id) {
  const system = systemPrompt();
  const turns = conversation().filter((turn) => turn.id <= id);
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap(messagesOf)],
    stream: true,
    stream_options: { include_usage: true, include_metrics: true },
    ...samplingFields(),
  };
}

function messagesOf({ question: { text, pictures }, answer }) {
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (parts.length && text) parts.push({ type: "text", text });
  const asked = { role: "user", content: parts.length ? parts : text };
  return answer?.text && !answer.problem ? [asked, { role: "assistant", content: answer.text }] : [asked];
}

function announceEnd({ text, finish, problem }) {
  if (problem) return announce(inPlainWords(problem));
  announce(finish === "stopped" ? "The answer is stopped." : `The answer: ${text}`);
}

function showOne(timeline) {
  showTimeline(timeline);
  setOpen(true);
  byId("timeline-title").focus();
}

function showLatestTimeline() {
  showTimeline(conversation().findLast((turn) => turn.answer)?.answer.timeline ?? null);
}

start();
