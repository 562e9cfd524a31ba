"""Grouped-query attention with a norm on every query and key head, over a key/value cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.cache import KVCache
from models.config import TextConfig
from models.layers import Linear, RMSNorm
from models.rope import rotate
from models.switches import Switches

Rotation = tuple[Float[Array, "batch length half_dim"], Float[Array, "batch length half_dim"]]


class Attention(nnx.Module):
    """Causal self-attention of one decoder layer. Queries and keys are normed per head, then rotated."""

    def __init__(self, config: TextConfig, layer: int, switches: Switches) -> None:
        query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, query, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden, key_value, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden, key_value, bias=config.attention_bias)
        self.o_proj = Linear(query, config.hidden, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.head_dim = config.head_dim
        self.layer = layer
        self.qk_norm = switches.qk_norm

    def __call__(
        self, x: Float[Array, "batch length hidden"], rotation: Rotation, cache: KVCache | None
    ) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
        """Attends from `x` to what the cache holds and to `x` itself; without a cache (training) to `x` alone."""
        q = self._heads(self.q_proj(x))
        k = self._heads(self.k_proj(x))
        v = self._heads(self.v_proj(x))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
        first = jnp.zeros(x.shape[0], jnp.int32)
        if cache is not None:
            first = cache.length
            cache = cache.store(self.layer, keys, values)
            keys, values = cache.keys[self.layer], cache.values[self.layer]
        return self.o_proj(attend_causal(q, keys, values, first)), cache

    def _heads(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length heads head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


def attend_causal(
    q: Float[Array, "batch length heads head_dim"],
    keys: Float[Array, "batch kv_heads capacity head_dim"],
    values: Float[Array, "batch kv_heads capacity head_dim"],
    first: Int[Array, " batch"],
) -> Float[Array, "batch length width"]:
    """Attention of query `i` of a row to its keys `0 .. first + i`; float32, scale `head_dim ** -0.5`."""
    batch, length, heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bksd->bkgts", grouped, keys) * head_dim**-0.5
    last_visible = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    visible = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] <= last_visible[:, :, None]
    scores = jnp.where(visible[:, None, None, :, :], scores, -jnp.inf)
    mixed = jnp.einsum("bkgts,bksd->btkgd", jax.nn.softmax(scores, axis=-1), values)
    return mixed.reshape(batch, length, heads * head_dim)
