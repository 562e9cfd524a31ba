"""The key/value cache: a row per sequence, filled from the left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from models.config import TextConfig

CacheType = Literal["float32", "bfloat16", "int8"]
CACHE_TYPES: tuple[CacheType, ...] = ("float32", "bfloat16", "int8")


class LayerCache(NamedTuple):
    """Keys and values of one layer, `[batch, kv_heads, capacity, head_dim]`, float32, bfloat16 or int8.

    int8 ones stand for `value * scale` with float32 `scales` of keys and of values, `[batch, kv_heads, capacity]`: the
    largest magnitude of a token's head / 127.
    """

    keys: Num[Array, "batch kv_heads capacity head_dim"]
    values: Num[Array, "batch kv_heads capacity head_dim"]
    scales: tuple[Float[Array, "batch kv_heads capacity"], ...] = ()

    def store(
        self,
        keys: Float[Array, "batch kv_heads length head_dim"],
        values: Float[Array, "batch kv_heads length head_dim"],
        start: Int[Array, " batch"],
    ) -> LayerCache:
        """Writes new tokens from position `start` of each row on."""
        if not self.scales:
            return LayerCache(_write(self.keys, keys, start), _write(self.values, values, start))
        (keys, key_scale), (values, value_scale) = _narrowed(keys), _narrowed(values)
        scales = (_write(self.scales[0], key_scale, start), _write(self.scales[1], value_scale, start))
        return LayerCache(_write(self.keys, keys, start), _write(self.values, values, start), scales)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The cache of every layer, and the tokens held per row, int32 `[batch]`. Layers are separate arrays because XLA on
    CPU copies every slice of a stacked one."""

    layers: tuple[LayerCache, ...]
    length: Int[Array, " batch"]

    @property
    def capacity(self) -> int:
        """Tokens a row has room for."""
        return self.layers[0].keys.shape[2]

    def with_layer(self, index: int, layer: LayerCache) -> KVCache:
        """The cache with new tokens in one layer. They are not counted until `advance`."""
        return replace(self, layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))

    def advance(self, tokens: Int[Array, " batch"]) -> KVCache:
        """Counts `tokens` more tokens per row; what layers hold behind them is overwritten by the next chunk."""
        return replace(self, length=self.length + tokens)


def empty_cache(config: TextConfig, batch: int, capacity: int, dtype: CacheType) -> KVCache:
    """A cache of zeros with room for `capacity` tokens in each of `batch` rows."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)

    # Every array is its own buffer, because the jitted steps take the cache over (donation).
    def layer() -> LayerCache:
        scales = (jnp.zeros(shape[:3]), jnp.zeros(shape[:3])) if dtype == "int8" else ()
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales)

    return KVCache(tuple(layer() for _ in range(config.layers)), jnp.zeros(batch, jnp.int32))


def grow_cache(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens."""

    def grown(array: Array) -> Array:
        return jnp.pad(array, [(0, capacity - cache.capacity if axis == 2 else 0) for axis in range(array.ndim)])

    return replace(cache, layers=jax.tree.map(grown, cache.layers))


def _narrowed(
    new: Float[Array, "batch kv_heads length head_dim"],
) -> tuple[Float[Array, "batch kv_heads length head_dim"], Float[Array, "batch kv_heads length"]]:
    """Whole numbers of -127..127 and their scales."""
    largest = jnp.max(jnp.abs(new), axis=-1)
    inverse = jnp.where(largest > 0, 127 / jnp.where(largest > 0, largest, 1), 0)
    return jnp.round(new * inverse[..., None]), largest / 127


def _write(
    cache: Num[Array, "batch kv_heads capacity *rest"],
    new: Float[Array, "batch kv_heads length *rest"],
    start: Int[Array, " batch"],
) -> Num[Array, "batch kv_heads capacity *rest"]:
    """A slice update per row: unlike a batched scatter it happens in place on the CPU."""
    new = new.astype(cache.dtype)
    for row in range(new.shape[0]):
        place = (row, 0, start[row], 0)[: cache.ndim]
        cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], place)
    return cache
