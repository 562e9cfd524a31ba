/** The page: takes a message, asks the server, shows the answer and when each part of it came. */

import { streamCompletion } from "./chat_client.mjs";
import { addAnswer, showConversation } from "./conversation_view.mjs";
import { announce, byId } from "./dom.mjs";
import { setPictures, setUpPictures, takePictures } from "./pictures.mjs";
import { inPlainWords, Problem } from "./problems.mjs";
import { askNow, modelName, watchServer } from "./server_state.mjs";
import { apiKey, samplingFields, setUpSettings, systemPrompt } from "./settings.mjs";
import { loadConversation, saveConversation } from "./storage.mjs";
import { newTimeline, note, textOf } from "./timeline.mjs";
import { redraw, redrawSoon, setOpen, setUpTimelinePanel, showTimeline } from "./timeline_panel.mjs";

let messages = [];
let running = null; // the request under way: `{controller, message}`
const question = byId("question");
const actions = { retry, edit, show: showOne };

async function start() {
  setUpSettings();
  setUpPictures();
  setUpTimelinePanel();
  setUpComposer();
  setUpClearing();
  watchServer();
  messages = await loadConversation();
  showConversation(messages, actions);
  showLatestTimeline();
  document.addEventListener("visibilitychange", () => document.hidden && saveConversation(soFar()));
  document.body.dataset.ready = "true";
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
  byId("clear").addEventListener("click", () => (messages.length ? dialog.showModal() : question.focus()));
  byId("keep").addEventListener("click", () => dialog.close());
  byId("confirm-clear").addEventListener("click", () => {
    dialog.close();
    stop();
    setRunning(null);
    setMessages([]);
    showTimeline(null);
    announce("The conversation is deleted.");
    question.focus();
  });
}

function setMessages(changed) {
  messages = changed;
  showConversation(messages, actions);
  saveConversation(messages);
}

/** The messages and what has come of the next one; if the page goes away now, that is all there will be. */
function soFar() {
  return running ? [...messages, { ...running.message, finish: "stopped" }] : messages;
}

function ask() {
  const text = question.value.trim();
  if (running) return announce("The answer is still arriving. Escape stops it.");
  const pictures = takePictures();
  byId("picture-remark").textContent = "";
  if (!text && !pictures.length) return question.focus();
  question.value = "";
  setMessages([...messages, { role: "user", text, pictures }]);
  answerLast();
}

/** Drops an answer that failed, and asks again. */
function retry() {
  setMessages(messages.slice(0, lastQuestion() + 1));
  answerLast();
  question.focus();
}

/** Takes the last message back into the field. */
function edit() {
  const { text, pictures } = messages[lastQuestion()];
  setMessages(messages.slice(0, lastQuestion()));
  question.value = text;
  setPictures(pictures);
  question.focus();
}

function lastQuestion() {
  return messages.findLastIndex((message) => message.role === "user");
}

function stop() {
  running?.controller.abort();
}

async function answerLast() {
  const timeline = newTimeline(modelName(), samplingFields());
  const message = { role: "assistant", text: "", thinking: "", finish: null, problem: null, timeline };
  const own = { controller: new AbortController(), message };
  setRunning(own);
  const view = addAnswer(message, actions);
  showTimeline(timeline);
  announce("The answer is arriving.");
  await receive(message, view, own.controller.signal);
  if (running !== own) return; // the conversation has been deleted meanwhile
  setRunning(null);
  messages = [...messages, message];
  saveConversation(messages);
  view.end();
  redraw();
  announceEnd(message);
  askNow();
}

function setRunning(value) {
  running = value;
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  if (!running && document.activeElement === document.body) question.focus(); // the stop button had it
}

/** Fills the message with what arrives, until its end, however it ends. */
async function receive(message, view, signal) {
  const { timeline } = message;
  const request = requestBody();
  const sent = performance.now();
  let due = 0;
  const show = () => {
    due = 0;
    view.grow();
  };
  try {
    for await (const { at, frame } of streamCompletion(request, { key: apiKey(), signal })) {
      const kind = note(timeline, frame, at - sent);
      if (kind === "token") message.text += textOf(frame);
      if (kind === "thinking") message.thinking += textOf(frame);
      if (kind === "finish") message.finish = frame.choices[0].finish_reason;
      due ||= requestAnimationFrame(show);
      redrawSoon();
    }
  } catch (error) {
    if (signal.aborted) message.finish = "stopped";
    else message.problem = factsOf(error);
  } finally {
    cancelAnimationFrame(due);
  }
}

function factsOf(error) {
  if (error instanceof Problem) return error.facts;
  console.error(error);
  return new Problem({ message: String(error) }).facts;
}

/** The request for the conversation as it stands. Answers that failed or are empty are left out. */
function requestBody() {
  const system = systemPrompt();
  const turns = messages.filter((message) => message.role === "user" || (message.text && !message.problem));
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.map(turn)],
    stream: true,
    stream_options: { include_usage: true, include_metrics: true },
    ...samplingFields(),
  };
}

function turn({ role, text, pictures }) {
  if (!pictures?.length) return { role, content: text };
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
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
  showTimeline(messages.findLast((message) => message.role === "assistant")?.timeline ?? null);
}

start();
