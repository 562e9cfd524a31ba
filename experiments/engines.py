"""One network under different matrix products: what a row's neighbours can change, and what they cannot.

`XLA` computes everything with XLA's own operations on float weights, which choose their order of sums by shape.
`KERNELS` and `FLOAT_KERNELS` are the kernels of this project on quantised and on float weights. `BY_WIDTH` is an
emulation of engines that pick a kernel by the number of rows, as llama.cpp and the original do: up to three rows are
multiplied with activations quantised to int8, more with float activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import models
from models.cache import CacheType, KVCache
from models.inference import FlatModule, Layers, plan_chunks, without_tower
from models.kernels import ops, reference
from models.kernels.reference import Norm, Weight
from models.layers import RMSNorm
from models.moe import MoeBlock
from models.positions import rope_positions

NARROW = 3  # rows up to which BY_WIDTH takes the kernels; the original's q4 product changes there


@dataclass(frozen=True)
class Engine:
    """A way of computing: the format of weights and cache, and whether it is XLA's own or picked by width."""

    name: str
    quant: str | None
    kv: CacheType
    plain: bool = False
    by_width: bool = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, steps are traced in this way."""
        if self.plain:
            with mock.patch.object(ops, "active_variant", return_value=None):
                yield
        elif self.by_width:
            with mock.patch.multiple(ops, matmul=_matmul, gated_mlp=_gated_mlp, experts=_experts):
                yield
        else:
            yield


XLA = Engine("XLA's operations, float32", None, "float32", plain=True)
FLOAT_KERNELS = Engine("kernels, float32", None, "float32")
KERNELS = Engine("kernels, q4", "q4", "int8")
BY_WIDTH = Engine("picked by width (emulation), q4", "q4", "int8", by_width=True)
ENGINES = {engine.name: engine for engine in (XLA, FLOAT_KERNELS, KERNELS, BY_WIDTH)}

_kernel_matmul, _kernel_gated_mlp, _kernel_experts = ops.matmul, ops.gated_mlp, ops.experts


def _floats(weight: Weight, inputs: int) -> Weight:
    """A quantised matrix, or a stack of them, as the float32 one that it stands for."""
    blocks, scale = weight
    if not reference.is_quantised(blocks):
        return weight
    rows = reference.unpack(blocks).astype(jnp.float32) * reference.row_scales(scale)[..., None]
    return rows.reshape(*rows.shape[:-2], -1)[..., :inputs], ops.no_scale()


def _matmul(x: Array, norm: Norm, weights: Sequence[Weight], outputs: Sequence[int]) -> list[Array]:
    if x.shape[0] <= NARROW:
        return _kernel_matmul(x, norm, weights, outputs)
    x = reference.rms_norm(x, norm)
    matrices = (_floats(weight, x.shape[1])[0][:size] for weight, size in zip(weights, outputs, strict=True))
    return [jnp.einsum("ri,oi->ro", x, matrix) for matrix in matrices]


def _gated_mlp(x: Array, norm: Norm, gate: Weight, up: Weight, down: Weight, intermediate: int) -> Array:
    if x.shape[0] <= NARROW:
        return _kernel_gated_mlp(x, norm, gate, up, down, intermediate)
    left, right = _matmul(x, norm, (gate, up), (intermediate, intermediate))
    return _matmul(jax.nn.silu(left) * right, ops.no_norm(), (down,), (x.shape[1],))[0]


def _experts(
    x: Array, norm: Norm, ids: Array, shares: Array, gate_up: Weight, down: Weight, intermediate: int
) -> Array:
    if x.shape[0] <= NARROW:
        return _kernel_experts(x, norm, ids, shares, gate_up, down, intermediate)
    wide = _floats(gate_up, x.shape[1])[0][:, : 2 * intermediate], ops.no_scale()
    narrow = _floats(down, intermediate)[0][:, : x.shape[1]], ops.no_scale()
    return reference.experts(x, norm, ids, shares, wide, narrow, intermediate)


@dataclass(frozen=True)
class Routing:
    """What the routers of a mixture's layers said of each row: by how much the last chosen expert was more likely than
    the first one left out, float32 `[layers, rows]`, and the chosen ones in ascending order, int32 `[layers, rows,
    top_k]`. Without layers for a dense model."""

    margins: np.ndarray
    chosen: np.ndarray


class EngineSteps:
    """Decode steps and chunks of one model under one engine, with their logits, in a cache of `slots`."""

    def __init__(self, model: str, engine: Engine, slots: int, context: int) -> None:
        self.engine = engine
        self.model = models.load(model, quant=engine.quant, kv=engine.kv, max_context=context)
        self._inference = self.model.inference
        self._decoder = FlatModule(without_tower(self._inference.network))
        self._step = jax.jit(self._run, donate_argnums=1)
        self._context = context
        self._slots = slots

    def _run(
        self, leaves: list[Array], layers: Layers, ids: Array, positions: Array, slots: Array, held: Array
    ) -> tuple[Array, Layers, tuple[Array, Array]]:
        network = self._decoder.module(leaves)
        with _routers_noted() as routed:
            hidden, cache = network(ids, positions, KVCache(layers, slots, held), None)
        margins = jnp.stack([margin for margin, _ in routed]) if routed else jnp.zeros((0, ids.size))
        chosen = jnp.stack([experts for _, experts in routed]) if routed else jnp.zeros((0, ids.size, 0), jnp.int32)
        return network.logits(hidden[:, -1]), cache.layers, (margins, chosen)

    def new_cache(self) -> Layers:
        """An empty cache."""
        with self.engine.active():
            return self._inference.new_cache(self._slots, self._context)

    def prefill(self, layers: Layers, slot: int, ids: np.ndarray) -> tuple[np.ndarray, Layers]:
        """Takes a prompt `[length]` into a slot, in the chunks of the generate loop; logits `[vocab]` after it."""
        positions, _ = rope_positions(ids, (), self.model.config, self._inference.switches)
        with self.engine.active():
            for chunk in plan_chunks(len(ids)):
                given = self._inference.chunk_input(slot, chunk, ids, positions, None)
                logits, layers = self._inference.prefill(layers, given)
        return np.asarray(logits)[0], layers

    def take(
        self, layers: Layers, ids: np.ndarray, slots: np.ndarray, held: np.ndarray
    ) -> tuple[np.ndarray, Layers, Routing]:
        """Takes text tokens `[rows, length]` into the cache, in slots (`[rows]`, negative for a row of nothing) that
        hold so many tokens each; logits `[rows, vocab]` after the last."""
        positions = np.broadcast_to(held[:, None] + np.arange(ids.shape[1]), (3, *ids.shape))
        with self.engine.active():
            logits, layers, (margins, chosen) = self._step(
                self._decoder.leaves, layers, ids.astype(np.int32), positions.astype(np.int32), slots, held
            )
        return np.asarray(logits), layers, Routing(np.asarray(margins), np.asarray(chosen))


@contextmanager
def _routers_noted() -> Iterator[list[tuple[Array, Array]]]:
    """Per layer that routes while a step is traced, the margin of its choice and the experts chosen, by row."""
    noted: list[tuple[Array, Array]] = []
    route = MoeBlock.route

    def note(block: MoeBlock, tokens: Array, norm: RMSNorm) -> tuple[Array, Array]:
        shares, experts = route(block, tokens, norm)
        best, _ = jax.lax.top_k(jax.nn.softmax(block.gate(tokens, norm)), block.config.top_k + 1)
        noted.append((best[:, -2] - best[:, -1], jnp.sort(experts, axis=-1)))
        return shares, experts

    with mock.patch.object(MoeBlock, "route", note):
        yield noted
