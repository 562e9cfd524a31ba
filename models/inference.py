"""Drives a network: pictures through the vision tower, prompts through chunked prefill, tokens through decode steps.

Shapes are bucketed, so that a warmed-up model compiles nothing more: chunk lengths, cache capacities and patch counts
come from short lists. All methods run on one thread. The cache and the sampling state are handed over (donated) to
every call that takes them, and come back from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.cache import CacheType, KVCache, empty_cache, grow_cache
from models.compilation import CompiledStep
from models.config import ModelConfig
from models.network import Network, VisualTokens
from models.positions import Grid
from models.sampling import Sampled, SamplingState, sample
from models.switches import Switches
from models.vision import patch_layout

CHUNKS = (16, 64, 256)  # tokens per prefill step
SMALLEST_CAPACITY = 256  # tokens; further capacities double
SMALLEST_FRAME = 64  # patches; further frame sizes double
LARGE_FRAME = 1024  # patches; from here on sizes go up by this much, because attention is quadratic


@dataclass(frozen=True)
class VisualFeatures:
    """The vision tower's output for a prompt, on the host: `embeddings` float32 `[tokens, hidden]` and `deepstack`
    `[taps, tokens, hidden]`, in the order of the prompt's placeholders."""

    embeddings: np.ndarray
    deepstack: np.ndarray

    @staticmethod
    def join(parts: Sequence[VisualFeatures]) -> VisualFeatures:
        """The features of several frames, one after the other."""
        return VisualFeatures(
            np.concatenate([part.embeddings for part in parts]),
            np.concatenate([part.deepstack for part in parts], axis=1),
        )


@dataclass(frozen=True)
class Chunk:
    """A stretch of a prompt that one prefill step takes: tokens `start .. start + tokens`, padded to `bucket`."""

    start: int
    tokens: int
    bucket: int


def plan_chunks(length: int, start: int = 0) -> Iterator[Chunk]:
    """Splits a prompt into chunks from the largest bucket down; a bucket is padded only if it is three quarters full.

    Every chunk starts at a multiple of its bucket, so its padding never reaches beyond the cache's capacity.
    """
    while start < length:
        rest = length - start
        fitting = next((bucket for bucket in CHUNKS if bucket >= rest), CHUNKS[-1])
        smaller = [bucket for bucket in CHUNKS if bucket <= rest]
        bucket = fitting if 4 * rest > 3 * fitting or not smaller else smaller[-1]
        yield Chunk(start, min(rest, bucket), bucket)
        start += bucket


def capacity_for(tokens: int) -> int:
    """The smallest cache capacity with room for `tokens`."""
    capacity = SMALLEST_CAPACITY
    while capacity < tokens:
        capacity *= 2
    return capacity


def capacities(context: int) -> list[int]:
    """Every capacity that a sequence passes through on its way to `context` tokens."""
    found = [SMALLEST_CAPACITY]
    while found[-1] < context:
        found.append(2 * found[-1])
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
        self._decode = CompiledStep(self._decode_token, donate=(1, 2))
        self._sample = CompiledStep(sample, donate=(1,))
        self._empty = CompiledStep(self._empty_cache, static=(0, 1))
        self._grow = CompiledStep(grow_cache, static=(1,))

    def _empty_cache(self, batch: int, capacity: int) -> KVCache:
        return empty_cache(self.config.text, batch, capacity, self.cache_type)

    # The pure functions that are compiled.

    def _encode_frame(self, leaves: list[Array], patches: Array, *layout: Array) -> tuple[Array, Array]:
        return self._tower.module(leaves)(patches, *layout)

    def _prefill_chunk(
        self,
        leaves: list[Array],
        cache: KVCache,
        ids: Array,
        positions: Array,
        tokens: Array,
        visual: VisualTokens | None,
    ) -> tuple[Array, KVCache]:
        network = self._decoder.module(leaves)
        hidden, cache = network(ids, positions, cache, visual)
        last = jnp.take_along_axis(hidden, (tokens - 1)[:, None, None], axis=1)[:, 0]
        return network.logits(last), cache.advance(tokens)

    def _score_chunk(
        self,
        leaves: list[Array],
        cache: KVCache,
        ids: Array,
        positions: Array,
        tokens: Array,
        visual: VisualTokens | None,
    ) -> tuple[Array, KVCache]:
        network = self._decoder.module(leaves)
        hidden, cache = network(ids, positions, cache, visual)
        return network.logits(hidden), cache.advance(tokens)

    def _decode_token(
        self, leaves: list[Array], cache: KVCache, state: SamplingState, token: Array, delta: Array
    ) -> tuple[Sampled, KVCache, SamplingState]:
        network = self._decoder.module(leaves)
        positions = jnp.broadcast_to((cache.length + delta)[None, :, None], (3, *token.shape, 1))
        hidden, cache = network(token[:, None], positions, cache, None)
        sampled, state = sample(network.logits(hidden[:, 0]), state)
        return sampled, cache.advance(jnp.ones_like(token)), state

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

    def empty_cache(self, tokens: int, batch: int = 1) -> KVCache:
        """A cache for `batch` sequences with room for at least `tokens` each."""
        shape = (batch, capacity_for(tokens))
        return self._empty(shape, *shape)

    def grow(self, cache: KVCache) -> KVCache:
        """The cache with the next larger capacity."""
        return self._grow(cache.capacity, cache, 2 * cache.capacity)

    def prefill(
        self, cache: KVCache, chunk: Chunk, ids: np.ndarray, positions: np.ndarray, visual: VisualFeatures | None
    ) -> tuple[Array, KVCache]:
        """Takes one chunk of the prompt (`ids` `[length]`, `positions` `[3, length]`, all its `visual` features) into
        the cache; logits float32 `[1, vocab]` of the chunk's last token."""
        arguments = self._chunk_arguments(chunk, ids, positions, visual)
        return self._prefill((chunk.bucket, cache.capacity), self._decoder.leaves, cache, *arguments)

    def score(
        self, cache: KVCache, chunk: Chunk, ids: np.ndarray, positions: np.ndarray, visual: VisualFeatures | None
    ) -> tuple[np.ndarray, KVCache]:
        """As `prefill`, with the logits `[tokens, vocab]` of every token of the chunk."""
        arguments = self._chunk_arguments(chunk, ids, positions, visual)
        logits, cache = self._score((chunk.bucket, cache.capacity), self._decoder.leaves, cache, *arguments)
        return np.asarray(logits)[0, : chunk.tokens], cache

    def _chunk_arguments(
        self, chunk: Chunk, ids: np.ndarray, positions: np.ndarray, visual: VisualFeatures | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, VisualTokens | None]:
        taken = slice(chunk.start, chunk.start + chunk.tokens)
        pad = (0, chunk.bucket - chunk.tokens)
        return (
            np.pad(ids[taken], pad)[None],
            np.pad(positions[:, taken], [(0, 0), pad])[:, None],
            np.array([chunk.tokens], np.int32),
            self._visual_tokens(chunk, ids, visual),
        )

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
            first = int(is_visual[: chunk.start].sum())
            rows = slice(first, first + int(here.sum()))
            mask[0, : chunk.tokens] = here
            embeddings[mask] = visual.embeddings[rows]
            deepstack[:, mask] = visual.deepstack[:, rows]
        return VisualTokens(mask, embeddings, deepstack)

    def sample(self, logits: Array, state: SamplingState) -> tuple[Sampled, SamplingState]:
        """Chooses the first token, from the logits that prefill left."""
        return self._sample(None, logits, state)

    def decode(
        self, cache: KVCache, state: SamplingState, token: Array, delta: np.ndarray
    ) -> tuple[Sampled, KVCache, SamplingState]:
        """Takes `token` int32 `[batch]` into the cache and chooses the next; `delta` `[batch]` is the rope delta."""
        return self._decode((*token.shape, cache.capacity), self._decoder.leaves, cache, state, token, delta)

    def decode_text(self, batch: int, capacity: int) -> str:
        """XLA's text of the decode step of this shape, which must have run: for profiles."""
        return self._decode.text((batch, capacity))

    def compile(
        self, context: int, image_tokens: int, state: SamplingState, progress: Callable[[int, int], None] | None
    ) -> None:
        """Compiles every bucket that sequences of up to `context` tokens with pictures of up to `image_tokens` can
        need; `progress` hears how many of how many are done."""
        jobs = [*self._decoder_jobs(capacities(context), state), *self._encoder_jobs(image_tokens)]
        for done, job in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            job()
        if progress is not None:
            progress(len(jobs), len(jobs))

    def _decoder_jobs(self, sizes: list[int], state: SamplingState) -> Iterator[Callable[[], None]]:
        logits = jax.ShapeDtypeStruct((1, self.config.text.vocab), jnp.float32)
        token = delta = jax.ShapeDtypeStruct((1,), jnp.int32)
        yield lambda: self._sample.compile(None, logits, state)
        for capacity, bucket in product(sizes, CHUNKS):
            arguments = self._chunk_arguments(
                Chunk(0, bucket, bucket), np.zeros(bucket, np.int32), np.zeros((3, bucket), np.int32), None
            )
            yield lambda capacity=capacity, bucket=bucket, arguments=arguments: self._prefill.compile(
                (bucket, capacity), self._decoder.leaves, self._abstract_cache(capacity), *arguments
            )
        for capacity in sizes:
            yield lambda capacity=capacity: self._empty.compile((1, capacity), 1, capacity)
            yield lambda capacity=capacity: self._decode.compile(
                (1, capacity), self._decoder.leaves, self._abstract_cache(capacity), state, token, delta
            )
        for capacity in sizes[:-1]:
            yield lambda capacity=capacity: self._grow.compile(capacity, self._abstract_cache(capacity), 2 * capacity)

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

    def _abstract_cache(self, capacity: int) -> KVCache:
        return jax.eval_shape(lambda: self._empty_cache(1, capacity))
