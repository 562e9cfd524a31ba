/** Pictures for the next message: by button, paste or drop; shown small, removable. */

import { announce, byId, element } from "./dom.mjs";

const MOST = 16; // the server's limit for a request, and a request has the whole conversation
let chosen = [];
let countSent = null;
let reading = Promise.resolve();

/** Connects the button, paste and drop. `picturesSent()` gives a promise of the number of
 * pictures in the conversation. */
export function setUpPictures(picturesSent) {
  countSent = picturesSent;
  const files = byId("files");
  byId("attach").addEventListener("click", () => files.click());
  files.addEventListener("change", async () => {
    const picked = [...files.files];
    files.value = ""; // so that the same file can be chosen again
    await add(picked);
    byId("question").focus();
  });
  document.addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    add([...event.clipboardData.files]);
  });
  setUpDrop();
}

function setUpDrop() {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const hint = byId("drop-hint");
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // otherwise the browser would open the file
    hint.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) hint.hidden = true;
  });
  document.addEventListener("drop", (event) => {
    hint.hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

/** The chosen pictures as `{name, url}` with data URLs; they are no longer chosen then. */
export function takePictures() {
  const taken = chosen;
  setPictures([]);
  return taken;
}

/** Resolves when all files that have been added so far are read. */
export function picturesRead() {
  return reading;
}

/** Chooses these pictures again, which had been taken, before those chosen since. */
export function putBackPictures(pictures) {
  setPictures([...pictures, ...chosen]);
}

function setPictures(pictures) {
  chosen = pictures;
  byId("pictures").replaceChildren(...chosen.map(thumbnail));
  byId("pictures").hidden = !chosen.length;
}

/** Adds files after those that are still being read. */
function add(files) {
  reading = reading.then(() => readAll(files));
  return reading;
}

async function readAll(files) {
  const types = byId("files").accept.split(",");
  const usable = files.filter((file) => types.includes(file.type));
  const room = MOST - (await countSent()) - chosen.length;
  const fitting = usable.slice(0, Math.max(room, 0));
  const read = await Promise.all(fitting.map(readPicture));
  setPictures([...chosen, ...read.filter(Boolean)]);
  tell(files, usable, fitting, read);
}

function tell(files, usable, fitting, read) {
  const remarks = [];
  const unusable = files.length - usable.length;
  if (unusable) remarks.push(`${counted(unusable, "file")} left out: only PNG, JPEG, WebP, GIF, BMP and TIFF pictures can be sent.`);
  if (usable.length > fitting.length) remarks.push(`A conversation takes at most ${MOST} pictures, all its messages together.`);
  if (read.includes(null)) remarks.push("A file could not be read.");
  byId("picture-remark").textContent = remarks.join(" ");
  announce([`${counted(chosen.length, "picture")} to send.`, ...remarks].join(" "));
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function readPicture(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve({ name: file.name, url: reader.result }));
    reader.addEventListener("error", () => resolve(null));
    reader.readAsDataURL(file);
  });
}

function thumbnail(picture, index) {
  const remove = () => {
    setPictures(chosen.filter((other) => other !== picture));
    announce(`${picture.name} removed.`);
    const buttons = byId("pictures").querySelectorAll("button");
    (buttons[Math.min(index, buttons.length - 1)] ?? byId("question")).focus();
  };
  const button = element("button", { type: "button", "aria-label": `Remove ${picture.name}`, click: remove }, "×");
  return element("li", {}, element("img", { src: picture.url, alt: picture.name }), button);
}
