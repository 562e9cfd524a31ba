"""This project's decode steps and prefill, as they are measured: random weights, and caches filled with random values.

The time of a step does not depend on the values; only which experts of a mixture are chosen does.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.cache import CacheType, LayerCache
from models.compilation import enable_persistent_cache
from models.config import ModelConfig, MoeConfig, parse_config
from models.freed_memory import keep_freed_memory
from models.inference import Inference, Layers, plan_chunks
from models.model import find_folder, read_config
from models.positions import rope_positions
from models.presets import preset
from models.quantisation import SCHEMES
from models.sampling import SamplingParams, SamplingState
from models.switches import Switches
from models.weights import random_network

WARM_STEPS = 2  # at the start of a turn, not measured: others have had the caches
PROCESS = Path("/proc/self")


def config_of(model: str) -> ModelConfig:
    """The configuration of a preset, a model of this repository or a checkpoint folder."""
    folder = find_folder(model)
    return parse_config(preset(model), model) if folder is None else read_config(folder)


def open_inference(model: str, quant: str, kv: CacheType) -> Inference:
    """The steps of a model with random weights; `quant` is a scheme of `models.quantisation`, or a dtype."""
    enable_persistent_cache()
    keep_freed_memory()
    config, switches, scheme = config_of(model), Switches(), SCHEMES.get(quant)
    dtype = quant if scheme is None else "float32"
    return Inference(random_network(config, dtype, switches, scheme=scheme), config, switches, kv)


def weight_bytes(inference: Inference) -> dict[str, int]:
    """Bytes of every parameter of the network by its dotted path."""
    state = nnx.to_flat_state(nnx.state(inference.network))
    return {".".join(map(str, path)): parameter.get_value().nbytes for path, parameter in state}


def bytes_read(weights: dict[str, int], config: ModelConfig, batch: int) -> float:
    """Bytes of weights that one decode step of `batch` rows reads: all of the decoder and the head, one row of the
    embedding table per row (a tied table is read as the head), and the experts that are chosen."""

    def share(path: str) -> float:
        if path.startswith("visual."):
            return 0
        if path.startswith("embed_tokens.") and not config.tied:
            return batch / config.text.vocab
        return chosen_experts(config.text.moe, batch) / config.text.moe.experts if ".experts." in path else 1

    return sum(size * share(path) for path, size in weights.items())


def chosen_experts(moe: MoeConfig, batch: int) -> float:
    """How many experts of a layer `batch` tokens are expected to choose if each chooses at random."""
    return moe.experts * (1 - (1 - moe.top_k / moe.experts) ** batch)


def filled_cache(inference: Inference, tokens: int, batch: int) -> Layers:
    """A cache of random values with room for `tokens` tokens in each of `batch` slots."""
    random = np.random.default_rng(tokens)

    def filled(array: Array) -> Array:
        # Every layer's array is a buffer of its own, because the steps take the cache over (donation).
        if array.dtype == jnp.int8:
            return jnp.array(random.integers(-127, 128, array.shape, np.int8))
        return jnp.array(random.standard_normal(array.shape, np.float32)).astype(array.dtype)

    def filled_layer(layer: LayerCache) -> LayerCache:
        scales = tuple(jnp.full_like(scale, 1 / 73) for scale in layer.scales)
        return LayerCache(filled(layer.keys), filled(layer.values), scales)

    return tuple(map(filled_layer, inference.new_cache(batch, tokens)))


@dataclass
class Memory:
    """This process's memory beyond `known` bytes (weights and caches), from now on."""

    known: int

    def __post_init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what loading and filling left behind is not the steps'
        (PROCESS / "clear_refs").write_text("5")  # the peak starts again at what is resident

    def beyond(self) -> dict[str, int]:
        """Bytes resident now and at the peak, and those of the whole process."""
        lines = (PROCESS / "status").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
        resident = fields["VmRSS"]
        return {"resident": resident - self.known, "peak": fields["VmHWM"] - self.known, "process": resident}


@dataclass
class Held:
    """A batch of sequences between two steps."""

    layers: Layers
    sampling: SamplingState


class DecodeSteps:
    """Decode steps of one model, for several batches of sequences."""

    def __init__(self, model: str, quant: str, kv: CacheType, cells: Sequence[tuple[int, int]], steps: int) -> None:
        """`cells` are pairs of a context's length and a batch's size; a turn takes up to `steps` steps."""
        self.inference = open_inference(model, quant, kv)
        self.weights = weight_bytes(self.inference)
        self.held = {
            (context, batch): Held(
                filled_cache(self.inference, context + steps + WARM_STEPS, batch),
                self.inference.new_sampling(batch),
            )
            for context, batch in cells
        }

    def decode(self, context: int, batch: int, steps: int) -> dict[str, Any]:
        """Milliseconds of each of `steps` steps of `batch` greedy rows that hold `context` tokens each, the bytes of
        weights that a step reads, and the memory beyond weights and caches. A step ends when its tokens are on the
        host, as in the serving loop."""
        held = self.held[context, batch]
        memory = Memory(self._known_bytes())
        token, milliseconds = np.arange(batch, dtype=np.int32), []
        for tokens in range(context, context + WARM_STEPS + steps):
            start = time.perf_counter()
            token = self.step(held, token, tokens)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        read = bytes_read(self.weights, self.inference.config, batch)
        return {"ms": milliseconds[WARM_STEPS:], "bytes_read": read} | memory.beyond()

    def step(self, held: Held, token: np.ndarray, tokens: int) -> np.ndarray:
        """One step: takes `token` `[batch]` into slots that hold `tokens` each, and fetches what the loop fetches of
        the next."""
        slots, filled = np.arange(len(token), dtype=np.int32), np.full(len(token), tokens, np.int32)
        rows = np.stack([token, slots, filled, filled])
        sampled, held.layers, held.sampling = self.inference.decode(held.layers, held.sampling, rows)
        return jax.device_get(sampled).token

    def _known_bytes(self) -> int:
        caches = [array.nbytes for held in self.held.values() for array in jax.tree.leaves(held.layers)]
        return sum(self.weights.values()) + sum(caches)


class Prefill:
    """The prefill of one model, in chunks as the generate loop plans them."""

    def __init__(self, model: str, quant: str, kv: CacheType) -> None:
        self.inference = open_inference(model, quant, kv)

    def prefill(self, length: int) -> dict[str, Any]:
        """Milliseconds from a prompt of `length` random tokens to the first token of the answer; and those to the end
        of each chunk, with the tokens that were taken in by then."""
        inference, config = self.inference, self.inference.config
        placeholders = [token for token in (config.image_token, config.video_token) if token is not None]
        ids = np.random.default_rng(length).integers(0, min([config.text.vocab, *placeholders]), length)
        ids = ids.astype(np.int32)
        positions, _ = rope_positions(ids, (), config, inference.switches)
        sampling = inference.seat(inference.new_sampling(1), 0, SamplingParams(), ids)
        chunks, start = [], time.perf_counter()
        layers = inference.new_cache(1, length + 1)
        for chunk in plan_chunks(length):
            logits, layers = inference.prefill(layers, inference.chunk_input(0, chunk, ids, positions, None))
            logits.block_until_ready()
            chunks.append((chunk.start + chunk.tokens, 1e3 * (time.perf_counter() - start)))
        sampled, _ = inference.sample(logits, sampling, 0)
        jax.device_get(sampled)
        return {"ms": 1e3 * (time.perf_counter() - start), "chunks": chunks}


class Steps(DecodeSteps, Prefill):
    """Decode steps and prompts on one network, made as `DecodeSteps` is."""
