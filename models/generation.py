"""The generate loop of one request: prefill in chunks, then a decode step per token, as an iterator.

Control returns to the caller after every chunk and every token, so that a server can stop a request between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from models.errors import ContextLengthError, PromptError
from models.grammar import Grammar, Matcher
from models.inference import Inference, VisualFeatures, plan_chunks
from models.positions import Grid, rope_positions
from models.sampling import Sampled, SamplingParams, SamplingState, constrain, start_sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class PrefillProgress:
    """A part of the prompt has been taken in: a picture, or a chunk of tokens. `done` of `total` tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Step:
    """One generated token.

    `text` is what may now be shown ("" while a character or a possible stop string is incomplete). `logprob`,
    `top_logprobs` (token id, log-probability; best first) and `margin` (largest minus second largest logit) describe
    the model's own distribution, before penalties, grammar and temperature. `finish_reason` is set on the last step:
    "stop" at an end token (whose text is empty) or a stop string, "length" at `max_tokens` or the end of the context.
    """

    token_id: int
    text: str
    logprob: float
    margin: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class TextPieces(Protocol):
    """Turns token ids into text that may be shown; see `models.text_stream.TextStream`."""

    stopped: bool

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Request:
    """What one generation needs: token ids int32 `[length]`, the patches and grid of each picture in order, limits and
    parameters. `end_tokens` stop the answer, which follows `grammar` if there is one."""

    token_ids: np.ndarray
    visuals: Sequence[tuple[np.ndarray, Grid]]
    max_tokens: int
    end_tokens: frozenset[int]
    sampling: SamplingParams
    grammar: Grammar | None = None


def check_room(length: int, context: int) -> None:
    """Raises PromptError for an empty prompt, ContextLengthError for one of `length` tokens that leaves no room for an
    answer in `context` tokens."""
    if length == 0:
        raise PromptError("the prompt is empty; it needs at least one token")
    if length >= context:
        raise ContextLengthError(
            f"the prompt has {length} tokens, but the context is limited to {context} with the answer"
        )


def generate(
    inference: Inference, request: Request, context: int, pieces: TextPieces
) -> Iterator[PrefillProgress | Step]:
    """Runs one request in a context of `context` tokens. The last item is a `Step` with a finish reason.

    Raises:
        PromptError: at the first `next`, if the placeholders do not match the pictures.
        GrammarError: between tokens, if the grammar is too much work to follow.
    """
    ids, length = request.token_ids, len(request.token_ids)
    positions, delta = rope_positions(ids, (grid for _, grid in request.visuals), inference.config, inference.switches)
    state = start_sampling([(request.sampling, ids)], inference.config.text.vocab)
    features = []
    for patches, grid in request.visuals:
        features.append(inference.encode(patches, grid))
        yield PrefillProgress(0, length)
    visual = VisualFeatures.join(features) if features else None

    cache = inference.empty_cache(length + 1)
    for chunk in plan_chunks(length):
        logits, cache = inference.prefill(cache, chunk, ids, positions, visual)
        logits.block_until_ready()  # a chunk that is only queued could neither be timed nor cancelled
        yield PrefillProgress(chunk.start + chunk.tokens, length)

    limit = min(request.max_tokens, context - length)
    matcher = None if request.grammar is None else request.grammar.start()
    sampled, state = inference.sample(logits, _constrained(state, matcher))
    for generated in range(1, limit + 1):
        step = _step(sampled, request, pieces, generated == limit)
        yield step
        if step.finish_reason is not None:
            return
        if length + generated > cache.capacity:
            cache = inference.grow(cache)
        if matcher is not None:
            matcher.take(step.token_id)
        constrained = _constrained(state, matcher)
        sampled, cache, state = inference.decode(cache, constrained, sampled.token, np.array([delta], np.int32))


def _constrained(state: SamplingState, matcher: Matcher | None) -> SamplingState:
    """The state with what the grammar lets through next."""
    return state if matcher is None else constrain(state, matcher.allowed()[None])


def _step(sampled: Sampled, request: Request, pieces: TextPieces, last: bool) -> Step:
    token = int(np.asarray(sampled.token)[0])
    ended = token in request.end_tokens
    text = "" if ended else pieces.push(token)
    reason: FinishReason | None = "stop" if ended or pieces.stopped else "length" if last else None
    if reason is not None and not pieces.stopped:
        text += pieces.finish()
    shown = request.sampling.top_logprobs
    best = zip(np.asarray(sampled.top_tokens)[0, :shown], np.asarray(sampled.top_logprobs)[0, :shown], strict=True)
    return Step(
        token_id=token,
        text=text,
        logprob=float(np.asarray(sampled.logprob)[0]),
        margin=float(np.asarray(sampled.margin)[0]),
        top_logprobs=tuple((int(token), float(logprob)) for token, logprob in best),
        finish_reason=reason,
    )
