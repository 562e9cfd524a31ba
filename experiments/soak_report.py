"""The report of `experiments.soak`: raw data, table and plot."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.environment import write_environment
from experiments.soak_clients import Record
from experiments.soak_overhead import Answer, pooled

WARM_UP = 0.2  # of the time, before the slope of the memory is taken
OUTCOMES = ("completed", "refused", "failed", "left")  # what the server counts
LEAK_MB, MEDIAN_MS, HIGH_MS = 1.0, 1.0, 3.0  # what must not be reached, per minute and per token

Row = tuple[str, str, str, bool | None]


@dataclass
class Memory:
    """The server's memory over time: seconds since the beginning, and resident bytes."""

    seconds: list[float]
    resident: list[int]

    def slope(self) -> tuple[float, float]:
        """Megabytes per minute after the warm-up, and where the line begins (bytes at second 0)."""
        seconds, resident = np.asarray(self.seconds), np.asarray(self.resident)
        warm = seconds >= WARM_UP * seconds[-1]
        per_second, start = np.polyfit(seconds[warm], resident[warm], 1)
        return float(per_second * 60 / 1e6), float(start)


@dataclass
class Found:
    """Everything that was measured: `before` and `after` are the server's open files and threads; `counters` its own,
    when all was over; `told` what its log says of each request."""

    records: list[Record]
    memory: Memory
    before: dict[str, int]
    after: dict[str, int]
    counters: dict[str, int]
    told: list[dict[str, Any]]
    overhead: list[Answer]


def write(found: Found, folder: Path, head: str) -> str:
    """Writes raw data, table (below `head`), plot and environment; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "requests.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record.row()) + "\n" for record in found.records)
    (folder / "tokens.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in found.overhead))
    server = {"memory": vars(found.memory), "before": found.before, "after": found.after, "counters": found.counters}
    server["log"] = Counter(line["outcome"] for line in found.told)
    (folder / "server.json").write_text(json.dumps(server) + "\n")
    text = table(found)
    (folder / "table.md").write_text(f"{head}\n{text}")
    figure = plot(found)
    figure.savefig(folder / "plot.svg")
    figure.savefig(folder / "plot.png", dpi=110)
    plt.close(figure)
    write_environment(folder)
    return text


def table(found: Found) -> str:
    """What was found beside what must be."""
    lines = ["| what | must | found | reached |", "|---|---|---|---|"]
    for what, must, value, reached in (*_crowd(found.records), *_server(found), *_tokens(found.overhead)):
        lines.append(f"| {what} | {must} | {value} | {'' if reached is None else 'yes' if reached else 'no'} |")
    return "\n".join(lines) + "\n"


def _nothing(what: str, count: int) -> Row:
    """Something that must not be."""
    return what, "0", str(count), count == 0


def _percentiles(what: str, values: Sequence[float] | np.ndarray, digits: int) -> Row:
    found = [f"{value:.{digits}f}" for value in np.percentile(values, (50, 95, 99))] if len(values) else ["none"]
    return f"{what}, ms: p50 / p95 / p99", "", " / ".join(found), None


def _crowd(records: Sequence[Record]) -> Iterator[Row]:
    """What the clients saw."""
    outcomes = Counter(record.outcome for record in records)
    exact = [record.exact for record in records if record.exact is not None]
    yield "requests", "", str(len(records)), None
    yield _nothing("lost", outcomes["lost"])
    yield _nothing("mixed: another request's code word, or a changed id", sum(record.mixed for record in records))
    yield "answered", "", str(outcomes["answered"]), None
    yield "repeated exactly, of those that were to be", "", f"{sum(exact)} of {len(exact)}", None
    yield "turned away, because too many waited", "", str(outcomes["turned away"]), None
    yield "garbage, refused", "", str(outcomes["refused"]), None
    yield "clients that left", "", str(outcomes["left"]), None
    yield "clients that stalled, cut off", "", str(outcomes["cut off"]), None
    ttft = [record.ttft_ms for record in records if record.ttft_ms is not None]
    yield _percentiles("from request to first text", ttft, 1)
    yield _percentiles("between pieces of text", [gap for record in records for gap in record.gaps_ms], 2)


def _server(found: Found) -> Iterator[Row]:
    """What the server says of itself, and what it keeps."""
    counters = found.counters
    # Requests that are answered without the engine have a line in the log, but no counter.
    told = sum("id" in line or line["outcome"] != "finished" for line in found.told)
    yield _nothing("failed, by the server's count", counters["failed"])
    yield _nothing("requests in its log that are missing in its counters", told - sum(map(counters.get, OUTCOMES)))
    yield _nothing("requests left behind, active or queued", counters["active"] + counters["queued"])
    yield _nothing("open files more than before", max(0, found.after["files"] - found.before["files"]))
    slope, _ = found.memory.slope()
    yield "memory, MB per minute after the warm-up", f"< {LEAK_MB:g}", f"{slope:.2f}", slope < LEAK_MB


def _tokens(answers: Sequence[Answer]) -> Iterator[Row]:
    """What a token costs beyond its step."""
    overhead = pooled(answers, "overhead")
    median, high = np.percentile(overhead, (50, 99))
    yield "overhead per token, ms: median", f"< {MEDIAN_MS:g}", f"{median:.3f}", bool(median < MEDIAN_MS)
    yield "overhead per token, ms: p99", f"< {HIGH_MS:g}", f"{high:.3f}", bool(high < HIGH_MS)
    yield "overhead per token, ms: mean", "", f"{overhead.mean():.3f}", None
    yield _percentiles("from the model to the client", pooled(answers, "delivery"), 3)
    yield _percentiles("a step of the model in the server", pooled(answers, "step"), 3)
    yield _percentiles("a step of the model alone", pooled(answers, "step", alone=True), 3)


def plot(found: Found) -> Figure:
    """Memory over time, and the distribution of what a token costs beyond its step."""
    mpl.use("Agg")
    figure, (memory, tokens) = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    minutes = np.asarray(found.memory.seconds) / 60
    slope, start = found.memory.slope()
    memory.plot(minutes, np.asarray(found.memory.resident) / 1e6, lw=1, color="black", label="resident")
    warm = minutes[minutes >= WARM_UP * minutes[-1]]
    memory.plot(warm, start / 1e6 + slope * warm, "--", color="tab:red", label=f"{slope:+.2f} MB per minute")
    memory.set(xlabel="minutes", ylabel="memory of the server (MB)", ylim=(0, None))
    memory.legend(fontsize=8)
    for name, label in (("overhead", "gap at the client less the model's step"), ("delivery", "from model to client")):
        values = np.sort(pooled(found.overhead, name))
        tokens.plot(values, np.linspace(0, 100, len(values)), label=label)
    for limit in (MEDIAN_MS, HIGH_MS):
        tokens.axvline(limit, color="grey", lw=0.8)
    tokens.set(xlabel="milliseconds", ylabel="tokens (%)", xlim=(-1, HIGH_MS + 1))
    tokens.legend(fontsize=8)
    return figure
