/** The conversation, which is the same in all tabs of this browser: turns `{id, question, answer}` in their order. A
 * question is `{text, pictures}`; an answer is `{text, thinking, finish, problem, timeline}`, or null if there is none.
 *
 * A tab shows what is kept, with those of its own changes that are not kept yet on top; and it keeps its changes, not
 * what it shows. So no tab undoes what another one does. */

import { followTurns, forgetTurn, forgetTurns, keepTurn, loadTurns } from "./storage.mjs";

let kept = [];
let pending = []; // changes that are not kept yet: functions from turns to turns
let alone = false; // something could not be kept: this tab goes on by itself

/** The turns. */
export function conversation() {
  return pending.reduce((turns, change) => change(turns), kept);
}

/** Reads what is kept; from then on calls `listener()` whenever another tab has changed it. */
export async function readConversation(listener) {
  followTurns(() => read().then(listener));
  await read();
}

async function read() {
  const turns = await loadTurns();
  if (turns && !alone) kept = turns;
}

/** Adds a question at the end. Returns the id of its turn. */
export function addQuestion(question) {
  const turn = { id: newId(), question, answer: null };
  make((turns) => [...turns, turn].sort((one, other) => one.id - other.id), () => keepTurn(turn));
  return turn.id;
}

/** When the turn is made, in milliseconds, but later than the one before; the fraction tells tabs apart. */
function newId() {
  return Math.max(Date.now(), (conversation().at(-1)?.id ?? 0) + 1) + Math.random();
}

/** Puts an answer, or null, in the place of the one that a turn has. */
export function setAnswer(id, answer) {
  const changed = { ...conversation().find((turn) => turn.id === id), answer };
  make((turns) => turns.map((turn) => (turn.id === id ? changed : turn)), () => keepTurn(changed));
}

/** Removes a turn. */
export function removeTurn(id) {
  make((turns) => turns.filter((turn) => turn.id !== id), () => forgetTurn(id));
}

/** Removes all turns. */
export function clearConversation() {
  make(() => [], forgetTurns);
}

async function make(change, keep) {
  pending = [...pending, change];
  if (!alone && !(await keep())) alone = true;
  kept = change(kept);
  pending = pending.filter((other) => other !== change);
}
