"""Grouped-query attention with a norm on every query and key head, over a key/value cache."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.cache import KVCache
from models.config import TextConfig
from models.kernels import ops, reference
from models.layers import Linear, RMSNorm, project
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
        q, k, v = (self._heads(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if cache is None:
            return self.o_proj(reference.attention(q, keys, values, jnp.zeros(x.shape[0], jnp.int32), ())), None
        cache = cache.store(self.layer, keys, values)
        # For the many queries of a prefill chunk XLA's matrix product is faster than the kernel.
        attend = ops.attention if x.shape[1] == 1 else reference.attention
        return self.o_proj(attend(q, *cache.layer(self.layer))), cache

    def _heads(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length heads head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)
