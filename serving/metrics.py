"""What happens inside, for Prometheus: vLLM's metrics under the prefix `kestrel:`, so that its dashboards fit.

Times mean what they mean in vLLM: a request begins with its admission, and its prefill ends with its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from serving.job import Job

PREFIX = "kestrel:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FIRST_TOKEN_SECONDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
FIRST_TOKEN_SECONDS += [20, 40, 80, 160, 640, 2560]
TOKEN_SECONDS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST_SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
LAG_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5]
LAG_TICK = 0.01

FINISH_REASONS = ("stop", "length")
OUTCOMES = ("refused", "failed", "left")

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


@dataclass(eq=False)  # the registry tells collectors apart by identity
class _Watched(Collector):
    """Numbers that are asked for whenever the metrics are read."""

    kind: Family
    name: str
    model_name: str
    numbers: Callable[[], dict[str, int]]
    texts: dict[str, str]

    def collect(self) -> Iterator[Metric]:
        numbers = self.numbers()
        for key, text in self.texts.items():
            family = self.kind(f"{self.name}_{key}", text, labels=["model_name"])
            family.add_metric([self.model_name], numbers[key])
            yield family


class Metrics:
    """The metrics of one server, in a registry of its own. Every series carries the model's name, as in vLLM.

    Any thread may add to them: prometheus-client locks every value.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._prompt_tokens = self._new(Counter, "prompt_tokens", "Tokens of prompts, counted at the first token.")
        self._generated = self._new(Counter, "generation_tokens", "Tokens generated, end tokens included.")
        text = "Tokens of prompts, those included that were in the cache already."
        self._prefix_queries = self._new(Counter, "prefix_cache_queries", text)
        text = "Tokens of prompts that were in the cache already."
        self._prefix_hits = self._new(Counter, "prefix_cache_hits", text)
        text = "Answers that the engine has completed."
        success = self._labelled(Counter, "request_success", text, "finished_reason")
        self._success = {reason: success(reason) for reason in FINISH_REASONS}
        text = "Requests without a complete answer: refused, failed, or their client left."
        unfinished = self._labelled(Counter, "request_unfinished", text, "outcome")
        self._unfinished = {outcome: unfinished(outcome) for outcome in OUTCOMES}
        text = "From admission to the first token."
        self._first_token = self._new(Histogram, "time_to_first_token_seconds", text, buckets=FIRST_TOKEN_SECONDS)
        text = "Between a token and the one before; one sample per token."
        self._inter_token = self._new(Histogram, "inter_token_latency_seconds", text, buckets=TOKEN_SECONDS)
        text = "Mean time between the tokens of an answer, without its first; one sample per answer."
        self._per_token = self._new(Histogram, "request_time_per_output_token_seconds", text, buckets=TOKEN_SECONDS)
        self._total = self._request("e2e_request_latency_seconds", "From admission to the last token.")
        self._queue = self._request("request_queue_time_seconds", "From admission to the engine.")
        self._inference = self._request("request_inference_time_seconds", "From the engine to the last token.")
        self._prefill = self._request("request_prefill_time_seconds", "From the engine to the first token.")
        self._decode = self._request("request_decode_time_seconds", "From the first token to the last.")
        text = "How much later than asked for the event loop woke up, every 10 ms."
        self._lag = self._new(Histogram, "event_loop_lag_seconds", text, buckets=LAG_SECONDS)

    def _new(self, kind: type[Kind], name: str, text: str, **options: Any) -> Kind:
        metric = kind(PREFIX + name, text, ["model_name"], registry=self._registry, **options)
        return metric.labels(self._model_name)

    def _labelled(self, kind: type[Kind], name: str, text: str, label: str) -> Callable[[str], Kind]:
        """A metric with one more label, as a function of its value."""
        metric = kind(PREFIX + name, text, ["model_name", label], registry=self._registry)
        return lambda value: metric.labels(self._model_name, value)

    def _request(self, name: str, text: str) -> Histogram:
        return self._new(Histogram, name, text, buckets=REQUEST_SECONDS)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Shows how many requests are computed and how many wait, asked for whenever the metrics are read."""
        self._new(Gauge, "num_requests_running", "Requests being computed.").set_function(running)
        text = "Requests admitted, but not yet being computed."
        self._new(Gauge, "num_requests_waiting", text).set_function(waiting)

    def watch_state(self, states: tuple[str, ...], current: Callable[[], str]) -> None:
        """Shows the engine's state: 1 for the one it is in, 0 for the others."""
        series = self._labelled(Gauge, "engine_state", "1 for the state that the engine is in.", "state")
        for state in states:
            series(state).set_function(lambda state=state: current() == state)

    def watch_bodies(self, held: Callable[[], int]) -> None:
        """Shows how much the bodies take up that are being taken in."""
        self._new(Gauge, "request_body_bytes", "Bodies being received or parsed.").set_function(held)

    def watch_slots(self, slots: Callable[[], dict[str, int]]) -> None:
        """Shows the slots of the cache."""
        self._watch_each(
            GaugeMetricFamily,
            "cache_slots",
            slots,
            total="Slots of the cache.",
            running="Slots that a request uses.",
            kept_tokens="Tokens of ended requests that are kept in slots.",
        )

    def watch_pictures(self, pictures: Callable[[], dict[str, int]]) -> None:
        """Shows how many pictures requests had, and how many of them had been encoded before."""
        texts = {"queries": "Pictures that were needed.", "hits": "Pictures that had been encoded already."}
        self._watch_each(CounterMetricFamily, "mm_cache", pictures, **texts)

    def watch_disk(self, disk: Callable[[], dict[str, int]]) -> None:
        """Shows what is kept on disk."""
        self._watch_each(
            GaugeMetricFamily,
            "disk_cache",
            disk,
            files="Files with keys and values of earlier requests.",
            bytes="What these files take.",
        )
        self._watch_each(
            CounterMetricFamily,
            "disk_cache",
            disk,
            queries="Prompts that were looked up in them.",
            hits="Prompts of which they had more than the cache in memory.",
            read_tokens="Tokens that were read from them.",
        )

    def _watch_each(self, kind: Family, name: str, numbers: Callable[[], dict[str, int]], **texts: str) -> None:
        """A metric for every one of some numbers that are kept elsewhere, with what it means."""
        self._registry.register(_Watched(kind, PREFIX + name, self._model_name, numbers, texts))

    def prompt_reuse(self, tokens: int, reused: int) -> None:
        """Counts a prompt that has been taken in, and how much of it was in the cache."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(reused)

    def token(self, job: Job, before: float, now: float) -> None:
        """Counts a token generated at `now` (seconds, monotonic), in an answer whose token before it came at `before`,
        or its prompt's end; the job's timing does not yet tell of it."""
        self._generated.inc()
        if job.timing.first_token:
            self._inter_token.observe(now - before)
        else:
            self._prompt_tokens.inc(job.prompt_tokens)
            self._first_token.observe(now - job.timing.admitted)

    def completed(self, job: Job, finish_reason: str) -> None:
        """Counts an answer that has come to its end."""
        timing = job.timing
        self._success[finish_reason].inc()
        self._queue.observe(timing.started - timing.admitted)
        self._inference.observe(timing.last_token - timing.started)
        self._prefill.observe(timing.first_token - timing.started)
        self._decode.observe(timing.last_token - timing.first_token)
        self._total.observe(timing.last_token - timing.admitted)
        if job.generated > 1:
            self._per_token.observe((timing.last_token - timing.first_token) / (job.generated - 1))

    def unfinished(self, outcome: str) -> None:
        """Counts a request that ended without a complete answer; `outcome` is one of OUTCOMES."""
        self._unfinished[outcome].inc()

    async def measure_lag(self) -> None:
        """Watches the event loop that it runs on, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_TICK
            await asyncio.sleep(LAG_TICK)
            self._lag.observe(max(0.0, loop.time() - due))

    def totals(self) -> dict[str, int]:
        """Completed and other requests, and tokens."""
        return {
            "completed": sum(self._total_of("request_success", finished_reason=reason) for reason in FINISH_REASONS),
            **{outcome: self._total_of("request_unfinished", outcome=outcome) for outcome in OUTCOMES},
            "prompt_tokens": self._total_of("prompt_tokens"),
            "generation_tokens": self._total_of("generation_tokens"),
        }

    def _total_of(self, counter: str, **labels: str) -> int:
        labels["model_name"] = self._model_name
        return int(self._registry.get_sample_value(f"{PREFIX}{counter}_total", labels))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
