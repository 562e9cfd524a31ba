"""Requests that share one cache and are computed together: they join and leave between steps.

Each step is one unit of work, after which control returns: a picture, a chunk of one prompt, or a token for every
request whose prompt is done. What a request says does not depend on the others: its row is computed in the same order
whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from models.disk_cache import DiskCache
from models.generation import Generation, PrefillProgress, Request, Step
from models.image_cache import ImageCache
from models.images import VisionInput
from models.inference import CHUNKS, Inference, VisualFeatures, row_buckets
from models.layers import DECODE_ROWS
from models.sampling import Sampled, everything
from models.slots import Slot, SlotTable

Item = PrefillProgress | Step | Exception
EMPTY_ROW = (0, -1, 0, 0)


@dataclass(frozen=True)
class BatchLimits:
    """How much a batch takes on: at most `rows` requests at a time, in a cache of `slots` (at least as many; the others
    keep what earlier requests have computed). `prefill_budget` is the most tokens of prompts that are computed between
    two tokens of the running requests, at least the smallest chunk. `image_cache_bytes` are for pictures that have been
    seen. `reuse`: prompts need not compute what a slot holds already. `draft` is the number of tokens that a greedy
    request may guess from its own text and have checked in the same step. In `disk_folder`, if there is one, up to
    `disk_bytes` of what requests have computed are kept for the time after a restart."""

    rows: int = 1
    slots: int = 1
    prefill_budget: int = CHUNKS[-1]
    image_cache_bytes: int = 0
    reuse: bool = True
    draft: int = 0
    disk_folder: Path | None = None
    disk_bytes: int = 0

    @property
    def decoded_rows(self) -> int:
        """The most rows of a decode step."""
        return max(self.rows, min(self.rows * (1 + self.draft), DECODE_ROWS))

    @property
    def largest_chunk(self) -> int:
        """The longest chunk that fits the budget."""
        return max(chunk for chunk in CHUNKS if chunk <= max(self.prefill_budget, CHUNKS[0]))


class Batch:
    """The owner of one cache and its sampling state, driven by one thread."""

    def __init__(self, inference: Inference, context: int, limits: BatchLimits, disk: DiskCache | None = None) -> None:
        self.limits = limits
        self.images = ImageCache(limits.image_cache_bytes)
        self.disk = disk
        self._inference = inference
        self._context = context
        self.abandon()

    def abandon(self) -> None:
        """Drops all requests and everything kept: after a step that has failed its arrays cannot be used."""
        limits = self.limits
        self.running: list[Generation] = []
        self.slots = SlotTable(
            limits.slots,
            self._context,
            reuse=limits.reuse,
            row_by_row=self._inference.row_by_row,
            largest_chunk=limits.largest_chunk,
        )
        self._layers = self._inference.new_cache(limits.slots, self._context)
        self._sampling = self._inference.new_sampling(limits.slots)
        self._prefilled = 0  # tokens of prompts since the last decode step

    @property
    def full(self) -> bool:
        """Whether no request can join."""
        return len(self.running) == self.limits.rows

    def join(self, request: Request) -> Generation:
        """Takes in a request; the batch must not be full.

        Raises:
            PromptError: the placeholders do not match the pictures.
            GrammarError: nothing can follow the grammar.
        """
        config = self._inference.config
        generation = Generation(request, self._context, config, self._inference.switches)
        place = self.slots.take(generation.keys, request.owner)
        slot = generation.slot = place.slot
        self.running.append(generation)
        if place.source is not None:
            self._layers = self._inference.copy(self._layers, place.source.index, slot.index, slot.held)
        if self.disk is not None:
            generation.blocks.extend(self.disk.find(generation.keys, request.owner, slot.held))
        if not generation.blocks:
            self._start(generation)
        self._sampling = self._inference.seat(self._sampling, slot.index, request.sampling, request.token_ids)
        return generation

    def _start(self, generation: Generation) -> None:
        vision = self._inference.config.vision
        generation.start(vision.merge if vision else 1, self.limits.largest_chunk)

    def leave(self, generation: Generation) -> None:
        """Drops a request, wherever it is; one that has ended has left already."""
        if generation in self.running:
            self.running.remove(generation)
            self._store(generation.slot, ended=True)
            self.slots.release(generation.slot)

    def close(self) -> None:
        """Drops all requests, and waits until everything that is kept of them on disk has been written."""
        for generation in list(self.running):
            self.leave(generation)
        if self.disk is not None:
            self.disk.close()

    def _store(self, slot: Slot, *, ended: bool = False) -> None:
        """Keeps what a slot holds on disk too."""
        if self.disk is not None:
            self.disk.store(slot, partial(self._inference.read_block, self._layers, slot.index), ended=ended)

    def answer(self, request: Request) -> Iterator[Step]:
        """The steps of a request that runs alone; the batch must be empty.

        Raises:
            Exception: what the request raised.
        """
        self.join(request)
        while self.running:
            for _, item in self.step():
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Step):
                    yield item

    def step(self) -> list[tuple[Generation, Item]]:
        """One unit of work, and what it brought to whom. A request has left with its last step, or with the exception
        that it alone raised. There must be a request.

        Raises:
            Exception: the cache has been lost; see `abandon`.
        """
        waiting = [generation for generation in self.running if generation.token is None]
        ready = [generation for generation in self.running if generation.token is not None]
        if waiting:
            # The shortest rest first, but no prompt waits for more tokens of others than it has itself.
            generation = min(waiting, key=lambda waiting: waiting.left - waiting.passed_over)
            cost = self._cost(generation)
            if not ready or self._prefilled + cost <= self.limits.prefill_budget:
                self._prefilled += cost
                for other in waiting:
                    other.passed_over += 0 if other is generation else cost
                return self._advance(generation)
        self._prefilled = 0
        return self._decode(ready)

    def _cost(self, generation: Generation) -> int:
        """Tokens of the budget that the next part of a prompt takes; a picture takes all of it."""
        if generation.blocks:
            return min(generation.blocks[0].chunk.tokens, self.limits.prefill_budget)
        chunk = generation.next_chunk
        return self.limits.prefill_budget if chunk is None else chunk.bucket

    def _advance(self, generation: Generation) -> list[tuple[Generation, Item]]:
        """Does the next part of a prompt."""
        if generation.blocks:
            return self._read(generation)
        return self._see(generation) if generation.next_chunk is None else self._prefill(generation)

    def _read(self, generation: Generation) -> list[tuple[Generation, Item]]:
        """Takes a block of a prompt from its file; if that cannot be had, all that follows is computed."""
        block, slot = generation.blocks.popleft(), generation.slot
        kept = self.disk.read(block)
        if kept is None:
            generation.blocks.clear()
        else:
            self._layers = self._inference.write_block(self._layers, slot.index, block.chunk.start, kept)
            slot.put_back(generation.keys, block.chunk)
        if not generation.blocks:
            self._start(generation)
        return [(generation, PrefillProgress(slot.held, generation.length))]

    def _see(self, generation: Generation) -> list[tuple[Generation, Item]]:
        try:
            return [(generation, generation.saw(self._features(generation.unseen[0], generation.request.owner)))]
        except Exception as error:
            self.leave(generation)
            return [(generation, error)]

    def _features(self, picture: VisionInput, owner: str) -> VisualFeatures:
        key = owner, picture.content_hash
        features = self.images.get(key)
        if features is None:
            features = self._inference.encode(picture.patches, picture.grid)
            self.images.put(key, features)
        return features

    def _prefill(self, generation: Generation) -> list[tuple[Generation, Item]]:
        ids, slot = generation.request.token_ids, generation.slot
        chunk = self._inference.chunk_input(
            slot.index, generation.next_chunk, ids, generation.positions, generation.visual
        )
        logits, self._layers = self._inference.prefill(self._layers, chunk)
        logits.block_until_ready()  # a chunk that is only queued could neither be timed nor cancelled
        items: list[tuple[Generation, Item]] = [(generation, generation.prefilled())]
        self._store(slot)
        if not generation.left:
            allowed = None if generation.allowed is None else generation.allowed[None]
            sampled, self._sampling = self._inference.sample(logits, self._sampling, slot.index, allowed)
            items.append((generation, self._step(generation, jax.tree.map(np.asarray, sampled), 0)))
        return items

    def _decode(self, ready: list[Generation]) -> list[tuple[Generation, Item]]:
        room = self.limits.decoded_rows - len(ready)
        drafts, rows = [], []
        for generation in ready:
            drafts.append(generation.draft(min(self.limits.draft, room)))
            room -= len(drafts[-1])
            rows += generation.rows(drafts[-1])
        bucket = next(size for size in row_buckets(self.limits.decoded_rows) if size >= len(rows))
        padded = np.array(rows + [EMPTY_ROW] * (bucket - len(rows)), np.int32)
        sampled, self._layers, self._sampling = self._inference.decode(
            self._layers, self._sampling, np.ascontiguousarray(padded.T), self._constraints(ready, drafts, bucket)
        )
        sampled = jax.tree.map(np.asarray, sampled)
        items, first = [], 0
        for generation, drafted in zip(ready, drafts, strict=True):
            items += [(generation, step) for step in self._confirmed(generation, drafted, sampled, first)]
            first += 1 + len(drafted)
        return items

    def _constraints(self, ready: list[Generation], drafts: list[list[int]], bucket: int) -> np.ndarray | None:
        """What the rows of a step allow, uint32 `[bucket, words]`; None if they allow everything."""
        if all(generation.allowed is None for generation in ready):
            return None
        constraints = everything(bucket, self._inference.config.text.vocab)
        row = 0
        for generation, drafted in zip(ready, drafts, strict=True):
            if generation.allowed is not None:
                constraints[row] = generation.allowed
            row += 1 + len(drafted)
        return constraints

    def _confirmed(self, generation: Generation, drafted: list[int], sampled: Sampled, first: int) -> Iterator[Item]:
        """The steps of a generation, whose rows begin at `first`: as many as were drafted as they came, and one."""
        for row, guess in enumerate([*drafted, None], start=first):
            generation.decoded()
            step = self._step(generation, sampled, row)
            yield step
            if isinstance(step, Exception) or step.finish_reason is not None or step.token_id != guess:
                return

    def _step(self, generation: Generation, sampled: Sampled, row: int) -> Item:
        try:
            step = generation.next_step(sampled, row)
        except Exception as error:
            self.leave(generation)
            return error
        if step.finish_reason is not None:
            self.leave(generation)
        return step
