/** The server's name and state in the page's head, asked for now and then. */

import { askHealth } from "./chat_client.mjs";
import { announce, byId } from "./dom.mjs";

const CALM_MS = 10_000;
const WATCHFUL_MS = 2_000; // while the server is not ready
const WORDS = {
  loading: "loading the model",
  draining: "shutting down",
  error: "failed",
  unreachable: "not reachable",
};
let model = "model";
let shown = null;
let timer = null;

/** Asks at once, and from then on regularly while the page is in view. */
export function watchServer() {
  document.addEventListener("visibilitychange", askNow);
  askNow();
}

/** The model's name, as far as it is known. */
export function modelName() {
  return model;
}

/** Asks for the state now, for example because a request has just failed. */
export async function askNow() {
  clearTimeout(timer);
  if (document.hidden) return;
  const health = await askHealth();
  show(health);
  clearTimeout(timer);
  timer = setTimeout(askNow, health?.status === "ok" ? CALM_MS : WATCHFUL_MS);
}

function show(health) {
  const status = health?.status ?? "unreachable";
  model = health?.model ?? model;
  const state = status === "ok" ? (health.busy ? "busy" : "ready") : status;
  byId("model").textContent = health?.model ?? (shown ? model : "");
  byId("state").textContent = status === "ok" ? readyWords(health) : (WORDS[status] ?? status);
  byId("server").dataset.state = state;
  document.title = `${model} · kestrel-jax`;
  const calm = (value) => value === null || value === "ready" || value === "busy";
  if (!calm(state) || !calm(shown)) announceChange(state);
  shown = state;
}

function announceChange(state) {
  if (state !== shown) announce(`The server is ${byId("state").textContent}.`);
}

function readyWords({ busy, queued }) {
  return `${busy ? "busy" : "ready"}${queued ? `, ${queued} waiting` : ""}`;
}
