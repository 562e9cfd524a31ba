"""One request on its way from token ids to text: what it has computed, and what its next token says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from models.config import ModelConfig
from models.disk_cache import Block
from models.errors import ContextLengthError, PromptError
from models.grammar import Grammar
from models.images import VisionInput
from models.inference import Chunk, VisualFeatures, plan_chunks
from models.positions import rope_positions
from models.sampling import Sampled, SamplingParams
from models.slots import Slot
from models.switches import Switches

FinishReason = Literal["stop", "length"]
MATCHED = 3  # tokens that must have stood together before for what followed them to be tried again


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
    """What one generation needs: token ids int32 `[length]`, the pictures in order, limits and parameters, and what
    turns its tokens into text. `end_tokens` stop the answer, which follows `grammar` if there is one. What has been
    computed for one `owner` is not used for another's request."""

    token_ids: np.ndarray
    visuals: Sequence[VisionInput]
    max_tokens: int
    end_tokens: frozenset[int]
    sampling: SamplingParams
    pieces: TextPieces
    grammar: Grammar | None = None
    owner: str = ""


def _continuation(keys: np.ndarray, most: int) -> np.ndarray:
    """What followed the last time that the end of `keys` stood in it, up to `most` text tokens."""
    if len(keys) <= MATCHED:
        return keys[:0]
    windows = np.lib.stride_tricks.sliding_window_view(keys[:-1], MATCHED)
    places = np.flatnonzero((windows == keys[-MATCHED:]).all(axis=1))
    if not len(places):
        return keys[:0]
    following = keys[places[-1] + MATCHED :][:most]
    pictures = np.flatnonzero(following < 0)
    return following[: pictures[0]] if len(pictures) else following


def check_room(length: int, context: int) -> None:
    """Raises PromptError for an empty prompt, ContextLengthError for one of `length` tokens that leaves no room for an
    answer in `context` tokens."""
    if length == 0:
        raise PromptError("the prompt is empty; it needs at least one token")
    if length >= context:
        raise ContextLengthError(
            f"the prompt has {length} tokens, but the context is limited to {context} with the answer"
        )


def content_keys(token_ids: np.ndarray, visuals: Sequence[VisionInput], config: ModelConfig) -> np.ndarray:
    """What each token of a prompt is, int64 `[length]`: a text token its id; a visual token a negative number that
    follows from the picture's content and the token's place in it."""
    keys = token_ids.astype(np.int64)
    if not visuals:
        return keys
    places = np.flatnonzero(np.isin(token_ids, (config.image_token, config.video_token)))
    used = 0
    for visual in visuals:
        own = places[used : used + visual.tokens(config.vision.merge)]
        start = int(visual.content_hash[:15], 16)  # 60 bits
        keys[own] = -(start + np.arange(1, len(own) + 1, dtype=np.int64))
        used += len(own)
    return keys


class Generation:
    """A request in a slot of the cache. It is prefilling until it has a `token`, which the next decode step takes into
    the cache."""

    def __init__(self, request: Request, context: int, config: ModelConfig, switches: Switches) -> None:
        """
        Raises:
            PromptError: the placeholders do not match the pictures.
            GrammarError: nothing can follow the grammar.
        """
        self.request = request
        self.length = len(request.token_ids)
        grids = [visual.grid for visual in request.visuals]
        self.positions, self.delta = rope_positions(request.token_ids, grids, config, switches)
        self.keys = content_keys(request.token_ids, request.visuals, config)
        self.limit = min(request.max_tokens, context - self.length)
        self._matcher = None if request.grammar is None else request.grammar.start()
        self.allowed = None if self._matcher is None else self._matcher.allowed()  # what may come next
        self.slot: Slot | None = None
        self.reused = 0  # tokens of the prompt that were in the cache already
        self.blocks: deque[Block] = deque()  # of the prompt, to be read from files before anything is computed
        self.passed_over = 0  # tokens of other prompts that were computed while this one waited
        self.token: int | None = None
        self.generated = 0
        self.unseen: deque[VisionInput] = deque()
        self.visual: VisualFeatures | None = None  # of the pictures, once all have been seen
        self._seen: list[VisualFeatures] = []
        self._chunks: deque[Chunk] = deque()
        self._visual_tokens_reused = 0

    def start(self, merge: int, largest_chunk: int) -> None:
        """Plans what is to be computed: all but the tokens that its slot has. A picture that these include need not be
        seen."""
        self.reused = self.slot.held
        self._chunks = deque(plan_chunks(self.length, self.reused, largest_chunk))
        reused = int(np.count_nonzero(self.keys[: self.reused] < 0))
        self.unseen = deque(self.request.visuals)
        while self.unseen and self._visual_tokens_reused + self.unseen[0].tokens(merge) <= reused:
            self._visual_tokens_reused += self.unseen.popleft().tokens(merge)

    @property
    def next_chunk(self) -> Chunk | None:
        """The next part of the prompt to compute; None if pictures come first."""
        return None if self.unseen else self._chunks[0]

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        return self.length - self.slot.held

    def saw(self, features: VisualFeatures) -> PrefillProgress:
        """Takes in the next picture."""
        self.unseen.popleft()
        self._seen.append(features)
        if not self.unseen:
            self.visual = VisualFeatures.join(self._seen, self._visual_tokens_reused)
        return PrefillProgress(self.slot.held, self.length)

    def prefilled(self) -> PrefillProgress:
        """Counts the next chunk as computed."""
        chunk = self._chunks.popleft()
        self.slot.take_in(self.keys[chunk.start : chunk.start + chunk.tokens], chunk)
        return PrefillProgress(self.slot.held, self.length)

    def decoded(self) -> None:
        """Counts its token as taken into the cache."""
        self.slot.take_in(np.array([self.token], np.int64))

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that may come after its token: those that followed the last time the same few tokens
        stood there (prompt lookup, Saxena 2023). None unless they can be checked by comparing them with the model's own
        first choices."""
        most = min(most, self.limit - self.generated - 1)
        sampling = self.request.sampling
        if most < 1 or sampling.temperature > 0 or sampling.adjusts or self._matcher is not None:
            return []
        known = self.slot.keys[: self.slot.held + 1]
        known[-1] = self.token
        return _continuation(known, most).tolist()

    def rows(self, drafted: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Its rows of a decode step, of its token and of drafted ones behind it; see `Inference.decode`."""
        held = range(self.slot.held, self.slot.held + 1 + len(drafted))
        tokens = zip((self.token, *drafted), held, strict=True)
        return [(token, self.slot.index, before, before + self.delta) for token, before in tokens]

    def next_step(self, sampled: Sampled, row: int) -> Step:
        """What row `row` of the sampled tokens (on the host) says.

        Raises:
            GrammarError: the grammar is too much work to follow.
        """
        self.token, self.generated = int(sampled.token[row]), self.generated + 1
        pieces, ended = self.request.pieces, self.token in self.request.end_tokens
        text = "" if ended else pieces.push(self.token)
        last = self.generated == self.limit
        reason: FinishReason | None = "stop" if ended or pieces.stopped else "length" if last else None
        if reason is not None and not pieces.stopped:
            text += pieces.finish()
        if self._matcher is not None and reason is None:
            self._matcher.take(self.token)
            self.allowed = self._matcher.allowed()
        shown = self.request.sampling.top_logprobs
        best = zip(sampled.top_tokens[row, :shown], sampled.top_logprobs[row, :shown], strict=True)
        return Step(
            token_id=self.token,
            text=text,
            logprob=float(sampled.logprob[row]),
            margin=float(sampled.margin[row]),
            top_logprobs=tuple((int(token), float(logprob)) for token, logprob in best),
            finish_reason=reason,
        )
