"""The engine thread: the one owner of the model, which runs admitted requests one after the other.

The event loop admits, submits and cancels; the thread loads, computes and sends events back with
`loop.call_soon_threadsafe`. The set of live jobs belongs to the loop, the model and every JAX call to the thread; what
both touch are single values of a job (`cancelled`, set by the loop; `running` and what has been computed, set by the
thread) and the metrics, which lock themselves.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from models import KestrelError, LoadedModel, PrefillProgress, Step
from serving import request_log
from serving.errors import ApiError, bad_request
from serving.job import Failure, Job, Work
from serving.memory import available_bytes
from serving.metrics import Metrics
from serving.settings import Settings

log = logging.getLogger("kestrel.engine")
State = Literal["loading", "ok", "draining", "error"]
RETRY_SECONDS = {"loading": 5, "draining": 30, "error": 60, "memory": 5}


class Engine:
    """Admission, the queue, and the thread behind it. All methods are called on the event loop."""

    def __init__(self, load: Callable[[], LoadedModel], settings: Settings) -> None:
        """`load` runs on the engine thread. `loaded` is set when the model is, or cannot be: `state` tells which, and
        `problem` why."""
        self.model: LoadedModel | None = None
        self.state: State = "loading"
        self.problem = ""
        self.total_requests = 0
        self.asked_to_stop = asyncio.Event()  # by a signal or a client; who runs the server waits for it
        self.max_queued = settings.max_queued
        self._min_free_mb = settings.min_free_mb
        self.metrics = Metrics(settings.model_id)
        self.metrics.watch(lambda: self.active, lambda: self.queued)
        self.metrics.watch_state(get_args(State), lambda: self.state)
        self._load = load
        self._live: set[Job] = set()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.loaded = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # On the event loop

    def start(self) -> None:
        """Starts loading; requests are admitted once that is done."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def active(self) -> int:
        """Requests being computed."""
        return sum(job.running for job in self._live)

    @property
    def queued(self) -> int:
        """Requests admitted, but not yet being computed."""
        return len(self._live) - self.active

    def counts(self) -> dict[str, int]:
        """Requests by what became of them, and tokens, since the start."""
        return {
            "active": self.active,
            "queued": self.queued,
            "admitted": self.total_requests,
            **self.metrics.totals(),
        }

    def admit(self) -> Job:
        """Takes a place for one request, before any work is done for it.

        Raises:
            ApiError: 503 unless the engine is ready, 429 if the waiting room is full, 503 if memory is short.
        """
        if self.state != "ok":
            raise ApiError(503, self._why_not(), code=self.state, retry_after=RETRY_SECONDS[self.state])
        if self.max_queued and len(self._live) > self.max_queued:
            message = f"{self.queued} requests are waiting, which is the limit; retry later"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        if self._min_free_mb and (free := available_bytes() >> 20) < self._min_free_mb:
            message = f"{free} MB of memory are available, and requests are taken from {self._min_free_mb} MB on"
            raise ApiError(503, message, code="insufficient_memory", retry_after=RETRY_SECONDS["memory"])
        job = Job()
        if record := request_log.current():
            record.jobs.append(job)
        self._live.add(job)
        self.total_requests += 1
        return job

    def _why_not(self) -> str:
        reasons = {"loading": "the model is loading", "draining": "the server is shutting down"}
        return reasons.get(self.state, f"the engine has failed: {self.problem}")

    def submit(self, job: Job, work: Sequence[Work]) -> None:
        """Puts an admitted job into the queue. All its choices take one place, and run one after the other."""
        job.work = tuple(work)
        job.choices = len(work)
        prompts = {id(choice.prompt): choice.prompt for choice in work}
        job.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts.values())
        self._queue.put(job)

    def release(self, job: Job) -> None:
        """Ends a job whose handler has ended, however it ended. A running one counts until the engine lets go of it."""
        job.cancel()
        if not job.running:
            self._live.discard(job)

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits for the live ones, and after `timeout` seconds ends those with an error."""
        if self.state != "error":
            self.state = "draining"
        deadline = time.monotonic() + timeout
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(ApiError(503, "the server is shutting down", code="draining"))

    def stop(self) -> None:
        """Tells the thread to end after the job it is running."""
        self._fail_all(ApiError(503, "the server is shutting down", code="draining"))
        self._queue.put(None)

    def _fail_all(self, error: ApiError) -> None:
        for job in list(self._live):
            job.deliver(Failure(error))
            job.cancel()

    def _enter(self, state: State, problem: str = "") -> None:
        """A new state that the thread reports; draining is not undone by a model that is ready late."""
        if state == "error":
            self.problem = problem
            self._fail_all(ApiError(503, f"the engine has failed: {problem}", code="error"))
        if state == "error" or self.state != "draining":
            self.state = state
        self.loaded.set()

    def _end(self, job: Job, last: Step | Failure | None) -> None:
        """Frees the place of a job before its client can know that it has ended."""
        job.running = False
        self._live.discard(job)
        if isinstance(last, Step) and not job.ended and not job.cancelled:  # else it counts as what ended it
            self.metrics.completed(job, last.finish_reason)
        if last is not None:
            job.deliver(last)

    # On the engine thread

    def _run(self) -> None:
        try:
            self.model = self._load()
            self._tell(self._enter, "ok")
            while (job := self._queue.get()) is not None:
                self._serve(job)
        except KestrelError as error:  # the model cannot be loaded, for a reason that the user can put right
            log.error("%s", error)
            self._tell(self._enter, "error", str(error))
        except BaseException as error:
            log.exception("the engine thread failed")
            self._tell(self._enter, "error", f"{type(error).__name__}: {error}")

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Runs `call` on the event loop, unless that has ended."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the event loop has ended; %s is dropped", call)

    def _serve(self, job: Job) -> None:
        """Runs one job to its end, or until nobody waits for it; its failure is its own."""
        work = job.work
        if job.cancelled or work is None:
            return
        job.running = True
        last: Step | Failure | None = Failure(ApiError(500, "the engine failed on this request", code="engine_error"))
        try:
            last = self._generate(job, work)
        except KestrelError as error:
            last = Failure(bad_request(str(error)))
        except Exception:
            log.exception("request %s failed", job.id)
        finally:
            self._tell(self._end, job, last)

    def _generate(self, job: Job, work: Sequence[Work]) -> Step | None:
        """Delivers all steps but the last, which it returns; None if nobody waits for it."""
        job.timing.started = time.monotonic()
        for choice in work[:-1]:
            last = self._generate_choice(job, choice)
            if last is None:
                return None
            self._tell(job.deliver, last)
        return self._generate_choice(job, work[-1])

    def _generate_choice(self, job: Job, work: Work) -> Step | None:
        """The same for one choice."""
        if job.cancelled:
            return None
        items = self.model.stream(
            work.prompt, max_tokens=work.max_tokens, stop=work.stop, sampling=work.sampling, grammar=work.grammar
        )
        for item in items:
            if job.cancelled:
                return None
            now = time.monotonic()
            if isinstance(item, PrefillProgress):
                job.timing.prefilled = now
                continue
            self.metrics.token(job, now)
            job.generated += 1
            job.timing.first_token = job.timing.first_token or now
            job.timing.last_token = now
            if item.finish_reason is not None:
                return item
            self._tell(job.deliver, item)
        raise RuntimeError("the model ended an answer without a reason")
