"""The parts every network here is built from: the linear seam, embedding, norms and the gated MLP.

Parameters are named as in the published checkpoints, so that a tensor's name is its path in the network. They are
created as zeros: networks are built abstractly (`nnx.eval_shape`) and filled by `models.weights`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class Linear(nnx.Module):
    """`y = x W^T + b`. The one place where a stored weight meets an activation: a weight may be stored in a narrower
    type than the activations and is widened here."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class Embedding(nnx.Module):
    """A table of rows `[rows, hidden]`, read by index."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, hidden)))

    def __call__(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        return self.weight[...][index].astype(jnp.float32)

    def attend(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch rows"]:
        """The product with every row: the head of a model with tied embeddings."""
        return jnp.einsum("...h,rh->...r", x, self.weight[...].astype(x.dtype))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.zeros(size))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * scale * jnp.broadcast_to(self.weight[...], x.shape)


class LayerNorm(nnx.Module):
    """Mean and variance norm over the last axis, with bias; the variance is taken around the mean in a second pass."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.zeros(size))
        self.bias = nnx.Param(jnp.zeros(size))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return normed * jnp.broadcast_to(self.weight[...], x.shape) + jnp.broadcast_to(self.bias[...], x.shape)


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def __call__(self, x: Float[Array, "batch length hidden"]) -> Float[Array, "batch length hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
