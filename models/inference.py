"""Drives a network: pictures through the vision tower, prompts through chunked prefill, tokens through decode steps.

Shapes are bucketed, so that a warmed-up model compiles nothing more: chunk lengths, rows and patch counts come from
short lists, and a cache has its full size from the beginning, because memory is taken only where it is written. All
methods run on one thread. The cache and the sampling state are handed over (donated) to every call that takes them, and
come back from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.cache import (
    COPIED_TOKENS,
    CacheType,
    KVCache,
    LayerCache,
    bytes_per_token,
    copy_prefix,
    layer_shapes,
    read_block,
    write_block,
)
from models.compilation import CompiledStep
from models.config import ModelConfig
from models.kernels import ops
from models.kernels.loader import active_variant
from models.network import Network, VisualTokens
from models.positions import Grid
from models.sampling import Sampled, SamplingParams, SamplingState, everything, seated, start_sampling
from models.switches import Switches
from models.vision import patch_layout

CHUNKS = (16, 64, 256)  # tokens per prefill step
SMALLEST_FRAME = 64  # patches; further frame sizes double
LARGE_FRAME = 1024  # patches; from here on sizes go up by this much, because attention is quadratic
Layers = tuple[LayerCache, ...]


@dataclass(frozen=True)
class VisualFeatures:
    """The vision tower's output for the pictures of a prompt, or the last of them, on the host: `embeddings` float32
    `[tokens, hidden]` and `deepstack` `[taps, tokens, hidden]`, in the order of the prompt's placeholders. `first` is
    the number of placeholders before them."""

    embeddings: np.ndarray
    deepstack: np.ndarray
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self.embeddings.nbytes + self.deepstack.nbytes

    @staticmethod
    def join(parts: Sequence[VisualFeatures], first: int = 0) -> VisualFeatures:
        """The features of several frames, one after the other."""
        return VisualFeatures(
            np.concatenate([part.embeddings for part in parts]),
            np.concatenate([part.deepstack for part in parts], axis=1),
            first,
        )


@dataclass(frozen=True)
class Chunk:
    """A stretch of a prompt that one prefill step takes: tokens `start .. start + tokens`, padded to `bucket`."""

    start: int
    tokens: int
    bucket: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkInput:
    """What a prefill step computes on: ids int32 `[1, bucket]`, positions `[3, 1, bucket]`, and `place` int32 `[3]`,
    the slot, the tokens that it holds and those of the chunk."""

    ids: Array
    positions: Array
    place: Array
    visual: VisualTokens | None


def plan_chunks(length: int, start: int = 0, largest: int = CHUNKS[-1]) -> Iterator[Chunk]:
    """Splits a prompt from token `start` on into chunks, from the largest bucket down; a bucket is padded only if it is
    three quarters full."""
    allowed = [bucket for bucket in CHUNKS if bucket <= largest]
    while start < length:
        rest = length - start
        fitting = next((bucket for bucket in allowed if bucket >= rest), allowed[-1])
        smaller = [bucket for bucket in allowed if bucket <= rest]
        bucket = fitting if 4 * rest > 3 * fitting or not smaller else smaller[-1]
        yield Chunk(start, min(rest, bucket), bucket)
        start += bucket


def capacity_for(context: int) -> int:
    """Tokens for which a slot has room, so that a padded chunk may begin anywhere in `context` tokens."""
    return -(-context // COPIED_TOKENS) * COPIED_TOKENS + CHUNKS[-1]


def row_buckets(most: int) -> list[int]:
    """The batch sizes of decode steps for up to `most` sequences."""
    found = [1]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def frame_bucket(patches: int) -> int:
    """The padded patch count of a frame."""
    if patches > LARGE_FRAME:
        return -(-patches // LARGE_FRAME) * LARGE_FRAME
    bucket = SMALLEST_FRAME
    while bucket < patches:
        bucket *= 2
    return bucket


class FlatModule:
    """A module whose parameters are flattened once, so that a jitted step takes a flat list, `leaves`."""

    def __init__(self, module: nnx.Module) -> None:
        self._graph, state = nnx.split(module)
        self.leaves, self._structure = jax.tree.flatten(state)

    def module(self, leaves: list[Array]) -> Any:
        """The module with these parameters: within a step, at trace time."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))


def without_tower(network: Network) -> Network:
    """The same network, on the same parameters, with no vision tower."""
    decoder = nnx.merge(*nnx.split(network))
    decoder.visual = None
    return decoder


class Inference:
    """The jitted steps of one network, outside jit `network`."""

    def __init__(
        self, network: Network, config: ModelConfig, switches: Switches, cache_type: CacheType = "float32"
    ) -> None:
        self.config = config
        self.cache_type = cache_type
        self.switches = switches
        self.network = network
        # Apart, because a step's every argument takes time: a decode step reads nothing of the tower.
        self._decoder = FlatModule(without_tower(network))
        self._tower = None if network.visual is None else FlatModule(network.visual)
        self._encode = CompiledStep(self._encode_frame)
        self._prefill = CompiledStep(self._prefill_chunk, donate=(1,))
        self._score = CompiledStep(self._score_chunk, donate=(1,))
        self._decode = CompiledStep(self._decode_rows, donate=(1, 2))
        self._sample = CompiledStep(ops.sample, donate=(1,))
        self._seat = CompiledStep(seated, donate=(0,))
        self._allocate = CompiledStep(self._new_layers, static=(0, 1))
        self._copy = CompiledStep(copy_prefix, donate=(0,))
        self._read_block = CompiledStep(read_block, static=(3,))
        self._write_block = CompiledStep(write_block, donate=(0,))
        self._unconstrained: dict[int, Array] = {}

    @property
    def row_by_row(self) -> bool:
        """Whether a token's keys and values do not depend, to the last bit, on the chunk that it was computed in."""
        return active_variant() is not None and self.network.row_by_row

    def bytes_per_slot(self, context: int) -> int:
        """Memory of the cache of one sequence, when it is full."""
        return capacity_for(context) * bytes_per_token(self.config.text, self.cache_type)

    @cached_property
    def block_shapes(self) -> LayerCache:
        """Shapes and dtypes of a block of the cache (`models.cache.read_block`): as many tokens as are always computed
        in one chunk, or, where that does not matter, fewer, because sequences that differ share fewer of them."""
        tokens = CHUNKS[1] if self.row_by_row else CHUNKS[-1]
        return layer_shapes(self.config.text, self.config.text.layers, tokens, self.cache_type)

    def _shapes(self, slots: int, capacity: int) -> Layers:
        one = layer_shapes(self.config.text, slots, capacity, self.cache_type)
        return (one,) * self.config.text.layers

    def _new_layers(self, slots: int, capacity: int) -> Layers:
        arrays, structure = jax.tree.flatten(self._shapes(slots, capacity))
        return jax.tree.unflatten(structure, ops.unwritten(*arrays))

    # The pure functions that are compiled. `rows` is int32 `[4, batch]`: of each sequence the token, its slot, the
    # tokens held there, and the position of the token.

    def _encode_frame(self, leaves: list[Array], patches: Array, *layout: Array) -> tuple[Array, Array]:
        return self._tower.module(leaves)(patches, *layout)

    def _run_chunk(self, leaves: list[Array], layers: Layers, chunk: ChunkInput) -> tuple[Network, Array, Layers]:
        network = self._decoder.module(leaves)
        slot, held, _ = chunk.place
        hidden, cache = network(chunk.ids, chunk.positions, KVCache(layers, slot[None], held[None]), chunk.visual)
        return network, hidden, cache.layers

    def _prefill_chunk(self, leaves: list[Array], layers: Layers, chunk: ChunkInput) -> tuple[Array, Layers]:
        network, hidden, layers = self._run_chunk(leaves, layers, chunk)
        last = jax.lax.dynamic_slice_in_dim(hidden, chunk.place[2] - 1, 1, axis=1)[:, 0]
        return network.logits(last), layers

    def _score_chunk(self, leaves: list[Array], layers: Layers, chunk: ChunkInput) -> tuple[Array, Layers]:
        network, hidden, layers = self._run_chunk(leaves, layers, chunk)
        return network.logits(hidden), layers

    def _decode_rows(
        self, leaves: list[Array], layers: Layers, state: SamplingState, rows: Array, allowed: Array
    ) -> tuple[Sampled, Layers, SamplingState]:
        network = self._decoder.module(leaves)
        token, slots, held, position = rows
        positions = jnp.broadcast_to(position[None, :, None], (3, *token.shape, 1))
        hidden, cache = network(token[:, None], positions, KVCache(layers, slots, held), None)
        sampled, state = ops.sample(network.logits(hidden[:, 0]), state, slots, allowed)
        return sampled, cache.layers, state

    # The steps as callers see them.

    def encode(self, patches: np.ndarray, grid: Grid) -> VisualFeatures:
        """Runs the vision tower on one picture or video: patches float32 `[t * h * w, values]`, grid (t, h, w)."""
        frames = patches.reshape(grid[0], -1, patches.shape[-1])
        if not self.switches.frame_mask:
            return self._encode_one(frames.reshape(1, -1, frames.shape[-1]), grid)
        return VisualFeatures.join([self._encode_one(frame[None], (1, *grid[1:])) for frame in frames])

    def _encode_one(self, patches: np.ndarray, grid: Grid) -> VisualFeatures:
        vision = self.config.vision
        layout = patch_layout(grid[1], grid[2], vision.merge, vision.positions)
        count = patches.shape[1]
        bucket = frame_bucket(count)

        def padded(values: np.ndarray) -> np.ndarray:
            values = np.concatenate([values] * (count // len(values)))
            return np.pad(values, [(0, bucket - count)] + [(0, 0)] * (values.ndim - 1))[None]

        places = (layout.rows, layout.columns, layout.table_index, layout.table_weight)
        valid = np.arange(bucket)[None] < count
        embeddings, deepstack = self._encode(
            bucket, self._tower.leaves, padded(patches[0]), *(padded(values) for values in places), valid
        )
        tokens = count // vision.merge**2
        return VisualFeatures(np.asarray(embeddings)[0, :tokens], np.asarray(deepstack)[:, 0, :tokens])

    def new_cache(self, slots: int, context: int) -> Layers:
        """A cache for `slots` sequences of up to `context` tokens each."""
        shape = (slots, capacity_for(context))
        return self._allocate(shape, *shape)

    def new_sampling(self, slots: int) -> SamplingState:
        """The sampling state of slots without a sequence."""
        return start_sampling([(SamplingParams(), np.zeros(0, np.int32))] * slots, self.config.text.vocab)

    def chunk_input(
        self, slot: int, chunk: Chunk, ids: np.ndarray, positions: np.ndarray, visual: VisualFeatures | None
    ) -> ChunkInput:
        """One chunk of a prompt (`ids` `[length]`, `positions` `[3, length]`, all its `visual` features), which is to
        go into a slot."""
        taken = slice(chunk.start, chunk.start + chunk.tokens)
        pad = (0, chunk.bucket - chunk.tokens)
        return ChunkInput(
            np.pad(ids[taken], pad)[None],
            np.pad(positions[:, taken], [(0, 0), pad])[:, None],
            np.array([slot, chunk.start, chunk.tokens], np.int32),
            self._visual_tokens(chunk, ids, visual),
        )

    def prefill(self, layers: Layers, chunk: ChunkInput) -> tuple[Array, Layers]:
        """Takes a chunk into the cache; logits float32 `[1, vocab]` of its last token."""
        return self._prefill((chunk.ids.shape[1], *_room(layers)), self._decoder.leaves, layers, chunk)

    def score(self, layers: Layers, chunk: ChunkInput) -> tuple[np.ndarray, Layers]:
        """As `prefill`, with the logits `[tokens, vocab]` of every token of the chunk."""
        logits, layers = self._score((chunk.ids.shape[1], *_room(layers)), self._decoder.leaves, layers, chunk)
        return np.asarray(logits)[0, : chunk.place[2]], layers

    def _visual_tokens(self, chunk: Chunk, ids: np.ndarray, visual: VisualFeatures | None) -> VisualTokens | None:
        """The features of the chunk's placeholders at their places; for a text model None."""
        if self.config.vision is None:
            return None
        hidden, taps = self.config.text.hidden, len(self.config.vision.deepstack)
        mask = np.zeros((1, chunk.bucket), bool)
        embeddings = np.zeros((1, chunk.bucket, hidden), np.float32)
        deepstack = np.zeros((taps, 1, chunk.bucket, hidden), np.float32)
        if visual is not None:
            is_visual = np.isin(ids, (self.config.image_token, self.config.video_token))
            here = is_visual[chunk.start : chunk.start + chunk.tokens]
            first = int(is_visual[: chunk.start].sum()) - visual.first
            rows = slice(first, first + int(here.sum()))
            mask[0, : chunk.tokens] = here
            embeddings[mask] = visual.embeddings[rows]
            deepstack[:, mask] = visual.deepstack[:, rows]
        return VisualTokens(mask, embeddings, deepstack)

    def seat(self, state: SamplingState, slot: int, params: SamplingParams, prompt: np.ndarray) -> SamplingState:
        """The sampling state with a new sequence, of these parameters and this prompt `[length]`, in a slot."""
        row = start_sampling([(params, prompt)], self.config.text.vocab)
        return self._seat(len(state.step), state, row, np.int32(slot))

    def sample(
        self, logits: Array, state: SamplingState, slot: int, allowed: np.ndarray | None = None
    ) -> tuple[Sampled, SamplingState]:
        """Chooses the first token of the sequence in a slot, from the logits `[1, vocab]` that prefill left. `allowed`
        uint32 `[1, words]` are its constraint (`models.kernels.ops.sample`), if it has one."""
        constraint = self._everything(1) if allowed is None else allowed
        return self._sample(len(state.step), logits, state, np.array([slot], np.int32), constraint)

    def decode(
        self, layers: Layers, state: SamplingState, rows: np.ndarray, allowed: np.ndarray | None = None
    ) -> tuple[Sampled, Layers, SamplingState]:
        """Takes a token of each sequence into the cache and chooses the next. `rows` int32 `[4, batch]` are the tokens,
        their slots (negative for rows that belong to none), the tokens before each in its slot, and their positions.
        Several rows of one slot are tokens that follow on each other. `allowed` uint32 `[batch, words]` are the rows'
        constraints, if any has one."""
        batch = rows.shape[1]
        constraints = self._everything(batch) if allowed is None else allowed
        return self._decode((batch, *_room(layers)), self._decoder.leaves, layers, state, rows, constraints)

    def _everything(self, batch: int) -> Array:
        """No constraint for any row; on the device already, because it is needed in nearly every step."""
        if batch not in self._unconstrained:
            self._unconstrained[batch] = jax.device_put(everything(batch, self.config.text.vocab))
        return self._unconstrained[batch]

    def copy(self, layers: Layers, source: int, target: int, tokens: int) -> Layers:
        """The cache with the first `tokens` tokens of one slot in another one too."""
        return self._copy(_room(layers), layers, np.int32(source), np.int32(target), np.int32(tokens))

    def read_block(self, layers: Layers, slot: int, start: int) -> LayerCache:
        """A block out of a slot, on the host; its shapes are `block_shapes`."""
        tokens = self.block_shapes.keys.shape[2]
        block = self._read_block(_room(layers), layers, np.int32(slot), np.int32(start), tokens)
        return jax.tree.map(np.asarray, block)

    def write_block(self, layers: Layers, slot: int, start: int, block: LayerCache) -> Layers:
        """The cache with such a block in a slot, from token `start` on."""
        return self._write_block(_room(layers), layers, np.int32(slot), np.int32(start), block)

    def decode_text(self, batch: int, layers: Layers) -> str:
        """XLA's text of the decode step of these shapes, which must have run: for profiles."""
        return self._decode.text((batch, *_room(layers)))

    def compile(
        self,
        context: int,
        image_tokens: int,
        rows: int = 1,
        slots: int = 1,
        progress: Callable[[int, int], None] | None = None,
        *,
        blocks: bool = False,
    ) -> None:
        """Compiles every bucket that decode steps of up to `rows` rows, and prompts of up to `context` tokens with
        pictures of up to `image_tokens`, can need in a cache of `slots`, and with `blocks` what takes blocks out of it
        and puts them back; `progress` hears how many of how many are done."""
        jobs = [*self._decoder_jobs(context, rows, slots), *self._encoder_jobs(image_tokens)]
        jobs += self._block_jobs(context, slots) if blocks else ()
        for done, job in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            job()
        if progress is not None:
            progress(len(jobs), len(jobs))

    def _decoder_jobs(self, context: int, rows: int, slots: int) -> Iterator[Callable[[], None]]:
        leaves, room = self._decoder.leaves, (slots, capacity_for(context))
        layers, state, row = self._shapes(*room), self.new_sampling(slots), self.new_sampling(1)
        logits = jax.ShapeDtypeStruct((1, self.config.text.vocab), jnp.float32)
        number, one = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        yield lambda: self._allocate.compile(room, *room)
        yield lambda: self._seat.compile(slots, state, row, number)
        yield lambda: self._sample.compile(slots, logits, state, one, self._everything(1))
        if slots > 1:
            yield lambda: self._copy.compile(room, layers, number, number, number)
        for bucket in CHUNKS:
            chunk = Chunk(0, bucket, bucket)
            given = self.chunk_input(0, chunk, np.zeros(bucket, np.int32), np.zeros((3, bucket), np.int32), None)
            yield lambda bucket=bucket, given=given: self._prefill.compile((bucket, *room), leaves, layers, given)
        for batch in row_buckets(rows):
            yield lambda batch=batch: self._decode.compile(
                (batch, *room),
                leaves,
                layers,
                state,
                jax.ShapeDtypeStruct((4, batch), jnp.int32),
                self._everything(batch),
            )

    def _block_jobs(self, context: int, slots: int) -> Iterator[Callable[[], None]]:
        room, number, block = (slots, capacity_for(context)), jax.ShapeDtypeStruct((), jnp.int32), self.block_shapes
        layers = self._shapes(*room)
        yield lambda: self._read_block.compile(room, layers, number, number, block.keys.shape[2])
        yield lambda: self._write_block.compile(room, layers, number, number, block)

    def _encoder_jobs(self, image_tokens: int) -> Iterator[Callable[[], None]]:
        vision = self.config.vision
        if vision is None:
            return
        largest = image_tokens * vision.merge**2
        for bucket in sorted({frame_bucket(patches) for patches in range(1, largest + 1)}):
            number = jax.ShapeDtypeStruct((1, bucket), jnp.int32)
            arguments = (
                jax.ShapeDtypeStruct((1, bucket, vision.patch_values), jnp.float32),
                number,
                number,
                jax.ShapeDtypeStruct((1, bucket, 4), jnp.int32),
                jax.ShapeDtypeStruct((1, bucket, 4), jnp.float32),
                jax.ShapeDtypeStruct((1, bucket), jnp.bool_),
            )
            yield lambda bucket=bucket, arguments=arguments: self._encode.compile(
                bucket, self._tower.leaves, *arguments
            )


def _room(layers: Layers) -> tuple[int, int]:
    """Slots and their capacity."""
    return layers[0].keys.shape[0], layers[0].keys.shape[2]
