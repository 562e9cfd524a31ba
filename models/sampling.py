"""From logits to a token, inside jit: penalties, bias, constraint, temperature, top-k, min-p, top-p and a seeded draw
per row.

Every row of a batch has its own parameters, counts and random stream, so what it draws depends on nothing but its own
logits, parameters and seed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt

from models.errors import ConfigError
from models.row_sums import row_sums

MAX_TOP_LOGPROBS = 20
ONE_AS_BITS = 0x3F800000  # the bit pattern of float32 1.0
MOST_TOP_K = 2**31 - 1  # more than any vocabulary has
LEAST = 1e-6  # where float32 arithmetic would overflow, or find nothing; a choice is the same as with less
CANDIDATES = 256  # the best tokens: all that a usual top-k leaves, or top-p where a model is fairly sure
ALL_TOKENS = np.uint32(0xFFFFFFFF)  # a word of a constraint that lets its 32 tokens through


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens. `temperature` 0 is greedy: the first largest logit, after penalties and bias.

    Candidates pass `top_k` (0 = all), then `min_p` (at least this share of the best probability), then `top_p` (the
    smallest set of best candidates that holds this share of what is left; ties by lower id). Presence and frequency
    penalties count the answer's tokens (OpenAI), the repetition penalty the prompt's too (Keskar et al. 2019).
    Without a `seed` the draw differs every time. `top_logprobs` best tokens are reported per step.

    Raises:
        ConfigError: a value is outside its range, which the message gives.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature >= 0, ">= 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, 0 <= self.top_k <= MOST_TOP_K, f"in [0, {MOST_TOP_K}]")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0")
        _check("presence_penalty", self.presence_penalty, True, "finite")
        _check("frequency_penalty", self.frequency_penalty, True, "finite")
        _check("top_logprobs", self.top_logprobs, 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "in [0, 20]")

    @property
    def adjusts(self) -> bool:
        """Whether anything changes the model's logits before the choice."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias)


def _check(name: str, value: float | int, in_range: bool, wanted: str) -> None:
    if not in_range or not math.isfinite(value):
        raise ConfigError(f"{name} must be {wanted}, found {value}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """For every slot the parameters of its sequence and what that has seen. `key` is the seed as a raw threefry key
    `[slots, 2]`, `step` counts the draws, `counts` the tokens of the answer, `in_prompt` marks those of the prompt;
    `adjusted` tells whether penalties or a bias change the logits at all."""

    temperature: Float[Array, " slots"]
    top_p: Float[Array, " slots"]
    top_k: Int[Array, " slots"]
    min_p: Float[Array, " slots"]
    repetition_penalty: Float[Array, " slots"]
    presence_penalty: Float[Array, " slots"]
    frequency_penalty: Float[Array, " slots"]
    top_logprobs: Int[Array, " slots"]
    adjusted: Bool[Array, " slots"]
    bias: Float[Array, "slots vocab"]
    in_prompt: Bool[Array, "slots vocab"]
    counts: Int[Array, "slots vocab"]
    key: UInt[Array, "slots 2"]
    step: Int[Array, " slots"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The chosen token of every row, its log-probability, the margin between the two largest logits, and the best
    tokens with their log-probabilities. All but `token` describe the model's own logits, before penalties, bias
    and constraint."""

    token: Int[Array, " batch"]
    logprob: Float[Array, " batch"]
    margin: Float[Array, " batch"]
    top_tokens: Int[Array, "batch top"]
    top_logprobs: Float[Array, "batch top"]


def start_sampling(rows: Sequence[tuple[SamplingParams, np.ndarray]], vocab: int) -> SamplingState:
    """The state of slots whose sequences have these parameters and prompts (token ids `[length]`), on the host.

    Raises:
        ConfigError: `logit_bias` names a token outside the vocabulary.
    """

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(params, name) for params, _ in rows], dtype)

    def factor(name: str) -> np.ndarray:
        """What logits and probabilities are divided by or multiplied with."""
        values = column(name, np.float64)
        return np.where(values > 0, np.maximum(values, LEAST), values).astype(np.float32)

    return SamplingState(
        **{name: factor(name) for name in ("temperature", "top_p", "repetition_penalty")},
        **{name: column(name, np.float32) for name in ("min_p", "presence_penalty", "frequency_penalty")},
        top_k=column("top_k", np.int32),
        top_logprobs=column("top_logprobs", np.int32),
        adjusted=np.array([params.adjusts for params, _ in rows]),
        bias=np.stack([_dense_bias(params.logit_bias, vocab) for params, _ in rows]),
        in_prompt=np.stack([np.bincount(prompt, minlength=vocab) > 0 for _, prompt in rows]),
        counts=np.zeros((len(rows), vocab), np.int32),
        key=np.stack([_raw_key(params.seed) for params, _ in rows]),
        step=np.zeros(len(rows), np.int32),
    )


def check_bias(bias: Mapping[int, float], vocab: int) -> None:
    """Raises ConfigError if a bias names a token outside the vocabulary."""
    for token in bias:
        if not 0 <= token < vocab:
            raise ConfigError(f"logit_bias names token {token}; the vocabulary has ids 0..{vocab - 1}")


def _dense_bias(bias: Mapping[int, float], vocab: int) -> np.ndarray:
    check_bias(bias, vocab)
    dense = np.zeros(vocab, np.float32)
    dense[list(bias)] = list(bias.values())
    return dense


def _raw_key(seed: int | None) -> np.ndarray:
    seed = secrets.randbits(64) if seed is None else seed % 2**64
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def seated(state: SamplingState, row: SamplingState, slot: Int[Array, ""]) -> SamplingState:
    """The state with that of one sequence, `row`, in one slot."""

    def put(array: Array, own: Array) -> Array:
        return jax.lax.dynamic_update_slice(array, own, (slot, *[0] * (array.ndim - 1)))

    return jax.tree.map(put, state, row)


def everything(batch: int, vocab: int) -> np.ndarray:
    """The constraint of rows that have none, uint32 `[batch, words]`."""
    return np.full((batch, -(-vocab // 32)), ALL_TOKENS, np.uint32)


def sample(
    logits: Float[Array, "batch vocab"],
    state: SamplingState,
    slots: Int[Array, " batch"],
    allowed: UInt[Array, "batch words"],
) -> tuple[Sampled, SamplingState]:
    """Chooses the next token of every row as its slot's sequence does, and counts it there. A row whose slot is
    negative belongs to none. `allowed` has a bit for every token that a row's constraint lets through: token `i` in bit
    `i % 32` of word `i // 32`."""
    own = jnp.maximum(slots, 0)
    first = _first_largest(logits)
    unconstrained = jnp.all(allowed == ALL_TOKENS, axis=-1)
    usual = (slots < 0) | (((state.temperature == 0) & ~state.adjusted)[own] & unconstrained)

    def of_rows() -> SamplingState:
        gathered = jax.tree.map(lambda array: array[own], state)
        return replace(gathered, temperature=jnp.where(slots < 0, 0.0, gathered.temperature))  # empty rows draw nothing

    # What takes memory per slot is read only where a row needs it.
    token = jax.lax.cond(jnp.all(usual), lambda: first, lambda: _choose(logits, of_rows(), allowed))
    counted = jnp.where(slots < 0, state.step.shape[0], slots)  # out of bounds, where updates are dropped
    counts = state.counts.at[counted, token].add(1, mode="drop")
    step = state.step.at[counted].add(1, mode="drop")
    sampled = _describe(logits, first, token, jnp.where(slots < 0, 0, state.top_logprobs[own]))
    return sampled, replace(state, counts=counts, step=step)


def _choose(
    logits: Float[Array, "batch vocab"], state: SamplingState, allowed: UInt[Array, "batch words"]
) -> Int[Array, " batch"]:
    """The next token of every row, after penalties, bias and constraint; `state` is that of the rows."""
    adjusted = jnp.where(_allowed_tokens(allowed, logits.shape[-1]), _penalise(logits, state), -jnp.inf)
    drawing = state.temperature > 0
    greedy = _first_largest(adjusted)
    return jax.lax.cond(jnp.any(drawing), lambda: jnp.where(drawing, _draw(adjusted, state), greedy), lambda: greedy)


def _penalise(logits: Float[Array, "batch vocab"], state: SamplingState) -> Float[Array, "batch vocab"]:
    penalty = state.repetition_penalty[:, None]
    repeated = state.in_prompt | (state.counts > 0)
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    counts = state.counts.astype(jnp.float32)
    logits = logits - state.frequency_penalty[:, None] * counts
    logits = logits - state.presence_penalty[:, None] * (state.counts > 0).astype(jnp.float32)
    return logits + state.bias


def _allowed_tokens(allowed: UInt[Array, "batch words"], vocab: int) -> Bool[Array, "batch vocab"]:
    """The constraints, a boolean per token."""
    bits = jnp.arange(32, dtype=jnp.uint32)[None, None]
    unpacked = (allowed[:, :, None] >> bits) & jnp.uint32(1)
    return unpacked.reshape(len(allowed), -1)[:, :vocab] == 1


def _draw(logits: Float[Array, "batch vocab"], state: SamplingState) -> Int[Array, " batch"]:
    """One draw per row from the filtered distribution, by the Gumbel-max trick: among few candidates where they are
    known to be all that the filters leave, because what goes over the whole vocabulary takes long."""
    temperature = jnp.where(state.temperature > 0, state.temperature, 1.0)
    logits = logits / temperature[:, None]
    likelihoods = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    probabilities = likelihoods / row_sums(likelihoods)[:, None]
    few, token = _draw_from_best(probabilities, state)
    if probabilities.shape[-1] <= CANDIDATES:
        return token
    many = (state.temperature > 0) & ~few
    return jax.lax.cond(
        jnp.any(many), lambda: jnp.where(many, _draw_from_all(probabilities, state, many), token), lambda: token
    )


def _draw_from_best(
    probabilities: Float[Array, "batch vocab"], state: SamplingState
) -> tuple[Bool[Array, " batch"], Int[Array, " batch"]]:
    """Whether a row's best `CANDIDATES` are known to be all that its filters leave, and if so its draw."""
    vocab = probabilities.shape[-1]
    best, tokens = jax.lax.top_k(probabilities, min(CANDIDATES, vocab))
    most = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, vocab), vocab)
    # No slice of what comes sorted: XLA would sort the whole vocabulary for it.
    least = state.min_p[:, None] * jnp.max(best, axis=-1, keepdims=True)
    passing = (_places(best) < most[:, None]) & (best >= least) & (best > 0)
    complete = (most <= best.shape[-1]) | ~jnp.all(passing, axis=-1)
    kept = jnp.where(passing, best, 0.0)
    upto = jnp.cumsum(kept, axis=-1)
    # Without other filters all tokens share in what top-p counts, but those that it leaves may still be few.
    wanted = state.top_p * jnp.where(complete, row_sums(kept), row_sums(probabilities))
    before = jnp.pad(upto[:, :-1], [(0, 0), (1, 0)])
    cut = state.top_p < 1
    kept = jnp.where(~cut[:, None] | (before < wanted[:, None]), kept, 0.0)
    few = complete | (cut & (most == vocab) & (state.min_p == 0) & (upto[:, -1] >= wanted))
    place = jnp.argmax(jnp.log(kept) + _gumbel(state, tokens), axis=-1)
    return few, jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0]


def _draw_from_all(
    probabilities: Float[Array, "batch vocab"], state: SamplingState, rows: Bool[Array, " batch"]
) -> Int[Array, " batch"]:
    """The draws of these rows from the whole vocabulary; what the others get means nothing."""
    by_count = rows & (state.top_k > 0) & (state.top_k < probabilities.shape[-1])
    by_mass = rows & (state.top_p < 1)

    def narrow(turn: Int[Array, ""], kept: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        counting = turn == 0
        weights = jnp.where(counting, 1.0, kept)
        wanted = jnp.where(counting, state.top_k.astype(jnp.float32), state.top_p * row_sums(kept))
        narrowed = jnp.where(counting, by_count, by_mass)[:, None]
        return jnp.where(narrowed, _keep_best(kept, weights, wanted), kept)

    # Top-k and min-p leave the same in either order.
    best = jnp.max(probabilities, axis=-1, keepdims=True)
    kept = jnp.where(probabilities >= state.min_p[:, None] * best, probabilities, 0.0)
    first, last = jnp.where(jnp.any(by_count), 0, 1), jnp.where(jnp.any(by_mass), 2, 1)
    kept = jax.lax.fori_loop(first, last, narrow, kept)
    return _first_largest(jnp.log(kept) + _gumbel(state, _places(kept)))


def _gumbel(state: SamplingState, tokens: Int[Array, "batch some"]) -> Float[Array, "batch some"]:
    """Noise from a row's key, its step and the token, whichever tokens it is asked for."""

    def bits(key: Array, step: Array, tokens: Array) -> Array:
        counters = jnp.concatenate([jnp.full_like(tokens, step), tokens]).astype(jnp.uint32)
        return threefry_2x32(key, counters)[: len(tokens)]

    # 23 bits and a half: as many as float32 holds without rounding up to 1.
    uniform = ((jax.vmap(bits)(state.key, state.step, tokens) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _keep_best(
    probabilities: Float[Array, "batch vocab"], weights: Float[Array, "batch vocab"], wanted: Float[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """Zeroes all but the smallest set of best candidates whose weights add up to `wanted`.

    Finds the lowest probability of that set by bisection over float32 bit patterns, whose order is that of the positive
    numbers: 30 passes over the vocabulary instead of a sort, which XLA does badly on the CPU.
    """

    def weight_from(threshold: Float[Array, " batch"]) -> Float[Array, " batch"]:
        return row_sums(jnp.where(probabilities >= threshold[:, None], weights, 0.0))

    def halve(_: int, bounds: tuple[Int[Array, " batch"], Int[Array, " batch"]]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = weight_from(jax.lax.bitcast_convert_type(middle, jnp.float32)) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(wanted, jnp.int32)
    low, high = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, ONE_AS_BITS + 1)))
    above = weight_from(jax.lax.bitcast_convert_type(high, jnp.float32))
    threshold = jax.lax.bitcast_convert_type(low, jnp.float32)[:, None]
    tied = probabilities == threshold
    before = jnp.cumsum(jnp.where(tied, weights, 0.0), axis=-1) - weights
    needed_tie = tied & (before < (wanted - above)[:, None])
    return jnp.where((probabilities > threshold) | needed_tie, probabilities, 0.0)


def _first_largest(values: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """The first index of each row's largest value, by two plain reductions: XLA's argmax is slow on the CPU."""
    places = _places(values)
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(values == largest, places, values.shape[-1] - 1), axis=-1)


def _places(values: Float[Array, "batch vocab"]) -> Int[Array, "batch vocab"]:
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)


def _describe(
    logits: Float[Array, "batch vocab"],
    first: Int[Array, " batch"],
    token: Int[Array, " batch"],
    wanted: Int[Array, " batch"],
) -> Sampled:
    """`first` is the model's own first choice."""
    others = jnp.where(_places(logits) == first[:, None], -jnp.inf, logits)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    normaliser = largest + jnp.log(row_sums(jnp.exp(logits - largest)))[:, None]
    best = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    top_logits, top_tokens = jax.lax.cond(
        jnp.any(wanted > 0),
        lambda: tuple(jax.lax.top_k(logits, best)),
        lambda: (jnp.zeros((len(token), best), jnp.float32), jnp.zeros((len(token), best), jnp.int32)),
    )
    return Sampled(
        token=token,
        logprob=(jnp.take_along_axis(logits, token[:, None], axis=-1) - normaliser)[:, 0],
        margin=largest[:, 0] - jnp.max(others, axis=-1),
        top_tokens=top_tokens,
        top_logprobs=top_logits - normaliser,
    )
