"""The mixture-of-experts block: a float32 router picks `top_k` experts per token and mixes their outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import MoeConfig
from models.kernels import ops
from models.layers import DECODE_ROWS, Linear
from models.quantisation import Format, stored_shapes


class Experts(nnx.Module):
    """The weights of all experts, stacked: gate and up `[experts, 2 * intermediate, hidden]` (gate first), down
    `[experts, hidden, intermediate]`; quantised, their blocks and scales (`models.quantisation`)."""

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        self.gate_up_proj = nnx.Param(jnp.zeros((config.experts, 2 * config.intermediate, hidden)))
        self.down_proj = nnx.Param(jnp.zeros((config.experts, hidden, config.intermediate)))
        self.gate_up_proj_scale: nnx.Param | None = nnx.data(None)
        self.down_proj_scale: nnx.Param | None = nnx.data(None)
        self.intermediate = config.intermediate

    def store_as(self, format: Format) -> None:
        """Makes room for the matrices in a quantised format instead of floats."""
        dtype = jnp.uint8 if format == "q4" else jnp.int8
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = stored_shapes(getattr(self, name).get_value().shape, format)
            setattr(self, name, nnx.Param(jnp.zeros(blocks, dtype)))
            setattr(self, f"{name}_scale", nnx.Param(jnp.zeros(scales, jnp.float16)))

    @property
    def quantised(self) -> bool:
        return self.gate_up_proj_scale is not None

    def chosen(
        self,
        x: Float[Array, "tokens hidden"],
        experts: Int[Array, "tokens top_k"],
        shares: Float[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        """Reads only the chosen experts."""
        scales = [
            ops.no_scale() if scale is None else scale[...] for scale in (self.gate_up_proj_scale, self.down_proj_scale)
        ]
        gate_up, down = (self.gate_up_proj[...], scales[0]), (self.down_proj[...], scales[1])
        return ops.experts(x, experts, shares, gate_up, down, self.intermediate)

    def all(
        self, x: Float[Array, "tokens hidden"], shares: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens hidden"]:
        """Runs every expert on every token, with a share of 0 where it was not chosen; floats only. Can be trained."""

        def add_expert(
            total: Float[Array, "tokens hidden"], expert: tuple[Array, Array, Array]
        ) -> tuple[Float[Array, "tokens hidden"], None]:
            gate_up, down, share = expert
            gate, up = jnp.split(x @ gate_up.astype(x.dtype).T, 2, axis=-1)
            return total + share[:, None] * ((jax.nn.silu(gate) * up) @ down.astype(x.dtype).T), None

        weights = (self.gate_up_proj[...], self.down_proj[...], shares.T)
        return jax.lax.scan(add_expert, jnp.zeros_like(x), weights)[0]


class MoeBlock(nnx.Module):
    """Router and experts in the place of a layer's MLP. Ties go to the expert with the lower index."""

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        self.gate = Linear(hidden, config.experts)
        self.experts = Experts(config, hidden)
        self.config = config

    def __call__(self, x: Float[Array, "batch length hidden"]) -> Float[Array, "batch length hidden"]:
        tokens = x.reshape(-1, x.shape[-1])
        shares, experts = self.route(tokens)
        if self.experts.quantised or tokens.shape[0] <= DECODE_ROWS:
            mixed = self.experts.chosen(tokens, experts, shares)
        else:
            rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
            by_expert = jnp.zeros((tokens.shape[0], self.config.experts), x.dtype).at[rows, experts].set(shares)
            mixed = self.experts.all(tokens, by_expert)
        return mixed.reshape(x.shape)

    def route(
        self, tokens: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
        """Each token's shares and experts, best first. Softmax runs over all experts before the choice; the chosen
        shares are renormalised only if the configuration says so."""
        probabilities = self.probabilities(tokens)
        shares, experts = jax.lax.top_k(probabilities, self.config.top_k)
        if self.config.normalise:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        return shares, experts

    def probabilities(self, tokens: Float[Array, "tokens hidden"]) -> Float[Array, "tokens experts"]:
        """The router's float32 distribution over all experts."""
        return jax.nn.softmax(self.gate(tokens), axis=-1)
