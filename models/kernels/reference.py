"""The kernels' arithmetic in plain JAX: what the compiled kernels are tested against, and what takes their place where
there is no compiler. Sums run in the same order but may be rounded differently (fused or separate multiply-add)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from models.cache import LayerCache
from models.quantisation import GROUP
from models.quantisation import ROWS as BLOCK
from models.rope import Rotation, rotate

Weight = tuple[Num[Array, "..."], Float[Array, "..."]]
Norm = tuple[Float[Array, " size"], float]  # weight and epsilon; an empty weight stands for no norm


def rms_norm(x: Float[Array, "*batch size"], norm: Norm) -> Float[Array, "*batch size"]:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    weight, eps = norm
    if weight.size == 0:
        return x
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * jnp.broadcast_to(weight, x.shape)


def is_quantised(weight: Array) -> bool:
    """Whether a stored weight is q4 (uint8) or q8 (int8)."""
    return weight.dtype in (jnp.uint8, jnp.int8)


def unpack(weight: Num[Array, "*stack blocks groups bytes"]) -> Int[Array, "*stack rows groups group"]:
    """The whole numbers of a q4 or q8 weight, int32, its rows padded to whole blocks."""
    stack, (blocks, groups, _) = weight.shape[:-3], weight.shape[-3:]
    if weight.dtype == jnp.uint8:
        quads = weight.reshape(*stack, blocks, groups, 4, 1, BLOCK, 4)
        values = jnp.concatenate([quads & 15, quads >> 4], axis=-3).astype(jnp.int32) - 8
    else:
        values = weight.astype(jnp.int32)
    values = values.reshape(*stack, blocks, groups, GROUP // 4, BLOCK, 4)
    by_row = jnp.moveaxis(values, -2, -4)  # blocks, rows, groups, quads, values
    return by_row.reshape(*stack, blocks * BLOCK, groups, GROUP)


def row_scales(scale: Float[Array, "*stack blocks groups rows"]) -> Float[Array, "*stack outputs groups"]:
    """A weight's scales, float32, by row."""
    return jnp.moveaxis(scale, -1, -2).reshape(*scale.shape[:-3], -1, scale.shape[-2]).astype(jnp.float32)


def quantise_rows(
    x: Float[Array, "rows inputs"],
) -> tuple[Float[Array, "rows groups group"], Float[Array, "rows groups"]]:
    """Activations as whole numbers of -127..127, kept in float32, and the scale of each group: max|x| / 127."""
    rows, inputs = x.shape
    grouped = jnp.pad(x, ((0, 0), (0, -inputs % GROUP))).reshape(rows, -1, GROUP)
    most = jnp.max(jnp.abs(grouped), axis=-1)
    inverse = jnp.where(most > 1.2e-36, 127.0 / jnp.where(most > 0, most, 1.0), 0.0)
    scales = jnp.where(inverse > 0, most / 127.0, jnp.where(jnp.isfinite(most), 0.0, jnp.nan))
    return jnp.round(grouped * jnp.where(jnp.isfinite(inverse), inverse, 0.0)[..., None]), scales


def matmul(x: Float[Array, "rows inputs"], weight: Array, scale: Array, outputs: int) -> Float[Array, "rows outputs"]:
    """`x W^T`. Quantised: per group an exact product of whole numbers, the groups summed in order."""
    if not is_quantised(weight):
        return jnp.einsum("ri,oi->ro", x, weight.astype(x.dtype))
    values, scales = quantise_rows(x)

    def add_group(total: Array, group: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        own, own_scales, others, other_scales = group
        exact = jnp.einsum("ri,oi->ro", own, others.astype(jnp.float32), precision="highest")
        return total + exact * (own_scales[:, None] * other_scales[None, :]), None

    groups = (values.swapaxes(0, 1), scales.T, unpack(weight).swapaxes(0, 1), row_scales(scale).T)
    total = jnp.zeros((x.shape[0], weight.shape[0] * BLOCK), jnp.float32)
    return jax.lax.scan(add_group, total, groups)[0][:, :outputs]


def gated_mlp(
    x: Float[Array, "rows hidden"], norm: Norm, gate: Weight, up: Weight, down: Weight, intermediate: int
) -> Float[Array, "rows hidden"]:
    """SwiGLU (Shazeer 2020) of normed rows: `down(silu(gate(x)) * up(x))`."""
    normed = rms_norm(x, norm)
    gated = jax.nn.silu(matmul(normed, *gate, intermediate)) * matmul(normed, *up, intermediate)
    return matmul(gated, *down, x.shape[-1])


def choose_experts(
    logits: Float[Array, "tokens experts"], top_k: int, normalise: bool
) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
    """Shares and ids of the likeliest experts: softmax over all of them comes before the choice."""
    shares, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    return shares / jnp.sum(shares, axis=-1, keepdims=True) if normalise else shares, ids


def experts(
    x: Float[Array, "tokens hidden"],
    norm: Norm,
    ids: Int[Array, "tokens top_k"],
    shares: Float[Array, "tokens top_k"],
    gate_up: Weight,
    down: Weight,
    intermediate: int,
) -> Float[Array, "tokens hidden"]:
    """The mixture of the chosen experts, on normed tokens. Every expert runs on every token, with a share of 0 where
    it was not chosen."""
    tokens, hidden = x.shape
    x = rms_norm(x, norm)
    count = gate_up[0].shape[0]
    rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    by_expert = jnp.zeros((tokens, count), x.dtype).at[rows, ids].add(shares)
    quantised = is_quantised(gate_up[0])
    empty = jnp.zeros((count, 0), jnp.float16)

    def add_expert(total: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        wide, wide_scale, narrow, narrow_scale, share = expert
        gate, up = jnp.split(matmul(x, wide, wide_scale, 2 * intermediate), 2, axis=-1)
        return total + share[:, None] * matmul(jax.nn.silu(gate) * up, narrow, narrow_scale, hidden), None

    scales = (gate_up[1], down[1]) if quantised else (empty, empty)
    stacked = (gate_up[0], scales[0], down[0], scales[1], by_expert.T)
    return jax.lax.scan(add_expert, jnp.zeros_like(x), stacked)[0]


def turned(
    heads: Float[Array, "batch length heads head_dim"], norm: Norm, rotation: Rotation
) -> Float[Array, "batch length heads head_dim"]:
    """Queries or keys as attention compares them: normed per head and rotated."""
    return rotate(rms_norm(heads, norm), *rotation)


def self_attention(
    queries: Float[Array, "batch length heads head_dim"],
    keys: Float[Array, "batch length kv_heads head_dim"],
    values: Float[Array, "batch length kv_heads head_dim"],
    norms: tuple[Norm, Norm],
    rotation: Rotation,
) -> Float[Array, "batch length width"]:
    """Causal attention of a stretch of tokens to itself, its queries and keys normed and rotated first."""
    queries, keys = (turned(x, norm, rotation) for x, norm in zip((queries, keys), norms, strict=True))
    first = jnp.zeros(queries.shape[0], jnp.int32)
    return attention(queries, keys.swapaxes(1, 2), values.swapaxes(1, 2), first, ())


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
    """Attention of new tokens to the `first` ones that their row's slot holds and to themselves, and the cache with
    their keys and values. Queries and keys are normed and rotated first. A row whose slot is negative gives zeros."""
    queries, keys = (turned(x, norm, rotation) for x, norm in zip((queries, keys), norms, strict=True))
    layer = layer.store(keys.swapaxes(1, 2), values.swapaxes(1, 2), slots, first)
    own = LayerCache(*jax.tree.map(lambda array: array[jnp.maximum(slots, 0)], layer))
    mixed = attention(queries, own.keys, own.values, first, own.scales)
    return jnp.where((slots >= 0)[:, None, None], mixed, 0.0), layer


def attention(
    queries: Float[Array, "batch length heads head_dim"],
    keys: Num[Array, "batch kv_heads capacity head_dim"],
    values: Num[Array, "batch kv_heads capacity head_dim"],
    first: Int[Array, " batch"],
    scales: Sequence[Float[Array, "batch kv_heads capacity"]],
) -> Float[Array, "batch length width"]:
    """Attention of query `i` of a row to its positions `0 .. first + i`; float32, scale `head_dim ** -0.5`.

    `scales` are those of the keys and values of an int8 cache, else none. The kernels round what they multiply an int8
    cache by to 16 bits (`Variant::attend`), which is not done here.
    """
    batch, length, heads, head_dim = queries.shape
    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    if scales:
        keys, values = keys * scales[0][..., None], values * scales[1][..., None]
    kv_heads, capacity = keys.shape[1:3]
    grouped = queries.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bksd->bkgts", grouped, keys) * head_dim**-0.5
    last_visible = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    visible = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] <= last_visible[:, :, None]
    scores = jnp.where(visible[:, None, None, :, :], scores, -jnp.inf)
    mixed = jnp.einsum("bkgts,bksd->btkgd", jax.nn.softmax(scores, axis=-1), values)
    return mixed.reshape(batch, length, heads * head_dim)
