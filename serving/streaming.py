"""The steps of a request as server-sent events: frames, comments in silence, failures told in a frame."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from models import Step
from serving import request_log, sse
from serving.errors import ApiError
from serving.job import Job

log = logging.getLogger("kestrel.streaming")
Choice = TypeVar("Choice")
Frames = list[dict[str, Any]]


@dataclass(frozen=True)
class Wire:
    """How an API writes its streams: one frame as bytes, a failure as a frame, and what stands at the end."""

    encode: Callable[[dict[str, Any]], bytes]
    failure: Callable[[ApiError], dict[str, Any]]
    end: bytes


OPENAI = Wire(sse.event, lambda error: error.body, sse.DONE)


async def choice_steps(
    job: Job, choices: Sequence[Choice], silence: float | None = None
) -> AsyncIterator[tuple[Choice, Step | None]]:
    """The steps with the choice that each belongs to. None after every `silence` seconds without a step.

    Raises:
        ApiError: the request failed.
    """
    async for event in job.events(silence):
        yield (choices[0], None) if event is None else (choices[event.index], event.step)


async def event_stream(
    job: Job,
    choices: Sequence[Choice],
    opening: Frames,
    step_frames: Callable[[Choice, Step], Frames],
    closing: Callable[[], Frames],
    ping_seconds: float | None,
    *,
    wire: Wire = OPENAI,
) -> AsyncIterator[bytes]:
    """The frames of `opening` at once, those of every step, those of `closing`. A failure is told in a frame, because
    the status has been sent. `ping_seconds` of silence bring a comment."""
    for frame in opening:
        yield wire.encode(frame)
    try:
        async for frame in _frames(choice_steps(job, choices, ping_seconds), step_frames, ping_seconds):
            yield frame if isinstance(frame, bytes) else wire.encode(frame)
        for frame in closing():
            yield wire.encode(frame)
    except ApiError as error:
        yield wire.encode(wire.failure(error))
    except Exception:
        log.exception("the stream of request %s failed", job.id)
        error = ApiError(500, "the server failed on this request", code="internal_error")
        if record := request_log.current():
            record.code, record.broken = error.code, True
        yield wire.encode(wire.failure(error))
    if wire.end:
        yield wire.end


async def _frames(
    steps: AsyncIterator[tuple[Choice, Step | None]],
    step_frames: Callable[[Choice, Step], Frames],
    ping_seconds: float | None,
) -> AsyncIterator[dict[str, Any] | bytes]:
    """What steps bring, and comments where they bring nothing for long: a call, say, is told when it is complete."""
    sent = time.monotonic()
    async for choice, step in steps:
        frames = [] if step is None else step_frames(choice, step)
        for frame in frames:
            yield frame
        now = time.monotonic()
        silent = not frames and ping_seconds and now - sent >= ping_seconds
        if step is None or silent:
            yield sse.PING
        if step is None or silent or frames:
            sent = now
        # A queue that is never empty would never let the event loop see that the client has left.
        await asyncio.sleep(0)
