/** What this browser keeps: settings in localStorage, the conversation in IndexedDB, which has room for pictures.
 * A browser that keeps nothing (private windows) only forgets. */

const SETTINGS = "kestrel.settings";
const STORE = "conversations";
const CURRENT = "current";

/** The kept settings. */
export function loadSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

/** Keeps the settings. */
export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch (error) {
    console.warn("the settings are not kept:", error);
  }
}

/** The kept conversation, or an empty one. */
export async function loadConversation() {
  try {
    return (await inStore("readonly", (store) => store.get(CURRENT))) ?? [];
  } catch (error) {
    console.warn("no conversation is kept:", error);
    return [];
  }
}

/** Keeps the conversation. */
export async function saveConversation(messages) {
  try {
    await inStore("readwrite", (store) => store.put(messages, CURRENT));
  } catch (error) {
    console.warn("the conversation is not kept:", error);
  }
}

let opened = null;

async function inStore(mode, work) {
  opened ??= settled(openRequest());
  const database = await opened;
  return settled(work(database.transaction(STORE, mode).objectStore(STORE)));
}

function openRequest() {
  const request = indexedDB.open("kestrel", 1);
  request.addEventListener("upgradeneeded", () => request.result.createObjectStore(STORE));
  return request;
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}
