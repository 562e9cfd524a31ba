"""What each slot of the cache holds, and which of it a new prompt need not compute again.

A slot that no sequence uses keeps the tokens of its last one until it is needed. A new prompt goes on where a slot's
tokens agree with its own: in that slot, or, where fewer kept tokens are lost by it, in the slot that was used longest
ago, into which they are copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from models.inference import CHUNKS, Chunk, plan_chunks

LEAST_REUSED = CHUNKS[0]  # tokens; fewer are computed as fast as they are found


@dataclass(eq=False)
class Slot:
    """One slot. `keys` int64 `[context]` tell what each cached token is (`content_keys`), `held` of them count.
    `chunks` are the unpadded chunks from the first token on in which they were computed. `owner` is whose they are, and
    `used` grows with every use."""

    index: int
    keys: np.ndarray
    held: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    owner: str = ""
    running: bool = False
    used: int = 0

    def take_in(self, keys: np.ndarray, chunk: Chunk | None = None) -> None:
        """Counts more tokens, computed in a chunk of a prompt or one by one."""
        self.keys[self.held : self.held + len(keys)] = keys
        self.held += len(keys)
        whole = chunk is not None and chunk.tokens == chunk.bucket
        if whole and chunk.start == sum(earlier.tokens for earlier in self.chunks):
            self.chunks.append(chunk)

    def keep(self, tokens: int, other: Slot) -> None:
        """Counts the first `tokens` tokens of another slot (or its own) as held here, and nothing else."""
        self.keys[:tokens] = other.keys[:tokens]
        self.chunks = [chunk for chunk in other.chunks if chunk.start + chunk.tokens <= tokens]
        self.held = tokens

    def put_back(self, keys: np.ndarray, chunk: Chunk) -> None:
        """Counts the tokens of a chunk of a prompt, `keys` `[length]`, and those before it, which are held already."""
        self.keep(chunk.start, self)
        self.take_in(keys[chunk.start : chunk.start + chunk.tokens], chunk)


@dataclass(frozen=True)
class Place:
    """Where a new sequence goes: its slot, which counts the tokens it need not compute, and the slot from which these
    are to be copied; None if they are there already."""

    slot: Slot
    source: Slot | None


class SlotTable:
    """All slots of a cache."""

    def __init__(self, count: int, context: int, *, reuse: bool, row_by_row: bool, largest_chunk: int) -> None:
        """`row_by_row`: tokens may be reused whatever the chunks in which they were computed, with the same bits;
        otherwise only up to where the chunks agree. `largest_chunk` is the longest that prompts are cut into."""
        self.slots = [Slot(index, np.zeros(context, np.int64)) for index in range(count)]
        self._reuse = reuse
        self._row_by_row = row_by_row
        self._largest_chunk = largest_chunk
        self._uses = 0

    def take(self, keys: np.ndarray, owner: str) -> Place:
        """Gives a slot that no sequence uses to a new prompt, `keys` `[length]`. There must be one."""
        free = sorted((slot for slot in self.slots if not slot.running), key=lambda slot: slot.used)
        best, tokens = self._best(keys, owner)
        others = [slot for slot in free if slot is not best]
        if best is None:
            chosen, source = free[0], None
        elif best in free and (not others or best.held - tokens <= others[0].held):
            chosen, source = best, None
        else:
            chosen, source = others[0], best
        chosen.keep(tokens, best or chosen)
        self._uses += 1
        chosen.owner, chosen.running, chosen.used = owner, True, self._uses
        return Place(chosen, source)

    def release(self, slot: Slot) -> None:
        """Takes a slot back; what it holds may be used again."""
        slot.running = False

    @property
    def running(self) -> int:
        """Slots that a sequence uses."""
        return sum(slot.running for slot in self.slots)

    @property
    def kept_tokens(self) -> int:
        """Tokens held in slots that no sequence uses."""
        return sum(slot.held for slot in self.slots if not slot.running)

    def _best(self, keys: np.ndarray, owner: str) -> tuple[Slot | None, int]:
        """The slot with the most tokens that the prompt can use, and how many they are."""
        if not self._reuse:
            return None, 0
        found = [(self._usable(slot, keys), slot) for slot in self.slots if slot.owner == owner]
        tokens, best = max(found, key=lambda pair: pair[0], default=(0, None))
        return (best, tokens) if tokens >= LEAST_REUSED else (None, 0)

    def _usable(self, slot: Slot, keys: np.ndarray) -> int:
        """Tokens of a slot that the prompt can use: not its last one, from which the answer follows."""
        compared = min(slot.held, len(keys) - 1)
        other = np.flatnonzero(slot.keys[:compared] != keys[:compared])
        common = int(other[0]) if len(other) else max(compared, 0)
        if self._row_by_row:
            return common
        usable = 0
        for own, planned in zip(slot.chunks, plan_chunks(len(keys), 0, self._largest_chunk), strict=False):
            if own != planned or own.start + own.tokens > common:
                break
            usable = own.start + own.tokens
        return usable
