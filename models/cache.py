"""The key/value cache: one pair of arrays per layer, a row per sequence, filled from the left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.config import TextConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, float32 `[batch, kv_heads, capacity, head_dim]`, and the tokens held per row,
    int32 `[batch]`. Layers are separate arrays because XLA on CPU copies every slice of a stacked one."""

    keys: tuple[Float[Array, "batch kv_heads capacity head_dim"], ...]
    values: tuple[Float[Array, "batch kv_heads capacity head_dim"], ...]
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
        return replace(
            self,
            keys=_replaced(self.keys, layer, _write(self.keys[layer], keys, self.length)),
            values=_replaced(self.values, layer, _write(self.values[layer], values, self.length)),
        )

    def advance(self, tokens: Int[Array, " batch"]) -> KVCache:
        """Counts `tokens` more tokens per row; what `store` wrote behind them is overwritten by the next chunk."""
        return replace(self, length=self.length + tokens)


def empty_cache(config: TextConfig, batch: int, capacity: int) -> KVCache:
    """A cache of zeros with room for `capacity` tokens in each of `batch` rows."""
    shape = (batch, config.kv_heads, capacity, config.head_dim)
    # Every array is its own buffer, because the jitted steps take the cache over (donation).
    return KVCache(
        keys=tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.layers)),
        values=tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.layers)),
        length=jnp.zeros(batch, jnp.int32),
    )


def grow_cache(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens."""
    pad = ((0, 0), (0, 0), (0, capacity - cache.capacity), (0, 0))
    return replace(
        cache,
        keys=tuple(jnp.pad(keys, pad) for keys in cache.keys),
        values=tuple(jnp.pad(values, pad) for values in cache.values),
    )


def _replaced(arrays: tuple[Array, ...], index: int, array: Array) -> tuple[Array, ...]:
    return (*arrays[:index], array, *arrays[index + 1 :])


def _write(
    cache: Float[Array, "batch kv_heads capacity head_dim"],
    new: Float[Array, "batch kv_heads length head_dim"],
    start: Int[Array, " batch"],
) -> Float[Array, "batch kv_heads capacity head_dim"]:
    """A slice update per row: unlike a batched scatter it happens in place on the CPU."""
    for row in range(new.shape[0]):
        cache = jax.lax.dynamic_update_slice(cache, new[row : row + 1], (row, 0, start[row], 0))
    return cache
