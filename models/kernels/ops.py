"""The kernels as functions on JAX arrays.

A weight is a pair of arrays: quantised (`models.quantisation`: blocks of q4 or q8, and float16 scales), or float32 or
bfloat16 `[outputs, inputs]` with an empty scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from models.cache import LayerCache
from models.kernels import reference, reference_sampling
from models.kernels.loader import active_variant
from models.kernels.reference import Norm, Weight
from models.rope import Rotation
from models.sampling import MAX_TOP_LOGPROBS, Sampled, SamplingState


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


def no_norm() -> Norm:
    """Leaves rows as they are."""
    return jnp.zeros(0), 0.0


def matmul(
    x: Float[Array, "rows inputs"], norm: Norm, weights: Sequence[Weight], outputs: Sequence[int]
) -> list[Float[Array, "rows outputs"]]:
    """`norm(x) W^T` for one or more weights that share their input; a row's result does not depend on other rows."""
    results = [jax.ShapeDtypeStruct((x.shape[0], size), jnp.float32) for size in outputs]
    norm_weight, eps = norm

    def call(*arrays: Array) -> list[Array]:
        return list(jax.ffi.ffi_call("kestrel_matmul", results)(*arrays, eps=np.float32(eps)))

    def plain(x: Array, norm_weight: Array, *arrays: Array) -> list[Array]:
        x = reference.rms_norm(x, (norm_weight, eps))
        pairs = zip(arrays[::2], arrays[1::2], outputs, strict=True)
        return [reference.matmul(x, weight, scale, size) for weight, scale, size in pairs]

    return _compiled(call, plain, x, norm_weight, *(array for weight in weights for array in weight))


def gated_mlp(
    x: Float[Array, "rows hidden"], norm: Norm, gate: Weight, up: Weight, down: Weight, intermediate: int
) -> Float[Array, "rows hidden"]:
    """`down(silu(gate(norm(x))) * up(norm(x)))`; a row's result does not depend on other rows."""
    norm_weight, eps = norm
    call = jax.ffi.ffi_call("kestrel_gated_mlp", jax.ShapeDtypeStruct(x.shape, jnp.float32))

    def plain(x: Array, norm_weight: Array, *arrays: Array) -> Array:
        weights = zip(arrays[::2], arrays[1::2], strict=True)
        return reference.gated_mlp(x, (norm_weight, eps), *weights, intermediate)

    call = partial(call, intermediate=np.int64(intermediate), eps=np.float32(eps))
    return _compiled(call, plain, x, norm_weight, *gate, *up, *down)


def table_rows(weight: Weight, index: Int[Array, "*batch"]) -> Float[Array, "*batch inputs"]:
    """Rows of a quantised matrix as floats, padded to whole groups."""
    block = index // reference.BLOCK
    stored, scale = (array[block][..., None, :, :] for array in weight)  # one block for each index
    rows = reference.unpack(stored).astype(jnp.float32) * reference.row_scales(scale)[..., None]
    row = (index % reference.BLOCK)[..., None, None, None]
    return jnp.take_along_axis(rows, row, axis=-3).reshape(*index.shape, -1)


def choose_experts(
    logits: Float[Array, "tokens experts"], top_k: int, normalise: bool
) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
    """The likeliest experts of every token by the router's logits: their shares and ids, the best first, ties by lower
    id. Shares are probabilities over all experts; if `normalise`, those of the chosen ones add up to 1."""
    shape = (logits.shape[0], top_k)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)]

    def call(logits: Array) -> tuple[Array, Array]:
        return tuple(jax.ffi.ffi_call("kestrel_choose_experts", results)(logits, normalise=np.bool_(normalise)))

    def plain(logits: Array) -> tuple[Array, Array]:
        return reference.choose_experts(logits, top_k, normalise)

    return _compiled(call, plain, logits)


def experts(
    x: Float[Array, "tokens hidden"],
    norm: Norm,
    ids: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Weight,
    down: Weight,
    intermediate: int,
) -> Float[Array, "tokens hidden"]:
    """Per token the sum over its experts of `share * down(silu(gate(norm(x))) * up(norm(x)))`.

    Weights are stacked, `[experts, ...]`, gate before up. Only the chosen experts are read, each once for all its
    tokens; a token's result does not depend on the others.
    """
    norm_weight, eps = norm
    call = jax.ffi.ffi_call("kestrel_experts", jax.ShapeDtypeStruct(x.shape, jnp.float32))

    def plain(x: Array, norm_weight: Array, ids: Array, shares: Array, *arrays: Array) -> Array:
        return reference.experts(x, (norm_weight, eps), ids, shares, arrays[:2], arrays[2:], intermediate)

    call = partial(call, intermediate=np.int64(intermediate), eps=np.float32(eps))
    return _compiled(call, plain, x, norm_weight, ids, shares, *gate_up, *down)


def cached_attention(
    queries: Float[Array, "batch length heads head_dim"],
    keys: Float[Array, "batch length kv_heads head_dim"],
    values: Float[Array, "batch length kv_heads head_dim"],
    norms: tuple[Norm, Norm],
    rotation: Rotation,
    slots: Int[Array, " batch"],
    first: Int[Array, " batch"],
    layer: LayerCache,
) -> tuple[Float[Array, "batch length width"], LayerCache]:
    """Attention of new tokens to the `first` ones that their row's slot of the cache holds and to themselves, scale
    `head_dim ** -0.5`; and the cache with their keys and values, changed in place where it was donated.

    Queries and keys are normed (`norms`, with one epsilon) and rotated first. Reads no position that is not visible. A
    row whose slot is negative gives zeros, and changes nothing.
    """
    batch, length, heads, head_dim = queries.shape
    cached, structure = jax.tree.flatten(layer)
    given = (queries, keys, values, norms[0][0], norms[1][0], *rotation, slots, first)
    results = [jax.ShapeDtypeStruct((batch, length, heads * head_dim), jnp.float32)]
    results += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in cached]
    in_place = {len(given) + index: 1 + index for index in range(len(cached))}
    eps = norms[0][1]

    def call(*arrays: Array) -> tuple[Array, ...]:
        call = jax.ffi.ffi_call("kestrel_attention", results, input_output_aliases=in_place)
        return tuple(call(*arrays, scale=np.float32(head_dim**-0.5), eps=np.float32(eps)))

    def plain(queries: Array, keys: Array, values: Array, query_norm: Array, key_norm: Array, *rest: Array) -> Any:
        cos, sin, slots, first, *cached = rest
        norms = ((query_norm, eps), (key_norm, eps))
        layer = jax.tree.unflatten(structure, cached)
        mixed, layer = reference.cached_attention(queries, keys, values, norms, (cos, sin), slots, first, layer)
        return mixed, *jax.tree.leaves(layer)

    mixed, *cached = _compiled(call, plain, *given, *cached)
    return mixed, jax.tree.unflatten(structure, cached)


def sample(
    logits: Float[Array, "batch vocab"],
    state: SamplingState,
    slots: Int[Array, " batch"],
    allowed: UInt[Array, "batch words"],
) -> tuple[Sampled, SamplingState]:
    """Chooses the next token of every row as its slot's sequence does, and counts it there: in place, where the state
    was donated. A row whose slot is negative belongs to none, and gives zeros. Of rows that share a slot, none sees
    what the others choose.

    `allowed` has a bit for every token that a row's constraint lets through: token `i` in bit `i % 32` of word
    `i // 32`. Draws use the Gumbel-max trick, with noise from the slot's key, its step and the token.
    """
    if active_variant() is None:
        return reference_sampling.sample(logits, state, slots, allowed)
    batch, vocab = logits.shape
    top = min(MAX_TOP_LOGPROBS, vocab)
    shapes = Sampled(
        token=jax.ShapeDtypeStruct((batch,), jnp.int32),
        logprob=jax.ShapeDtypeStruct((batch,), jnp.float32),
        margin=jax.ShapeDtypeStruct((batch,), jnp.float32),
        top_tokens=jax.ShapeDtypeStruct((batch, top), jnp.int32),
        top_logprobs=jax.ShapeDtypeStruct((batch, top), jnp.float32),
    )
    told, structure = jax.tree.flatten(shapes)
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    changed = ("counts", "step")
    results = told + [jax.ShapeDtypeStruct(fields[name].shape, fields[name].dtype) for name in changed]
    given = (logits, slots, allowed)
    in_place = {len(given) + list(fields).index(name): len(told) + index for index, name in enumerate(changed)}
    call = jax.ffi.ffi_call("kestrel_sample", results, input_output_aliases=in_place)
    *told, counts, step = call(*given, *fields.values(), top=np.int64(top))
    return jax.tree.unflatten(structure, told), dataclasses.replace(state, counts=counts, step=step)


def unwritten(*arrays: jax.ShapeDtypeStruct) -> list[Array]:
    """Arrays whose values do not matter, because they are written before they are read: their memory is not touched. In
    plain JAX, which may multiply what it does not need by zero, they are zeros."""
    if active_variant() is None:
        return [jnp.zeros(array.shape, array.dtype) for array in arrays]
    return list(jax.ffi.ffi_call("kestrel_unwritten", list(arrays))())
