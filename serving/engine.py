"""The engine thread: the one owner of the model and its batch, which runs admitted requests in the order they came.

The event loop admits, submits and cancels; the thread loads, computes and sends events back with
`loop.call_soon_threadsafe`. The set of live jobs belongs to the loop, the batch and every JAX call to the thread; what
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

from models import Batch, Generation, KestrelError, LoadedModel, PrefillProgress, Request, Step
from serving import request_log
from serving.errors import ApiError, bad_request
from serving.job import ChoiceStep, Failure, Job, Spoken, Work
from serving.memory import available_bytes
from serving.metrics import Metrics
from serving.settings import Settings

log = logging.getLogger("kestrel.engine")
State = Literal["loading", "ok", "draining", "error"]
ENGINE_FAILED = ApiError(500, "the engine failed on this request", code="engine_error")
RETRY_SECONDS = {"loading": 5, "draining": 30, "error": 60, "memory": 5}


@dataclass(eq=False)
class Run:
    """Choice number `index` of a job. `prefilled` and `last_token` are the moments on the monotonic clock when its
    prompt was in the cache and when its latest token came; 0 for what has not come."""

    job: Job
    index: int
    work: Work
    prefilled: float = 0.0
    last_token: float = 0.0


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
        self.batch: Batch | None = None
        self._settings = settings
        self._runs: dict[Generation, Run] = {}
        self._left: dict[Job, list[Run]] = {}  # the choices that are still to come of jobs that have been taken up
        self.metrics = Metrics(settings.model_id)
        self.metrics.watch(lambda: self.active, lambda: self.queued)
        self.metrics.watch_state(get_args(State), lambda: self.state)
        self.metrics.watch_slots(self.slots)
        self.metrics.watch_pictures(self.pictures)
        self.metrics.watch_disk(self.disk)
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
    def places(self) -> tuple[int, int]:
        """Requests being computed, and those that wait for it: of one moment, although the thread takes up and ends
        requests meanwhile. Together they are all that have been admitted and have not ended."""
        active = sum(job.running for job in self._live)
        return active, len(self._live) - active

    @property
    def active(self) -> int:
        """Requests being computed."""
        return self.places[0]

    @property
    def queued(self) -> int:
        """Requests admitted, but not yet being computed."""
        return self.places[1]

    def slots(self) -> dict[str, int]:
        """Slots of the cache, how many are in use, and what the others keep for requests to come."""
        if self.batch is None:
            return {"total": 0, "running": 0, "kept_tokens": 0}
        table = self.batch.slots
        return {"total": len(table.slots), "running": table.running, "kept_tokens": table.kept_tokens}

    def pictures(self) -> dict[str, int]:
        """Pictures that were needed, and how many of them had been encoded already."""
        if self.batch is None:
            return {"queries": 0, "hits": 0}
        return {"queries": self.batch.images.queries, "hits": self.batch.images.hits}

    def disk(self) -> dict[str, int]:
        """What is kept on disk, how many prompts were looked up there and found to begin with some of it, and how many
        tokens were read."""
        disk = None if self.batch is None else self.batch.disk
        if disk is None:
            return {"files": 0, "bytes": 0, "queries": 0, "hits": 0, "read_tokens": 0}
        return {
            "files": disk.files,
            "bytes": disk.nbytes,
            "queries": disk.queries,
            "hits": disk.hits,
            "read_tokens": disk.read_tokens,
        }

    def counts(self) -> dict[str, int]:
        """Requests by what became of them, and tokens, since the start."""
        active, queued = self.places
        return {
            "active": active,
            "queued": queued,
            "admitted": self.total_requests,
            **self.metrics.totals(),
        }

    def admit(self, owner: str = "") -> Job:
        """Takes a place for one request, before any work is done for it. What is computed for one `owner` is not used
        for another.

        Raises:
            ApiError: 503 unless the engine is ready and memory left, 429 if the waiting room is full.
        """
        self.check_room()
        job = Job(owner)
        if record := request_log.current():
            record.jobs.append(job)
        self._live.add(job)
        self.total_requests += 1
        return job

    def check_room(self) -> None:
        """Raises ApiError unless a request would be admitted: as `check_ready`, or 429 if the waiting room is full."""
        self.check_ready()
        if self.max_queued and len(self._live) >= self._settings.batch_max + self.max_queued:
            message = f"{self.queued} requests are waiting, which is the limit; retry later"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    def check_ready(self) -> None:
        """Raises ApiError, 503, unless requests are taken and there is memory for them."""
        if self.state != "ok":
            raise ApiError(503, self._why_not(), code=self.state, retry_after=RETRY_SECONDS[self.state])
        least = self._settings.min_free_mb
        if least and (free := available_bytes() >> 20) < least:
            message = f"{free} MB of memory are available, and requests are taken from {least} MB on"
            raise ApiError(503, message, code="insufficient_memory", retry_after=RETRY_SECONDS["memory"])

    def _why_not(self) -> str:
        reasons = {"loading": "the model is loading", "draining": "the server is shutting down"}
        return reasons.get(self.state, f"the engine has failed: {self.problem}")

    def submit(self, job: Job, work: Sequence[Work]) -> None:
        """Puts an admitted job into the queue. All its choices take one place there; they run together as far as the
        batch has room, otherwise one after the other."""
        job.work = tuple(work)
        job.choices = len(work)
        prompts = {id(choice.prompt): choice.prompt for choice in work}
        job.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts.values())
        if self._settings.log_prompts:
            decode = self.model.tokenizer.decode
            texts = [decode(prompt.token_ids.tolist()) for prompt in prompts.values()]
            job.spoken = Spoken(texts, [""] * len(work))
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

    async def written(self) -> None:
        """Waits, after `stop`, until what is kept on disk has been written: the thread's last work."""
        while self.batch is not None and self.batch.disk is not None and self._thread.is_alive():
            await asyncio.sleep(0.02)

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

    def _end(self, job: Job, last: ChoiceStep | Failure | None) -> None:
        """Frees the place of a job before its client can know that it has ended."""
        self._live.discard(job)
        if isinstance(last, ChoiceStep) and not job.ended and not job.cancelled:  # else it counts as what ended it
            self.metrics.completed(job, last.step.finish_reason)
        if last is not None:
            job.deliver(last)

    # On the engine thread

    def _run(self) -> None:
        try:
            self.model = self._load()
            self.batch = self.model.batch(self._settings.batch_limits(self.model.bytes_per_slot))
            self._tell(self._enter, "ok")
            while self._take_in():
                self._drop_cancelled()
                if self._runs:
                    self._advance()
            self.batch.close()
        except KestrelError as error:  # the model cannot be loaded, for a reason that the user can put right
            log.error("%s", error)
            self._tell(self._enter, "error", str(error))
        except BaseException as error:
            log.exception("the engine thread failed")
            self._tell(self._enter, "error", f"{type(error).__name__}: {error}")
        for job in self._taken_up():
            self._finish(job, None)

    def _taken_up(self) -> set[Job]:
        """The jobs that are being computed."""
        return {run.job for run in self._runs.values()} | self._left.keys()

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Runs `call` on the event loop, unless that has ended."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("the event loop has ended; %s is dropped", call)

    def _finish(self, job: Job, last: ChoiceStep | Failure | None) -> None:
        """Lets go of a job; `last` is for its client, if there is one."""
        job.running = False
        self._tell(self._end, job, last)

    def _take_in(self) -> bool:
        """Starts choices as long as the batch has room. Whose job has none in it comes first, then who waits in the
        queue, then further choices of the same job, which so have only the rows that nobody else waits for. Waits for
        a job if nothing runs; False at the end."""
        while not self.batch.full:
            run = self._due()
            if run is None or self._rows(run.job):
                with suppress(queue.Empty):
                    job = self._queue.get(block=run is None and not self._runs)
                    if job is None:
                        return False
                    self._take_up(job)
                    continue
            if run is None:
                break
            self._start(run)
        return True

    def _take_up(self, job: Job) -> None:
        work = job.work
        if job.cancelled or work is None:
            return
        job.running = True
        job.timing.started = time.monotonic()
        self._left[job] = [Run(job, index, part) for index, part in enumerate(work)]

    def _rows(self, job: Job) -> int:
        """How many of its choices are in the batch."""
        return sum(run.job is job for run in self._runs.values())

    def _due(self) -> Run | None:
        """The next choice to start: of the job with the fewest in the batch, and of these the one that came first. One
        whose prompt another one is just taking in waits, since it then need not."""
        for run in (run for job in sorted(self._left, key=self._rows) for run in self._left[job]):
            others = [other for other in self._runs.values() if other.work.prompt is run.work.prompt]
            if not others or any(other.prefilled for other in others):
                return run
        return None

    def _start(self, run: Run) -> None:
        """Puts a choice into the batch; a job that cannot be run ends with the reason."""
        self._left[run.job].remove(run)
        if not self._left[run.job]:
            del self._left[run.job]
        try:
            generation = self.batch.join(self._request(run.job, run.work))
        except KestrelError as error:
            self._lose(run.job, error)
        except Exception as error:
            self._lose(run.job, error)
            self._lose_batch()
        else:
            self._runs[generation] = run

    def _request(self, job: Job, work: Work) -> Request:
        return self.model.request(
            work.prompt,
            max_tokens=work.max_tokens,
            stop=work.stop,
            sampling=work.sampling,
            grammar=work.grammar,
            owner=job.owner,
        )

    def _drop_cancelled(self) -> None:
        for job in self._taken_up():
            if job.cancelled:
                self._drop(job)
                self._finish(job, None)

    def _drop(self, job: Job) -> None:
        """Takes all choices of a job out of the batch."""
        self._left.pop(job, None)
        for generation, run in list(self._runs.items()):
            if run.job is job:
                self.batch.leave(generation)
                del self._runs[generation]

    def _advance(self) -> None:
        """One step of the batch; if that fails, so do all jobs in it, because they share the cache."""
        try:
            items = self.batch.step()
        except Exception:
            log.exception("a step of the batch failed")
            self._lose_batch()
            return
        now = time.monotonic()
        for generation, item in items:
            if generation in self._runs:  # its job has not just been lost with another of its choices
                self._forward(generation, item, now)

    def _forward(self, generation: Generation, item: PrefillProgress | Step | Exception, now: float) -> None:
        """Notes what a step brought to a job, and tells its client."""
        run = self._runs[generation]
        job = run.job
        if isinstance(item, PrefillProgress):
            self._prefilled(run, generation, item, now)
            return
        if isinstance(item, Exception):
            self._lose(job, item)
            return
        self.metrics.token(job, run.last_token or run.prefilled, now)
        run.last_token = now
        job.generated += 1
        job.timing.first_token = job.timing.first_token or now
        job.timing.last_token = now
        if item.finish_reason is not None:
            del self._runs[generation]
        if job in self._taken_up():
            self._tell(job.deliver, ChoiceStep(run.index, item))
        else:
            self._finish(job, ChoiceStep(run.index, item))

    def _prefilled(self, run: Run, generation: Generation, item: PrefillProgress, now: float) -> None:
        """Notes how far a prompt has been taken in."""
        if run.index == 0:
            run.job.timing.prefilled = now
        if item.done == item.total:
            run.prefilled = now
            run.job.reused_tokens = run.job.reused_tokens or generation.reused
            self.metrics.prompt_reuse(generation.length, generation.reused)

    def _lose(self, job: Job, error: Exception) -> None:
        """Ends a job that has failed alone, with all its choices."""
        self._drop(job)
        if isinstance(error, KestrelError):
            self._finish(job, Failure(bad_request(str(error))))
            return
        log.error("request %s failed", job.id, exc_info=error)
        self._finish(job, Failure(ENGINE_FAILED))

    def _lose_batch(self) -> None:
        """Ends all jobs in the batch, whose arrays cannot be used any more."""
        for job in self._taken_up():
            self._finish(job, Failure(ENGINE_FAILED))
        self._runs.clear()
        self._left.clear()
        self.batch.abandon()
