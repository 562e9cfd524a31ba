"""The key/value cache: a slot per sequence, filled from the left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from models.config import TextConfig

CacheType = Literal["float32", "bfloat16", "int8"]
CACHE_TYPES: tuple[CacheType, ...] = ("float32", "bfloat16", "int8")
COPIED_TOKENS = 256  # at a time, from slot to slot


class LayerCache(NamedTuple):
    """Keys and values of one layer, `[slots, kv_heads, capacity, head_dim]`, float32, bfloat16 or int8.

    int8 ones stand for `value * scale` with float32 `scales` of keys and of values, `[slots, kv_heads, capacity]`: the
    largest magnitude of a token's head / 127.
    """

    keys: Num[Array, "slots kv_heads capacity head_dim"]
    values: Num[Array, "slots kv_heads capacity head_dim"]
    scales: tuple[Float[Array, "slots kv_heads capacity"], ...] = ()

    def store(
        self,
        keys: Float[Array, "batch kv_heads length head_dim"],
        values: Float[Array, "batch kv_heads length head_dim"],
        slots: Int[Array, " batch"],
        start: Int[Array, " batch"],
    ) -> LayerCache:
        """Writes each row's new tokens into its slot, from position `start` on; those of rows without a slot (negative)
        nowhere."""
        if not self.scales:
            return LayerCache(_write(self.keys, keys, slots, start), _write(self.values, values, slots, start))
        (keys, key_scale), (values, value_scale) = _narrowed(keys), _narrowed(values)
        scales = (_write(self.scales[0], key_scale, slots, start), _write(self.scales[1], value_scale, slots, start))
        return LayerCache(_write(self.keys, keys, slots, start), _write(self.values, values, slots, start), scales)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The cache of every layer as a batch uses it: each row's slot, int32 `[batch]`, negative for an empty row, and the
    tokens that the slot holds, `[batch]`. Layers are separate arrays because XLA on CPU copies every slice of a stacked
    one."""

    layers: tuple[LayerCache, ...]
    slots: Int[Array, " batch"]
    length: Int[Array, " batch"]

    def with_layer(self, index: int, layer: LayerCache) -> KVCache:
        """The cache with new tokens in one layer."""
        return replace(self, layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))


def layer_shapes(config: TextConfig, slots: int, capacity: int, dtype: CacheType) -> LayerCache:
    """Shapes and dtypes of the cache of a layer, with room for `capacity` tokens in each slot."""
    shape = (slots, config.kv_heads, capacity, config.head_dim)
    numbers = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return LayerCache(numbers, numbers, (scales, scales) if dtype == "int8" else ())


def bytes_per_token(config: TextConfig, dtype: CacheType) -> int:
    """Memory that a token takes in all layers together."""
    one = jax.tree.leaves(layer_shapes(config, 1, 1, dtype))
    return config.layers * sum(array.size * array.dtype.itemsize for array in one)


def copy_prefix(
    layers: tuple[LayerCache, ...], source: Int[Array, ""], target: Int[Array, ""], tokens: Int[Array, ""]
) -> tuple[LayerCache, ...]:
    """The cache with the first `tokens` tokens of one slot in another one too, and whatever follows them up to a
    multiple of `COPIED_TOKENS`."""

    def copy(piece: Int[Array, ""], array: Array) -> Array:
        start = piece * COPIED_TOKENS
        rest = (0,) * (array.ndim - 3)
        size = (1, array.shape[1], min(COPIED_TOKENS, array.shape[2]), *array.shape[3:])
        moved = jax.lax.dynamic_slice(array, (source, 0, start, *rest), size)
        return jax.lax.dynamic_update_slice(array, moved, (target, 0, start, *rest))

    pieces = (tokens + COPIED_TOKENS - 1) // COPIED_TOKENS
    return jax.lax.fori_loop(
        0, pieces, lambda piece, layers: jax.tree.map(lambda array: copy(piece, array), layers), layers
    )


def read_block(layers: tuple[LayerCache, ...], slot: Int[Array, ""], start: Int[Array, ""], tokens: int) -> LayerCache:
    """A block: `tokens` tokens of a slot from `start` on, with the layers in the place of the slots, `[layers,
    kv_heads, tokens, head_dim]`."""

    def cut(*arrays: Array) -> Array:
        place = (slot, 0, start, 0)[: arrays[0].ndim]
        size = (1, arrays[0].shape[1], tokens, *arrays[0].shape[3:])
        return jnp.concatenate([jax.lax.dynamic_slice(array, place, size) for array in arrays])

    return jax.tree.map(cut, *layers)


def write_block(
    layers: tuple[LayerCache, ...], slot: Int[Array, ""], start: Int[Array, ""], block: LayerCache
) -> tuple[LayerCache, ...]:
    """The cache with a block in a slot, from token `start` on."""

    def paste(index: int, array: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(array, new[index : index + 1], (slot, 0, start, 0)[: array.ndim])

    return tuple(
        jax.tree.map(lambda array, new, index=index: paste(index, array, new), layer, block)
        for index, layer in enumerate(layers)
    )


def _narrowed(
    new: Float[Array, "batch kv_heads length head_dim"],
) -> tuple[Float[Array, "batch kv_heads length head_dim"], Float[Array, "batch kv_heads length"]]:
    """Whole numbers of -127..127 and their scales."""
    largest = jnp.max(jnp.abs(new), axis=-1)
    inverse = jnp.where(largest > 0, 127 / jnp.where(largest > 0, largest, 1), 0)
    return jnp.round(new * inverse[..., None]), largest / 127


def _write(
    cache: Num[Array, "slots kv_heads capacity *rest"],
    new: Float[Array, "batch kv_heads length *rest"],
    slots: Int[Array, " batch"],
    start: Int[Array, " batch"],
) -> Num[Array, "slots kv_heads capacity *rest"]:
    """A slice update per row: unlike a batched scatter it happens in place on the CPU."""
    new = new.astype(cache.dtype)
    for row in range(new.shape[0]):
        place = (slots[row], 0, start[row], 0)[: cache.ndim]
        held = jax.lax.dynamic_slice(cache, place, (1, *new.shape[1:]))
        cache = jax.lax.dynamic_update_slice(cache, jnp.where(slots[row] < 0, held, new[row : row + 1]), place)
    return cache
