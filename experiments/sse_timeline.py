"""When each event of a streamed answer reaches its client: role frame, first token, every gap, and how the stream ends.

Claims: the first event comes long before the first token; after that the rhythm of events is the rhythm of decoding,
and does not change as the answer grows; metrics, tokens and [DONE] follow the last token at once. Documented: 130.3 ms,
930.4 ms, 50 to 60 ms per token, 35 events, 2,728 ms, the closing three within 1 ms. Cost: four minutes on 2 cores and
5 GiB of memory.

    python -m experiments.sse_timeline

Writes results/sse_timeline/. `--url` measures a server that runs already, `--model DIR` a real checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.latency import closing_ms, first_event_ms, itl_ms, moments, streamed, total_ms, tpot_ms, ttft_ms
from experiments.served import add_server_options, asked_server

QUESTION = "请从1数到20。"
SHORT, LONG = 30, 200  # tokens
SOURCE = "article 20-3, section 3"
BOARD = "RK3588, stream of a counting prompt, max_tokens 30, client on the LAN, model and quantisation not stated"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served and how often it is asked."""
    add_server_options(parser)
    parser.add_argument("--quant", nargs="+", default=["q8", "q4"], help="formats of the weights, each served in turn")
    parser.add_argument("--repeats", type=int, default=5, help=f"of {SHORT} tokens; those of {LONG} are two fewer")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Formats in turn within a repeat."""
    return [
        {"quant": quant, "tokens": tokens, "repeat": repeat}
        for repeat in range(options.repeats)
        for tokens in (SHORT, LONG)
        if tokens == SHORT or repeat < max(1, options.repeats - 2)
        for quant in options.quant
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A server for each format; each has answered once before it is measured."""
    with ExitStack() as stack:
        servers = {
            quant: stack.enter_context(asked_server(options, quant, "--kestrel-events")) for quant in options.quant
        }
        for server in servers.values():
            streamed(server, body(4))

        def measure(cell: Cell) -> list[Sample]:
            return [streamed(servers[cell["quant"]], body(cell["tokens"]))]

        yield measure


def body(tokens: int) -> dict[str, Any]:
    """The request. Greedy, as the prompt has one right answer."""
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, "temperature": 0}


def generated(sample: Sample) -> int:
    """Tokens of the answer, as the server counts them; from one that does not, events with text."""
    return sample["metrics"]["n_tokens"] if sample["metrics"] else len(moments(sample))


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per format and length."""
    lines = [
        f"`{QUESTION}`, greedy, {options.model}{'' if not options.url else f' at {options.url}'}; milliseconds from "
        "sending the request on an open connection, median (lowest..highest) of the repeats. ITL pools the gaps of all "
        "repeats: median, 95th and 99th percentile.",
        "",
        "| weights | max tokens | n | first event | first token | TPOT | ITL | events | whole stream | closing three |",
        "|" + "---|" * 10,
    ]
    for quant in options.quant:
        for tokens in (SHORT, LONG):
            lines.append(row(quant, tokens, of(samples, quant=quant, tokens=tokens)))
    return "\n".join(lines) + "\n"


def row(quant: str, tokens: int, samples: Sequence[Sample]) -> str:
    """One row of the table."""
    gaps = sorted(gap for sample in samples for gap in itl_ms(sample))
    closing = [ms for ms in map(closing_ms, samples) if ms is not None]
    cells = [
        quant,
        str(tokens),
        str(len(samples)),
        *(spread([read(sample) for sample in samples]) for read in (first_event_ms, ttft_ms)),
        spread([tpot_ms(sample, generated(sample)) for sample in samples]),
        " / ".join(f"{gaps[min(len(gaps) - 1, int(share * len(gaps)))]:.1f}" for share in (0.5, 0.95, 0.99)),
        ", ".join(sorted({str(len(sample["events"])) for sample in samples})),
        spread([total_ms(sample) for sample in samples]),
        spread(closing, 2) if closing else "",
    ]
    return f"| {' | '.join(cells)} |"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """The streams as the article draws them, and the gaps along the long ones."""
    figure, (streams, gaps) = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    for number, quant in enumerate(options.quant):
        short, long = of(samples, quant=quant, tokens=SHORT), of(samples, quant=quant, tokens=LONG)
        plot_stream(streams, short[len(short) // 2], number, quant)
        along = list(zip(*(itl_ms(sample) for sample in long), strict=False))
        gaps.plot(
            range(2, 2 + len(along)),
            [median(at) for at in along],
            color=COLOURS[number],
            lw=1,
            label=f"{quant}, median",
        )
    streams.axvline(130.3, color="grey", ls="--", lw=1, label="documented: first event 130.3 ms")
    streams.axvline(930.4, color="grey", ls=":", lw=1, label="documented: first token 930.4 ms")
    streams.set(yticks=range(len(options.quant)), yticklabels=options.quant, xlabel="ms from sending the request")
    streams.set(title=f"{SHORT} tokens: when each event arrives", ylim=(-0.6, len(options.quant) - 0.4))
    streams.legend(fontsize=7, loc="upper right")
    gaps.axhspan(50, 60, color="grey", alpha=0.25, label="documented: 50 to 60 ms")
    gaps.set(xlabel="token", ylabel="gap to the event before (ms)", ylim=(0, None), title=f"{LONG} tokens: every gap")
    gaps.legend(fontsize=7)
    return figure


def plot_stream(axes: Axes, sample: Sample, height: int, quant: str) -> None:
    """One stream as marks on a line."""
    for kinds, marker, label in (
        (("role",), "D", "role frame"),
        (("content",), "|", "text"),
        (("finish", "metrics", "tokens", "done"), "x", "finish, metrics, tokens, [DONE]"),
    ):
        at = [(moment - sample["sent"]) / 1e6 for moment, kind, _ in sample["events"] if kind in kinds]
        axes.plot(at, [height] * len(at), ls="", marker=marker, color=COLOURS[height], label=f"{quant}: {label}")


def short_ones(samples: Sequence[Sample]) -> list[Sample]:
    """The streams that the article's are set beside: of the format that was asked for first."""
    return of(samples, tokens=SHORT, quant=samples[0]["cell"]["quant"]) if samples else []


def steadiness(samples: Sequence[Sample]) -> list[float]:
    """Median gap of the last quarter of the long answers over that of their first."""
    found = []
    for sample in of(samples, tokens=LONG):
        gaps = itl_ms(sample)
        quarter = len(gaps) // 4
        if quarter:
            found.append(median(gaps[-quarter:]) / median(gaps[:quarter]))
    return found


def rhythm(samples: Sequence[Sample]) -> list[float]:
    """TPOT that the client sees over the one that the engine reports."""
    return [
        tpot_ms(sample, generated(sample)) / sample["metrics"]["tpot_ms"]
        for sample in samples
        if sample["metrics"] and generated(sample) > 1
    ]


def _read(read: Any) -> Any:
    return lambda samples: [read(sample) for sample in short_ones(samples)]


FIGURES = (
    Documented("first event (role frame)", "130.3 ms", 130.3, "ms", SOURCE, BOARD, _read(first_event_ms)),
    Documented("first token", "930.4 ms", 930.4, "ms", SOURCE, BOARD, _read(ttft_ms)),
    Documented(
        "time per token", "50-60 ms", 55, "ms", SOURCE, BOARD, _read(lambda sample: tpot_ms(sample, generated(sample)))
    ),
    Documented("whole stream", "2,728 ms", 2728, "ms", SOURCE, BOARD, _read(total_ms)),
    Documented(
        "first event over first token",
        "130.3 / 930.4 = 0.14",
        0.14,
        "",
        SOURCE,
        BOARD,
        _read(lambda sample: first_event_ms(sample) / ttft_ms(sample)),
        lambda values: max(values) < 0.5,
        "the role frame is sent at admission, before the prompt is computed; it has to come in the wait's first half",
    ),
    Documented(
        "events of a stream of 30 tokens",
        "35",
        35,
        "events",
        SOURCE,
        BOARD,
        _read(lambda sample: len(sample["events"])),
        lambda values: set(values) == {35.0},
        "30 tokens and role, finish, metrics, tokens and [DONE]; fewer where a token only begins a character",
    ),
    Documented(
        "metrics, tokens and [DONE] follow each other",
        "within 1.2 ms",
        1.2,
        "ms",
        SOURCE,
        BOARD,
        lambda samples: [ms for ms in map(closing_ms, samples) if ms is not None],
        lambda values: median(values) <= 1.2,
        "median over all streams",
    ),
    Documented(
        "the rhythm of events is the rhythm of decoding",
        "50-60 ms against tpot_ms 55",
        1.0,
        "",
        SOURCE,
        BOARD,
        rhythm,
        lambda values: 0.95 <= median(values) <= 1.05,
        "TPOT at the client over tpot_ms of the same stream, within 5 %",
    ),
    Documented(
        "the gap stays the same up to 200 tokens",
        "asked of the reader",
        1.0,
        "",
        "article 20-3, section 4, task A2",
        "the same with max_tokens 200",
        steadiness,
        lambda values: 0.85 <= median(values) <= 1.15,
        "median gap of the last quarter over the first quarter, within 15 %",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": "tiny-vl", "quant": ["q4"], "repeats": 3})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
