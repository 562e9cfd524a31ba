"""How sequences choose their tokens: parameters, what a sequence has seen, and what is told of a choice. The choice
itself is `models.kernels.ops.sample`.

Every sequence has its own parameters, counts and random stream, so what it draws depends on nothing but its own logits,
parameters and seed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from models.errors import ConfigError

MAX_TOP_LOGPROBS = 20
MOST_TOP_K = 2**31 - 1  # more than any vocabulary has
LEAST = 1e-6  # where float32 arithmetic would overflow, or find nothing; a choice is the same as with less
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
        for name in ("top_k", "top_logprobs"):
            _check_type(name, getattr(self, name), Integral, "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_type(name, getattr(self, name), Real, "a number")
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


def _check_type(name: str, value: Any, wanted: type, called: str) -> None:
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ConfigError(f"{name} must be {called}, found {value!r}")


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
