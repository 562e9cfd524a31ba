"""Eight questions: one after the other, all at once, and all at once with batching; what it takes, and what it answers.

Claims: without batching, eight at once take what eight in a row take, because one inference state serves them in turn;
with batching they take less, for short answers too, where the original took 1.84 times as long; and each answer is the
same in all three. Documented: 11.35 s, 10.48 s and 20.93 s. Cost: ten minutes on 2 cores and 5 GiB of memory.

    python -m experiments.concurrency

Writes results/concurrency/. With `--url` the first two are measured on a server that runs already, into
results/HOST_PORT/concurrency/; `--url-batched` names one that batches. With `--server-machine RK3588` their times are
judged as those of the documented board are.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.latency import stream, text_of, ttft_ms
from experiments.served import add_server_options, address, asked_server, named, subject
from experiments.server_process import Server

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "从1数到5。",
    "What is 7 + 5?",
    "用一句话介绍你自己。",
    "Which day comes after Monday?",
    "天空是什么颜色？",
    "Say hello in Chinese.",
)
SERIAL, CONCURRENT, BATCHED = "one after the other", "at once", "at once, batched"
MODES = (SERIAL, CONCURRENT, BATCHED)
PRINTED = {SERIAL: 11.35, CONCURRENT: 10.48, BATCHED: 20.93}
SOURCE = "article 14-2, section 3 (measured in 14-1)"
BOARD = "RK3588, 2B, the same 8 short questions and answers, --batch-max 8 for the third"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, how long answers are, and how often all is asked."""
    add_server_options(parser)
    parser.add_argument("--url-batched", type=address, help="a server that runs already and batches")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--answers", type=int, nargs="+", default=[24, 200], help="tokens of short and of long answers")
    parser.add_argument("--repeats", type=int, default=3)


def cells(options: argparse.Namespace) -> list[Cell]:
    """The three ways in turn; every second repeat in the opposite order. Long answers are asked for once less."""
    modes = [mode for mode in MODES if mode != BATCHED or not options.url or options.url_batched]
    return [
        {"mode": mode, "tokens": tokens, "repeat": repeat}
        for repeat in range(options.repeats)
        for tokens in options.answers
        if tokens == min(options.answers) or repeat < max(1, options.repeats - 1)
        for mode in (modes if repeat % 2 == 0 else reversed(modes))
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A server that serves in turn and one that batches, neither of which reuses a prompt."""
    plain = ("--prefix-cache-mb", "0")
    batched = argparse.Namespace(**vars(options) | {"url": options.url_batched})
    with ExitStack() as stack:
        one = stack.enter_context(asked_server(options, options.quant, *plain))
        servers = dict.fromkeys(MODES, one)
        if not options.url or options.url_batched:
            servers[BATCHED] = stack.enter_context(asked_server(batched, options.quant, *plain, "--batch-max", "8"))
        for server in {(server.host, server.port): server for server in servers.values()}.values():
            asyncio.run(ask_all(server, CONCURRENT, 2))

        def measure(cell: Cell) -> list[Sample]:
            return [asyncio.run(ask_all(servers[cell["mode"]], cell["mode"], cell["tokens"]))]

        yield measure


async def ask_all(server: Server, mode: str, tokens: int) -> Sample:
    """Seconds until the last answer has ended, and every stream."""
    bodies = [
        {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0, "seed": number}
        for number, question in enumerate(QUESTIONS)
    ]
    bodies = [named(server, body) for body in bodies]
    start = time.monotonic_ns()
    if mode == SERIAL:
        streams = [await stream(server, body) for body in bodies]
    else:
        streams = await asyncio.gather(*(stream(server, body) for body in bodies))
    return {"seconds": (time.monotonic_ns() - start) / 1e9, "streams": streams}


def answers(sample: Sample) -> list[str]:
    """The texts, in the order of the questions."""
    return [text_of(told) for told in sample["streams"]]


def seconds(samples: Sequence[Sample], mode: str, tokens: int) -> list[float]:
    """Of each repeat, in order."""
    return [sample["seconds"] for sample in of(samples, mode=mode, tokens=tokens)]


def over_serial(samples: Sequence[Sample], mode: str, tokens: int) -> list[float]:
    """Seconds over those one after the other in the same repeat."""
    serial = {sample["cell"]["repeat"]: sample["seconds"] for sample in of(samples, mode=SERIAL, tokens=tokens)}
    found = of(samples, mode=mode, tokens=tokens)
    return [sample["seconds"] / serial[sample["cell"]["repeat"]] for sample in found]


def same_answers(samples: Sequence[Sample], mode: str) -> list[float]:
    """Per repeat and length, how many of the eight answers are those given one after the other."""
    found = []
    for sample in of(samples, mode=mode):
        key = {name: sample["cell"][name] for name in ("tokens", "repeat")}
        [serial] = of(samples, mode=SERIAL, **key)
        found.append(float(sum(map(str.__eq__, answers(sample), answers(serial)))))
    return found


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per way and length."""
    lines = [
        f"Eight questions to {subject(options, options.quant)}, greedy, streamed; seconds until the last answer has "
        "ended, median (lowest..highest). Ratios are taken within a repeat. First token is the median of eight.",
        "",
        "Warm-up: all eight questions at once to each server, two tokens each, which are not counted. A server of this "
        "project has compiled everything before it says that it is ready, so no time here contains compiling.",
        "",
        "| answers | asked | n | seconds | over one after the other | first token, s | same answers | documented, s |",
        "|" + "---|" * 8,
    ]
    for tokens in options.answers:
        for mode in MODES:
            chosen = of(samples, mode=mode, tokens=tokens)
            if not chosen:
                continue
            first = [median(ttft_ms(told) for told in sample["streams"]) / 1e3 for sample in chosen]
            documented = f"{PRINTED[mode]}" if tokens == min(options.answers) else ""
            row = [f"{tokens} tokens", mode, str(len(chosen)), spread(seconds(samples, mode, tokens), 2)]
            row += [spread(over_serial(samples, mode, tokens), 2), spread(first, 2)]
            row += [f"{min(same_answers(of(samples, tokens=tokens), mode)):.0f} of 8", documented]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Ratios to one after the other, documented and here."""
    figure, (bars, lanes) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    groups: list[tuple[str, Callable[[str], float]]] = [("documented", lambda mode: PRINTED[mode] / PRINTED[SERIAL])]
    groups += [
        (f"here, {tokens} tokens", lambda mode, tokens=tokens: median(over_serial(samples, mode, tokens) or [0]))
        for tokens in options.answers
    ]
    for number, mode in enumerate(MODES):
        heights = [height(mode) for _, height in groups]
        at = [place + 0.27 * (number - 1) for place in range(len(groups))]
        drawn = bars.bar(at, heights, 0.25, color=COLOURS[number], hatch=("", "//", "..")[number], label=mode)
        bars.bar_label(drawn, fmt="%.2f", fontsize=7)
    bars.set(
        xticks=range(len(groups)), xticklabels=[name for name, _ in groups], ylabel="time over one after the other"
    )
    bars.axhline(1, color="grey", lw=0.8)
    bars.legend(fontsize=7)
    bars.set_title("documented: 11.35, 10.48 and 20.93 s")
    plot_lanes(lanes, samples, min(options.answers))
    return figure


def plot_lanes(axes: Any, samples: Sequence[Sample], tokens: int) -> None:
    """When each of the eight answers ran: a lane each, from its first token to its end."""
    labels = []
    for number, mode in enumerate(MODES):
        for sample in of(samples, mode=mode, tokens=tokens)[:1]:
            begin = min(told["sent"] for told in sample["streams"])
            for lane, told in enumerate(sample["streams"]):
                first, last = ((told["events"][place][0] - begin) / 1e9 for place in (1, -1))
                axes.plot([first, last], [len(labels)] * 2, color=COLOURS[number], lw=3, solid_capstyle="butt")
                labels.append(f"{mode}: question 1" if lane == 0 else str(lane + 1))
    axes.set(yticks=range(len(labels)), xlabel="seconds")
    axes.set_yticklabels(labels, fontsize=7)
    axes.set_title(f"{tokens} tokens: each answer from its first text to its end")
    axes.invert_yaxis()


def _short(read: Callable[[Sequence[Sample], str, int], list[float]], mode: str) -> Callable[..., list[float]]:
    def measured(samples: Sequence[Sample]) -> list[float]:
        return read(samples, mode, min(sample["cell"]["tokens"] for sample in samples)) if samples else []

    return measured


def _every_length(samples: Sequence[Sample]) -> list[float]:
    """At once over one after the other, the median of the repeats of each length of answers."""
    lengths = sorted({sample["cell"]["tokens"] for sample in of(samples, mode=CONCURRENT)})
    return [median(over_serial(samples, CONCURRENT, tokens)) for tokens in lengths]


def _long_gain(samples: Sequence[Sample]) -> list[float]:
    longest = max((sample["cell"]["tokens"] for sample in samples), default=0)
    return [1 / ratio for ratio in over_serial(samples, BATCHED, longest)]


FIGURES = (
    *(
        Documented(
            f"8 short questions {mode}",
            f"{PRINTED[mode]} s",
            PRINTED[mode],
            "s",
            SOURCE,
            BOARD,
            _short(seconds, mode),
            absolute="at most",
        )
        for mode in MODES
    ),
    Documented(
        "at once over one after the other, without batching",
        "10.48 / 11.35 = 0.92",
        0.92,
        "",
        SOURCE,
        BOARD,
        _every_length,
        lambda values: min(values) >= 0.85 and max(values) <= 1.1,
        "one inference state: eight at once must take about what eight in a row take, 0.85 to 1.1 for short and for "
        "long answers each (medians of their repeats). A ratio below that is no overlap, because one engine computes "
        "one answer at a time in both, as the plot's lanes show; it is the machine's pace, which changes from one "
        "minute to the next: the table's seconds for the same work spread by as much, and long answers have the fewest "
        "repeats to even that out",
    ),
    Documented(
        "batched over one after the other, short answers",
        "20.93 / 11.35 = 1.84",
        1.84,
        "",
        SOURCE,
        BOARD,
        _short(over_serial, BATCHED),
        lambda values: median(values) > 1.1,
        "slower with batching, as documented, means by more than a tenth. The original computes each whole prompt "
        "while all streams wait. Here prompts are cut into chunks, and a step reads the weights, which decoding waits "
        "for, once for all eight rows: the table's seconds fall, and so does the time to the first token",
    ),
    Documented(
        "gain of batching on long answers",
        "about 1.7",
        1.7,
        "times",
        "docs of the original, digest of batch figures",
        "x86, 8B, 16 threads, 8 at once, 22.0 against 13.1",
        _long_gain,
        lambda values: median(values) >= 1.3,
        "at least 1.3 times the tokens per second",
    ),
    Documented(
        "answers that are the same batched and one after the other",
        "8 at once: all PASS",
        8.0,
        "of 8",
        "docs of the original, optimised settings",
        "x86, 8B, 16 threads; what passes is not described, and equality is not guaranteed",
        lambda samples: same_answers(samples, BATCHED),
        lambda values: set(values) == {8.0},
        "every answer of every repeat, to the last character; batch_margin has what this project guarantees beyond it",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": "tiny-vl", "answers": [8, 24], "repeats": 2})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
