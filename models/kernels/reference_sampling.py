"""The choice of the next tokens in plain JAX: what the compiled kernel is tested against, and what takes its place
where there is no compiler."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt

from models.sampling import MAX_TOP_LOGPROBS, Sampled, SamplingState


def sample(
    logits: Float[Array, "batch vocab"],
    state: SamplingState,
    slots: Int[Array, " batch"],
    allowed: UInt[Array, "batch words"],
) -> tuple[Sampled, SamplingState]:
    """The next token of every row, and the state in which it is counted."""
    rows = jax.tree.map(lambda array: array[jnp.maximum(slots, 0)], state)
    adjusted = penalised(logits, rows)
    adjusted = jnp.where(allowed_tokens(allowed, logits.shape[-1]) & ~jnp.isnan(adjusted), adjusted, -jnp.inf)
    greedy, drawing = jnp.argmax(adjusted, axis=-1).astype(jnp.int32), (slots >= 0) & (rows.temperature > 0)
    token = jax.lax.cond(
        jnp.any(drawing), lambda: jnp.where(drawing, drawn_tokens(adjusted, rows), greedy), lambda: greedy
    )
    counted = jnp.where(slots < 0, len(state.step), slots)  # out of bounds, where updates are dropped
    counts = state.counts.at[counted, token].add(1, mode="drop")
    step = state.step.at[counted].add(1, mode="drop")
    sampled = jax.tree.map(
        lambda told: jnp.where((slots >= 0).reshape(-1, *[1] * (told.ndim - 1)), told, jnp.zeros_like(told)),
        described(logits, token, rows.top_logprobs),
    )
    return sampled, replace(state, counts=counts, step=step)


def allowed_tokens(allowed: UInt[Array, "batch words"], vocab: int) -> Bool[Array, "batch vocab"]:
    """The constraints, a boolean per token."""
    bits = jnp.arange(32, dtype=jnp.uint32)[None, None]
    unpacked = (allowed[:, :, None] >> bits) & jnp.uint32(1)
    return unpacked.reshape(len(allowed), -1)[:, :vocab] == 1


def penalised(logits: Float[Array, "batch vocab"], rows: SamplingState) -> Float[Array, "batch vocab"]:
    """Logits after penalties and bias."""
    penalty, counts = rows.repetition_penalty[:, None], rows.counts.astype(jnp.float32)
    repeated = rows.in_prompt | (rows.counts > 0)
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - rows.frequency_penalty[:, None] * counts
    logits = logits - rows.presence_penalty[:, None] * (rows.counts > 0).astype(jnp.float32)
    return logits + rows.bias


def drawn_tokens(logits: Float[Array, "batch vocab"], rows: SamplingState) -> Int[Array, " batch"]:
    """One draw per row from the filtered distribution, by the Gumbel-max trick."""
    order = jnp.argsort(-logits, axis=-1, stable=True).astype(jnp.int32)  # the best first, ties by lower id
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    logits = jnp.take_along_axis(logits, order, axis=-1)
    scaled = (logits - logits[:, :1]) / temperature
    weights = jnp.exp(scaled)
    most = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[-1])[:, None]
    left = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) < most) & (weights >= rows.min_p[:, None])
    upto = jnp.cumsum(jnp.where(left, weights, 0.0), axis=-1)
    before = jnp.pad(upto[:, :-1], [(0, 0), (1, 0)])
    left &= (rows.top_p[:, None] == 1) | (before < rows.top_p[:, None] * upto[:, -1:])
    sums = jnp.where(left, scaled + gumbel_noise(rows, order), -jnp.inf)
    drawn = sums == jnp.max(sums, axis=-1, keepdims=True)
    return jnp.min(jnp.where(drawn, order, logits.shape[-1] - 1), axis=-1)


def gumbel_noise(rows: SamplingState, tokens: Int[Array, "batch some"]) -> Float[Array, "batch some"]:
    """Noise from a row's key, its step and the token, in whatever order tokens come."""

    def bits(key: Array, step: Array, tokens: Array) -> Array:
        counters = jnp.concatenate([jnp.full_like(tokens, step), tokens]).astype(jnp.uint32)
        return threefry_2x32(key, counters)[: len(tokens)]

    # 23 bits and a half: as many as float32 holds without rounding up to 1.
    uniform = ((jax.vmap(bits)(rows.key, rows.step, tokens) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def described(
    logits: Float[Array, "batch vocab"], token: Int[Array, " batch"], wanted: Int[Array, " batch"]
) -> Sampled:
    """What the model's own distribution says of the chosen tokens; of rows that want them, the best tokens too."""
    first, logprobs = jnp.argmax(logits, axis=-1, keepdims=True), jax.nn.log_softmax(logits, axis=-1)
    others = jnp.where(jax.lax.broadcasted_iota(first.dtype, logits.shape, 1) == first, -jnp.inf, logits)
    shape = (len(logits), min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    best, tokens = jax.lax.cond(
        jnp.any(wanted > 0),
        lambda: tuple(jax.lax.top_k(logprobs, shape[1])),
        lambda: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)),
    )
    told = (wanted > 0)[:, None]
    return Sampled(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0],
        margin=jnp.max(logits, axis=-1) - jnp.max(others, axis=-1),
        top_tokens=jnp.where(told, tokens, 0),
        top_logprobs=jnp.where(told, best, 0.0),
    )
