"""One request on its way through the engine: what it asks, and the events that come back."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from models import Prompt, SamplingParams, Step
from models.grammar import Grammar
from serving.errors import ApiError


@dataclass(frozen=True)
class Work:
    """What the engine needs to generate one choice."""

    prompt: Prompt
    max_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingParams
    grammar: Grammar | None = None


@dataclass
class Timing:
    """Moments of a request on the monotonic clock, in seconds: its admission, when the engine took it up, when its
    prompt was in the cache, its first and its latest token. 0 for what has not come."""

    admitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    prefilled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True)
class ChoiceStep:
    """One token of choice number `index`."""

    index: int
    step: Step


@dataclass(frozen=True)
class Failure:
    """The request ends with this error."""

    error: ApiError


@dataclass
class Spoken:
    """The texts of a request's prompts and those of its choices so far, without control tokens."""

    prompts: list[str]
    answers: list[str]


class Job:
    """A request from its admission to its end. Its events go to a queue of its own, read by its own handler only.

    `generated` counts the tokens of all its `choices`, `reused_tokens` those of its prompt that were in the cache.
    `finish_reason` (of the one that ended last) or `failure` is set once the request has ended, unless its client left.
    """

    def __init__(self, owner: str = "") -> None:
        """`owner` is whose cached tokens it may use, and for whom its own are kept."""
        self.owner = owner
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.timing = Timing()
        self.running = False
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.generated = 0
        self.choices = 1
        self.finish_reason: str | None = None
        self.failure: ApiError | None = None
        self.work: tuple[Work, ...] | None = None
        self.spoken: Spoken | None = None  # kept for the log only, where that is asked for
        self._finished_choices = 0
        self._cancelled = threading.Event()
        self._events: asyncio.Queue[ChoiceStep | Failure] = asyncio.Queue()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    @property
    def ended(self) -> bool:
        """Whether the last event has been delivered."""
        return self.failure is not None or self.finish_reason is not None

    def cancel(self) -> None:
        """Asks the engine to drop the job at the next step; safe from any thread."""
        self._cancelled.set()
        self.work = None  # it may hold pictures, and the job may stay queued for long

    def deliver(self, event: ChoiceStep | Failure) -> None:
        """Hands an event to the handler; on the event loop only."""
        if self.spoken is not None and isinstance(event, ChoiceStep):
            self.spoken.answers[event.index] += event.step.text
        if not self.ended:
            if isinstance(event, Failure):
                self.failure = event.error
            elif event.step.finish_reason is not None:
                self._finished_choices += 1
                self.finish_reason = event.step.finish_reason if self._finished_choices == self.choices else None
        self._events.put_nowait(event)

    async def events(self, silence: float | None = None) -> AsyncIterator[ChoiceStep | None]:
        """The steps of all choices as they come, up to the last; None after every `silence` seconds without one.

        Raises:
            ApiError: the request failed.
        """
        left = self.choices
        while True:
            try:
                async with asyncio.timeout(silence):  # unlike wait_for it never loses a cancellation
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Failure):
                raise event.error
            yield event
            left -= event.step.finish_reason is not None
            if not left:
                return
