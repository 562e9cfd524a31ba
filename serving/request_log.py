"""One line of JSON per request, written when it ends. What clients wrote, and what they were answered, is in it only
where the settings say so."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from serving.errors import ApiError
from serving.job import Job

Outcome = Literal["finished", "refused", "failed", "left"]
PROBES = ("/health", "/metrics")
LONGEST_PATH = 200

log = logging.getLogger("kestrel.requests")
_current: ContextVar[Record | None] = ContextVar("record", default=None)


@dataclass
class Record:
    """What is known of one HTTP request; `status` and `code` are those of its answer."""

    method: str | None
    path: str | None
    arrived: float = field(default_factory=time.monotonic)
    status: int | None = None
    code: str | None = None
    jobs: list[Job] = field(default_factory=list)
    broken: bool = False  # a stream ended with an error after its answers were complete

    @property
    def quiet(self) -> bool:
        """Whether it gets no line: probes come all the time."""
        return self.path in PROBES and self.status in (200, 503)

    @property
    def completed(self) -> bool:
        """Whether the engine has completed its answers, and counted them, even if the client has not got them all."""
        return bool(self.jobs) and all(job.finish_reason for job in self.jobs)

    def outcome(self, left: bool) -> Outcome:
        """How it ended; `left` tells that it was cut off."""
        if left:
            return "left"
        failure = next((job.failure for job in self.jobs if job.failure), None)
        status = failure.status if failure else self.status
        if status is None or status >= 400:
            return "failed" if status is None or (status >= 500 and (self.jobs or status != 503)) else "refused"
        return "failed" if self.broken or not all(job.ended for job in self.jobs) else "finished"

    def line(self, outcome: Outcome) -> str:
        """The line, without times that did not come."""
        now = time.monotonic()
        values: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.jobs[0].id if self.jobs else None,
            "method": self.method,
            "path": self.path and self.path[:LONGEST_PATH],
            "status": self.status,
            "outcome": outcome,
            "code": self.code,
            **_work(self.jobs),
            "total_ms": _milliseconds(self.arrived, now),
        }
        return json.dumps({name: value for name, value in values.items() if value is not None})


def _work(jobs: list[Job]) -> dict[str, Any]:
    """What the engine did: the tokens of all jobs, the times of the first."""
    if not jobs:
        return {}
    timing = jobs[0].timing
    failure = next((job.failure for job in jobs if job.failure), None)
    return {
        **({"code": failure.code} if failure else {}),
        "prompt_tokens": sum(job.prompt_tokens for job in jobs),
        "generated_tokens": sum(job.generated for job in jobs),
        "queue_ms": _milliseconds(timing.admitted, timing.started),
        "prefill_ms": _milliseconds(timing.started, timing.prefilled),
        "ttft_ms": _milliseconds(timing.admitted, timing.first_token),
        "finish_reason": jobs[0].finish_reason,
        **({"prompts": spoken.prompts, "answers": spoken.answers} if (spoken := jobs[0].spoken) else {}),
    }


def _milliseconds(start: float, end: float) -> float | None:
    return round(1e3 * (end - start), 1) if end else None


def current() -> Record | None:
    """The record of the request that is being handled here."""
    return _current.get()


def begin(method: str, path: str) -> Record:
    """Starts the record of the request that this task handles."""
    record = Record(method, path)
    _current.set(record)
    return record


def end(record: Record, task: asyncio.Task[Any]) -> Outcome:
    """Writes the line of a request whose task has ended."""
    outcome = record.outcome(task.cancelled())
    if not record.quiet:
        log.info(record.line(outcome))
    return outcome


def refused(error: ApiError) -> None:
    """Writes the line of what was refused before it was a request: a broken head, or a connection too many."""
    log.info(Record(None, None, status=error.status, code=error.code).line("refused"))


def write_to_stderr() -> None:
    """Lets the lines out, bare, beside the other messages of the program."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
