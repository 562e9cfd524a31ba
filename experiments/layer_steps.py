"""A network as one call per decoder layer, so that something can be done between two layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.cache import KVCache, LayerCache
from models.compilation import CompiledStep
from models.inference import FlatModule, Inference, without_tower
from models.rope import Rotation

AtLayer = Callable[[int], None]


def nothing(layer: int) -> None:
    """Is done at a layer."""


class LayerSteps:
    """Greedy answers of a network to prompts of text. `layers` are the parameters of each of its decoder layers; the
    embeddings and the head are the network's too. All layers of a kind share their compiled steps."""

    def __init__(self, inference: Inference) -> None:
        network = without_tower(inference.network)  # modules of its own, on the same parameters
        self._inference = inference
        self._kinds = [type(layer.mlp) for layer in network.layers]
        flat = []
        for layer in network.layers:
            layer.self_attn.layer = 0  # in a cache of that layer alone
            flat.append(FlatModule(layer))
        self.layers = [each.leaves for each in flat]
        self._through = {
            kind: CompiledStep(partial(_through, each), donate=(1,))
            for kind, each in zip(self._kinds, flat, strict=True)
        }
        network.layers = nnx.List([])
        self._ends = FlatModule(network)
        self._begin = CompiledStep(self._embedded)
        self._finish = CompiledStep(self._likeliest)

    def answer(
        self, prompt: np.ndarray, tokens: int, before: AtLayer = nothing, after: AtLayer = nothing
    ) -> Iterator[int]:
        """Yields the `tokens` ids that follow `prompt`, int32 `[length]`, which is computed in one go. `before` and
        `after` are called with the number of each layer, when it begins and when it has been computed."""
        cache = list(self._inference.new_cache(1, len(prompt) + tokens))
        ids, held = prompt, 0
        for _ in range(tokens):
            token = self._step(cache, ids, held, before, after)
            yield token
            held += len(ids)
            ids = np.array([token], np.int32)

    def _step(self, cache: list[LayerCache], ids: np.ndarray, held: int, before: AtLayer, after: AtLayer) -> int:
        """Takes tokens into the cache, which holds `held` others, and gives the next."""
        positions = np.broadcast_to(np.arange(held, held + len(ids), dtype=np.int32), (3, 1, len(ids)))
        x, rotation = self._begin(len(ids), self._ends.leaves, ids[None], positions)
        shapes = (len(ids), cache[0].keys.shape[2])
        for index, (kind, leaves) in enumerate(zip(self._kinds, self.layers, strict=True)):
            before(index)
            x, cache[index] = self._through[kind](shapes, leaves, cache[index], x, rotation, np.array([held], np.int32))
            x.block_until_ready()
            after(index)
        return int(self._finish(len(ids), self._ends.leaves, x)[0])

    def _embedded(self, leaves: list[Array], ids: Array, positions: Array) -> tuple[Array, Rotation]:
        network = self._ends.module(leaves)
        return network.embed_tokens(ids), network.rotary(positions)

    def _likeliest(self, leaves: list[Array], x: Array) -> Array:
        network = self._ends.module(leaves)
        return jnp.argmax(network.logits(x[:, -1]), axis=-1)


def _through(
    flat: FlatModule, leaves: list[Array], cache: LayerCache, x: Array, rotation: Rotation, held: Array
) -> tuple[Array, LayerCache]:
    """`x` after a layer, and the layer's cache with the new tokens."""
    x, after = flat.module(leaves)(x, rotation, KVCache((cache,), jnp.zeros(1, jnp.int32), held))
    return x, after.layers[0]
