/** What this browser keeps, for all its tabs: settings in localStorage, the conversation in IndexedDB, which has room
 * for pictures. A browser that keeps nothing (private windows) only forgets. */

const SETTINGS = "kestrel.settings";
const DATABASE = "kestrel-jax";
const STORE = "turns";

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

/** Calls `listener()` when another tab has kept other settings. */
export function followSettings(listener) {
  addEventListener("storage", (event) => {
    if (event.key === SETTINGS) listener();
  });
}

/** The kept turns of the conversation in their order, or null if there is no reading them. */
export async function loadTurns() {
  try {
    return await inStore("readonly", (store) => store.getAll());
  } catch (error) {
    console.warn("no conversation is kept:", error);
    return null;
  }
}

/** Keeps a turn. This and the functions below touch nothing else; they resolve to whether the change is kept. */
export function keepTurn(turn) {
  return change((store) => store.put(turn));
}

/** Forgets a turn. */
export function forgetTurn(id) {
  return change((store) => store.delete(id));
}

/** Forgets the conversation. */
export function forgetTurns() {
  return change((store) => store.clear());
}

const tabs = new BroadcastChannel("kestrel.turns");

/** Calls `listener()` when another tab has kept a change of the conversation. */
export function followTurns(listener) {
  tabs.addEventListener("message", listener);
}

async function change(ask) {
  try {
    await inStore("readwrite", ask);
  } catch (error) {
    console.warn("a change of the conversation is not kept:", error);
    return false;
  }
  tabs.postMessage("changed");
  return true;
}

let opened = null;

/** The result of one request to the store. Those of all tabs are served in their order. */
async function inStore(mode, ask) {
  opened ??= openDatabase();
  const transaction = (await opened).transaction(STORE, mode);
  const request = ask(transaction.objectStore(STORE));
  transaction.commit(); // without this, a page that goes away now would take the change with it
  return new Promise((resolve, reject) => {
    transaction.addEventListener("complete", () => resolve(request.result));
    transaction.addEventListener("abort", () => reject(transaction.error));
  });
}

function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  return new Promise((resolve, reject) => {
    request.addEventListener("upgradeneeded", () => request.result.createObjectStore(STORE, { keyPath: "id" }));
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}
