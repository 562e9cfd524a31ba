"""The key/value cache: one pair of arrays per layer, a row per sequence, filled from the left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from models.config import TextConfig

CacheType = Literal["float32", "bfloat16", "int8"]
CACHE_TYPES: tuple[CacheType, ...] = ("float32", "bfloat16", "int8")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, `[batch, kv_heads, capacity, head_dim]`, and the tokens held per row, int32
    `[batch]`.

    They are float32, bfloat16 or int8; int8 ones stand for `value * scale` with a float32 scale per token and head,
    `[batch, kv_heads, capacity]`, the largest magnitude / 127. Layers are separate arrays because XLA on CPU copies
    every slice of a stacked one.
    """

    keys: tuple[Num[Array, "batch kv_heads capacity head_dim"], ...]
    values: tuple[Num[Array, "batch kv_heads capacity head_dim"], ...]
    key_scales: tuple[Float[Array, "batch kv_heads capacity"], ...]
    value_scales: tuple[Float[Array, "batch kv_heads capacity"], ...]
    length: Int[Array, " batch"]

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self.keys[0].shape[2]

    def store(
        self,
        layer: int,
        keys: Float[Array, "batch kv_heads length head_dim"],
        values: Float[Array, "batch kv_heads length head_dim"],
    ) -> KVCache:
        """Writes the new tokens of one layer behind each row's length, which stays as it is until `advance`."""
        keys, key_scales = _written(self.keys, self.key_scales, layer, keys, self.length)
        values, value_scales = _written(self.values, self.value_scales, layer, values, self.length)
        return replace(self, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)

    def layer(self, index: int) -> tuple[Array, Array, Array, tuple[Array, ...]]:
        """Keys, values, the tokens held before what `store` wrote last, and the scales if there are any."""
        scales = (self.key_scales[index], self.value_scales[index]) if self.key_scales else ()
        return self.keys[index], self.values[index], self.length, scales

    def advance(self, tokens: Int[Array, " batch"]) -> KVCache:
        """Counts `tokens` more tokens per row; what `store` wrote behind them is overwritten by the next chunk."""
        return replace(self, length=self.length + tokens)


def empty_cache(config: TextConfig, batch: int, capacity: int, dtype: CacheType) -> KVCache:
    """A cache of zeros with room for `capacity` tokens in each of `batch` rows."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)

    # Every array is its own buffer, because the jitted steps take the cache over (donation).
    def layers(make: Callable[[], Array]) -> tuple[Array, ...]:
        return tuple(make() for _ in range(config.layers))

    scaled = dtype == "int8"
    return KVCache(
        keys=layers(lambda: jnp.zeros(shape, dtype)),
        values=layers(lambda: jnp.zeros(shape, dtype)),
        key_scales=layers(lambda: jnp.zeros(shape[:3])) if scaled else (),
        value_scales=layers(lambda: jnp.zeros(shape[:3])) if scaled else (),
        length=jnp.zeros(batch, jnp.int32),
    )


def grow_cache(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens."""

    def grown(array: Array) -> Array:
        return jnp.pad(array, [(0, capacity - cache.capacity if axis == 2 else 0) for axis in range(array.ndim)])

    return replace(jax.tree.map(grown, replace(cache, length=None)), length=cache.length)


def _written(
    arrays: tuple[Array, ...], scales: tuple[Array, ...], layer: int, new: Array, start: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Arrays and scales with one layer's new keys or values behind `start`."""
    if scales:
        largest = jnp.max(jnp.abs(new), axis=-1)
        scale = largest / 127
        new = jnp.round(new * jnp.where(largest > 0, 127 / jnp.where(largest > 0, largest, 1), 0)[..., None])
        scales = _replaced(scales, layer, _write(scales[layer], scale, start))
    return _replaced(arrays, layer, _write(arrays[layer], new.astype(arrays[layer].dtype), start)), scales


def _replaced(arrays: tuple[Array, ...], index: int, array: Array) -> tuple[Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])


def _write(
    cache: Num[Array, "batch kv_heads capacity *rest"],
    new: Num[Array, "batch kv_heads length *rest"],
    start: Int[Array, " batch"],
) -> Num[Array, "batch kv_heads capacity *rest"]:
    """A slice update per row: unlike a batched scatter it happens in place on the CPU."""
    for row in range(new.shape[0]):
        place = (row, 0, start[row], 0)[: cache.ndim]
        cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], place)
    return cache
