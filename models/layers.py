"""The parts every network here is built from: the linear seam, embedding, norms and the gated MLP.

Parameters are named as in the published checkpoints, so that a tensor's name is its path in the network. They are
created without values, which `models.weights` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.kernels import ops, reference
from models.quantisation import CODINGS, Format, stored_shapes

# Up to this many rows a product is computed row by row, in an order that does not depend on the others: these are the
# decode steps of a batch. Beyond it, float weights take XLA's matrix product, which is faster there.
DECODE_ROWS = 32


def unfilled(shape: Sequence[int], dtype: Any = jnp.float32) -> nnx.Param:
    """A parameter that has a shape and a dtype, but no value yet."""
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), dtype))


def quantised_room(shape: Sequence[int], format: Format) -> tuple[nnx.Param, nnx.Param]:
    """Empty blocks and scales for a matrix `[outputs, inputs]`, or for stacked ones."""
    blocks, scales = stored_shapes(shape, format)
    return unfilled(blocks, CODINGS[format].dtype), unfilled(scales, jnp.float16)


def stored_weight(weight: nnx.Param, scale: nnx.Param | None) -> ops.Weight:
    """Weight and scale as the kernels take them."""
    return weight[...], ops.no_scale() if scale is None else scale[...]


class StoredMatrix:
    """Mixin of a module with a matrix `weight` `[outputs, inputs]`, kept as floats or quantised: then `weight` holds
    its blocks and `scale` their scales (`models.quantisation`), and `size` the matrix's shape."""

    weight: nnx.Param
    scale: nnx.Param | None
    size: tuple[int, int]

    def _keep(self, outputs: int, inputs: int) -> None:
        self.weight = unfilled((outputs, inputs))
        self.scale = nnx.data(None)
        self.size = (outputs, inputs)

    def store_as(self, format: Format) -> None:
        """Makes room for the matrix in a quantised format instead of floats."""
        self.weight, self.scale = quantised_room(self.size, format)

    def stored(self) -> ops.Weight:
        """Weight and scale as the kernels take them."""
        return stored_weight(self.weight, self.scale)

    @property
    def row_by_row(self) -> bool:
        """Whether a row's product is the same, to the last bit, with any number of rows."""
        return self.scale is not None


def suits_kernels(rows: int, *matrices: StoredMatrix) -> bool:
    """Whether the kernels multiply `rows` rows with these matrices faster than XLA, or alone can."""
    return rows <= DECODE_ROWS or any(matrix.scale is not None for matrix in matrices)


def products(
    x: Float[Array, "*batch inputs"], *matrices: StoredMatrix, norm: RMSNorm | None = None
) -> list[Float[Array, "*batch outputs"]]:
    """`norm(x) W^T` for matrices that share their input, which is then normed and quantised only once."""
    rows = math.prod(x.shape[:-1])
    if not suits_kernels(rows, *matrices):
        x = x if norm is None else norm(x)
        return [jnp.einsum("...i,oi->...o", x, matrix.weight[...].astype(x.dtype)) for matrix in matrices]
    flat = ops.matmul(
        x.reshape(rows, x.shape[-1]),
        ops.no_norm() if norm is None else norm.parameters(),
        [matrix.stored() for matrix in matrices],
        [matrix.size[0] for matrix in matrices],
    )
    return [product.reshape(*x.shape[:-1], -1) for product in flat]


class Linear(StoredMatrix, nnx.Module):
    """`y = x W^T + b`. With `Embedding` and the experts the one place where a stored weight meets an activation."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self._keep(outputs, inputs)
        self.bias = unfilled((outputs,)) if bias else None

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        return project(x, self)[0]


def project(
    x: Float[Array, "*batch inputs"], *layers: Linear, norm: RMSNorm | None = None
) -> list[Float[Array, "*batch outputs"]]:
    """Several linear layers on the same input, normed first."""
    return [
        y if layer.bias is None else y + jnp.broadcast_to(layer.bias[...], y.shape)
        for y, layer in zip(products(x, *layers, norm=norm), layers, strict=True)
    ]


class Embedding(StoredMatrix, nnx.Module):
    """A table of rows `[rows, hidden]`, read by index; with tied embeddings the head's matrix too."""

    def __init__(self, rows: int, hidden: int) -> None:
        self._keep(rows, hidden)

    def __call__(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        if self.scale is None:
            return self.weight[...][index].astype(jnp.float32)
        return ops.table_rows(self.stored(), index)[..., : self.size[1]]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019). Layers are handed the norm of their input
    rather than a normed input: a kernel norms what it reads anyway."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = unfilled((size,))
        self.eps = eps

    def parameters(self) -> ops.Norm:
        """Weight and epsilon as the kernels take them."""
        return self.weight[...], self.eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return reference.rms_norm(x, self.parameters())


class LayerNorm(nnx.Module):
    """Mean and variance norm over the last axis, with bias; the variance is taken around the mean in a second pass."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = unfilled((size,))
        self.bias = unfilled((size,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return normed * jnp.broadcast_to(self.weight[...], x.shape) + jnp.broadcast_to(self.bias[...], x.shape)


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020) of its normed input: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def __call__(self, x: Float[Array, "batch length hidden"], norm: RMSNorm) -> Float[Array, "batch length hidden"]:
        rows, matrices = x.shape[0] * x.shape[1], (self.gate_proj, self.up_proj, self.down_proj)
        if not suits_kernels(rows, *matrices):
            gate, up = project(x, self.gate_proj, self.up_proj, norm=norm)
            return self.down_proj(jax.nn.silu(gate) * up)
        weights = [matrix.stored() for matrix in matrices]
        flat = ops.gated_mlp(x.reshape(rows, -1), norm.parameters(), *weights, self.gate_proj.size[0])
        return flat.reshape(x.shape)
