"""The kernels as functions on JAX arrays. A weight is a pair of arrays: quantised (`models.quantisation`: blocks of q4 or q8
and float16 scales) or float32 / bfloat16 `[outputs, inputs]` with an empty scale."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from models.kernels import reference
from models.kernels.library import active_variant
from models.kernels.reference import Weight


def no_scale() -> Float[Array, "0"]:
    """The scale of a float weight."""
    return jnp.zeros(0, jnp.float16)


def matmul(
    x: Float[Array, "rows inputs"], weights: Sequence[Weight], outputs: Sequence[int]
) -> list[Float[Array, "rows outputs"]]:
    """`x W^T` for one or more weights that share their input; a row's result does not depend on the other rows."""
    if active_variant() is None:
        return [
            reference.matmul(x, weight, scale, size) for (weight, scale), size in zip(weights, outputs, strict=True)
        ]
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in outputs]
    return list(jax.ffi.ffi_call("kestrel_matmul", results)(x, *(array for weight in weights for array in weight)))


def experts(
    x: Float[Array, "tokens hidden"],
    ids: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Weight,
    down: Weight,
    intermediate: int,
) -> Float[Array, "tokens hidden"]:
    """Per token the sum over its experts of `share * down(silu(gate(x)) * up(x))`; weights `[experts, ...]`, gate before
    up. Reads only the chosen experts, each once for all its tokens."""
    if active_variant() is None:
        return reference.experts(x, ids, shares, gate_up, down, intermediate)
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("kestrel_experts", result)
    return call(x, ids, shares, *gate_up, *down, intermediate=np.int64(intermediate))


def attention(
    queries: Float[Array, "batch length heads head_dim"],
    keys: Num[Array, "batch kv_heads capacity head_dim"],
    values: Num[Array, "batch kv_heads capacity head_dim"],
    first: Int[Array, " batch"],
    scales: Sequence[Float[Array, "batch kv_heads capacity"]] = (),
) -> Float[Array, "batch length width"]:
    """Attention of query `i` of a row to its positions `0 .. first + i`, scale `head_dim ** -0.5`. Keys and values are
    float32, bfloat16, or int8 with `scales`. Reads no position that is not visible."""
    if active_variant() is None:
        return reference.attention(queries, keys, values, first, scales)
    batch, length, heads, head_dim = queries.shape
    result = jax.ShapeDtypeStruct((batch, length, heads * head_dim), jnp.float32)
    call = jax.ffi.ffi_call("kestrel_attention", result)
    return call(queries, keys, values, first, *scales, scale=np.float32(head_dim**-0.5))
