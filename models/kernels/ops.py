"""The kernels as functions on JAX arrays.

A weight is a pair of arrays: quantised (`models.quantisation`: blocks of q4 or q8, and float16 scales), or float32 or
bfloat16 `[outputs, inputs]` with an empty scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from models.kernels import reference
from models.kernels.loader import active_variant
from models.kernels.reference import Weight


def no_scale() -> Array:
    """The scale of a float weight: float16 `[0]`."""
    return jnp.zeros(0, jnp.float16)


def _compiled(call: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """`call(*arguments)`, with the derivatives of `plain`, the same function in plain JAX; where there are no compiled
    kernels, `plain` itself."""
    if active_variant() is None:
        return plain(*arguments)
    function = jax.custom_jvp(call)
    function.defjvp(lambda primals, tangents: (function(*primals), jax.jvp(plain, primals, tangents)[1]))
    return function(*arguments)


def matmul(
    x: Float[Array, "rows inputs"], weights: Sequence[Weight], outputs: Sequence[int]
) -> list[Float[Array, "rows outputs"]]:
    """`x W^T` for one or more weights that share their input; a row's result does not depend on the other rows."""
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in outputs]

    def call(x: Array, *arrays: Array) -> list[Array]:
        return list(jax.ffi.ffi_call("kestrel_matmul", results)(x, *arrays))

    def plain(x: Array, *arrays: Array) -> list[Array]:
        pairs = zip(arrays[::2], arrays[1::2], outputs, strict=True)
        return [reference.matmul(x, weight, scale, size) for weight, scale, size in pairs]

    return _compiled(call, plain, x, *(array for weight in weights for array in weight))


def table_rows(weight: Weight, index: Int[Array, "*batch"]) -> Float[Array, "*batch inputs"]:
    """Rows of a quantised matrix as floats, padded to whole groups."""
    block = index // reference.BLOCK
    stored, scale = (array[block][..., None, :, :] for array in weight)  # one block for each index
    rows = reference.unpack(stored).astype(jnp.float32) * reference.row_scales(scale)[..., None]
    row = (index % reference.BLOCK)[..., None, None, None]
    return jnp.take_along_axis(rows, row, axis=-3).reshape(*index.shape, -1)


def experts(
    x: Float[Array, "tokens hidden"],
    ids: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Weight,
    down: Weight,
    intermediate: int,
) -> Float[Array, "tokens hidden"]:
    """Per token the sum over its experts of `share * down(silu(gate(x)) * up(x))`.

    Weights are stacked, `[experts, ...]`, gate before up. Only the chosen experts are read, each once for all its
    tokens; a token's result does not depend on the others.
    """
    call = jax.ffi.ffi_call("kestrel_experts", jax.ShapeDtypeStruct(x.shape, jnp.float32))

    def plain(x: Array, ids: Array, shares: Array, *arrays: Array) -> Array:
        return reference.experts(x, ids, shares, arrays[:2], arrays[2:], intermediate)

    return _compiled(partial(call, intermediate=np.int64(intermediate)), plain, x, ids, shares, *gate_up, *down)


def attention(
    queries: Float[Array, "batch length heads head_dim"],
    keys: Num[Array, "batch kv_heads capacity head_dim"],
    values: Num[Array, "batch kv_heads capacity head_dim"],
    first: Int[Array, " batch"],
    scales: Sequence[Float[Array, "batch kv_heads capacity"]] = (),
) -> Float[Array, "batch length width"]:
    """Attention of query `i` of a row to its positions `0 .. first + i`, scale `head_dim ** -0.5`. Keys and values are
    float32, bfloat16, or int8 with `scales`. Reads no position that is not visible."""
    batch, length, heads, head_dim = queries.shape
    call = jax.ffi.ffi_call("kestrel_attention", jax.ShapeDtypeStruct((batch, length, heads * head_dim), jnp.float32))

    def plain(queries: Array, keys: Array, values: Array, first: Array, *scales: Array) -> Array:
        return reference.attention(queries, keys, values, first, scales)

    return _compiled(partial(call, scale=np.float32(head_dim**-0.5)), plain, queries, keys, values, first, *scales)
