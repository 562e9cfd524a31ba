/** The settings dialog. An empty field leaves the choice to the server. */

import { byId } from "./dom.mjs";
import { followSettings, loadSettings, saveSettings } from "./storage.mjs";

const NUMBERS = {
  temperature: { accepts: (value) => value >= 0 && value <= 2, remark: "a number from 0 to 2" },
  top_p: { accepts: (value) => value > 0 && value <= 1, remark: "a number above 0, up to 1" },
  max_tokens: { accepts: (value) => Number.isSafeInteger(value) && value >= 1, remark: "a whole number from 1 on" },
  seed: { accepts: Number.isSafeInteger, remark: "a whole number" },
};
const FIELDS = [...Object.keys(NUMBERS), "system"];
let settings = {};
let key = ""; // of this visit only

/** Fills and connects the dialog. */
export function setUpSettings() {
  const dialog = byId("settings");
  for (const name of FIELDS) byId(`setting-${name}`).addEventListener("input", (event) => take(name, event.target));
  fill(loadSettings());
  followSettings(() => fill(loadSettings()));
  byId("setting-key").addEventListener("input", (event) => takeKey(event.target));
  byId("open-settings").addEventListener("click", () => dialog.showModal());
  byId("close-settings").addEventListener("click", () => dialog.close());
  byId("reset-settings").addEventListener("click", reset);
}

/** The server's key, if one was entered. */
export function apiKey() {
  return key;
}

/** The system prompt, or an empty text. */
export function systemPrompt() {
  return (settings.system ?? "").trim();
}

/** The request fields that were set. */
export function samplingFields() {
  return Object.fromEntries(Object.keys(NUMBERS).filter((name) => name in settings).map((name) => [name, settings[name]]));
}

/** Takes all settings from elsewhere. */
function fill(values) {
  settings = values;
  for (const name of FIELDS) {
    byId(`setting-${name}`).value = settings[name] ?? "";
    mark(name, false);
  }
}

function take(name, field) {
  const text = field.value.trim();
  const value = name in NUMBERS ? Number(text) : field.value;
  const empty = text === "" && !field.validity.badInput;
  const wrong = !empty && name in NUMBERS && (field.validity.badInput || !NUMBERS[name].accepts(value));
  mark(name, wrong);
  if (empty || wrong) delete settings[name];
  else settings[name] = value;
  saveSettings(settings);
}

function mark(name, wrong) {
  byId(`setting-${name}`).setAttribute("aria-invalid", String(wrong));
  if (name in NUMBERS) byId(`remark-${name}`).textContent = wrong ? `Not used: this should be ${NUMBERS[name].remark}.` : "";
}

/** Takes a key that a header can carry. */
function takeKey(field) {
  const wrong = !/^[\x21-\x7e]*$/.test(field.value.trim());
  key = wrong ? "" : field.value.trim();
  field.setAttribute("aria-invalid", String(wrong));
  byId("remark-key").textContent = wrong ? "Not used: a key has only letters, digits and signs of ASCII." : "";
}

function reset() {
  fill({});
  saveSettings(settings);
}
