"""Grouped-query attention with a norm on every query and key head, over a key/value cache."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from models.cache import KVCache
from models.config import TextConfig
from models.kernels import ops, reference
from models.layers import Linear, RMSNorm, project
from models.rope import Rotation
from models.switches import Switches


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
        self, x: Float[Array, "batch length hidden"], norm: RMSNorm, rotation: Rotation, cache: KVCache | None
    ) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
        """Attends from `x`, normed, to what the cache holds and to itself; without a cache (training) to itself."""
        q, k, v = (self._heads(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj, norm=norm))
        if cache is None:
            return self.o_proj(reference.self_attention(q, k, v, self._norms(), rotation)), None
        layer = cache.layers[self.layer]
        mixed, layer = ops.cached_attention(q, k, v, self._norms(), rotation, cache.slots, cache.length, layer)
        return self.o_proj(mixed), cache.with_layer(self.layer, layer)

    def _norms(self) -> tuple[ops.Norm, ops.Norm]:
        """Those of queries and keys."""
        if not self.qk_norm:
            return ops.no_norm(), ops.no_norm()
        return self.q_norm.parameters(), self.k_norm.parameters()

    def _heads(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length heads head_dim"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)
