"""One request on its way through the engine: what it asks, and the events that come back."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from models import Prompt, SamplingParams, Step
from serving.errors import ApiError


@dataclass(frozen=True)
class Work:
    """What the engine needs to run a request."""

    prompt: Prompt
    max_tokens: int
    stop: tuple[str, ...]
    sampling: SamplingParams


@dataclass
class Timing:
    """Moments of a request on the monotonic clock, in seconds: when the engine took it up (waiting excluded), when its
    prompt was in the cache, its first and its latest token."""

    started: float = 0.0
    prefilled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True)
class Failure:
    """The request ends with this error."""

    error: ApiError


class Job:
    """A request from its admission to its end. Its events go to a queue of its own, read by its own handler only."""

    def __init__(self) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.timing = Timing()
        self.running = False
        self.work: Work | None = None
        self._cancelled = threading.Event()
        self._events: asyncio.Queue[Step | Failure] = asyncio.Queue()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Asks the engine to drop the job at the next step; safe from any thread."""
        self._cancelled.set()
        self.work = None  # it may hold pictures, and the job may stay queued for long

    def deliver(self, event: Step | Failure) -> None:
        """Hands an event to the handler; on the event loop only."""
        self._events.put_nowait(event)

    async def events(self, silence: float | None = None) -> AsyncIterator[Step | None]:
        """The steps as they come, up to the last; None after every `silence` seconds without one.

        Raises:
            ApiError: the request failed.
        """
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
            if event.finish_reason is not None:
                return
