"""One thread, two, and more: how prompts, decoding and the reading of memory gain from cores.

Claims: a prompt is taken in faster with every core, because it is computing that takes its time; decoding gains until
memory cannot be read any faster, which on a machine with little bandwidth is below the documented gain already with two
threads; and the tokens do not depend on the threads. Documented, 8B q4 on 64 Neoverse-N1 cores: prompts 1.98 times as
fast with 2 threads as with one, 7.4 times with 8, 29 times with 64; decoding 1.98, 7.2 and 11.5 times, fastest with 40
to 48. Cost: four minutes on 2 cores, 2.5 GiB of memory per number of threads.

    python -m experiments.threads

Random weights at real shape, int8 cache. Each number of threads has a process of its own that is kept to as many cores,
because XLA counts them once; the processes take turns. A time's floor is what reading the weights takes at the
bandwidth of as many threads: once per token, and for a prompt once per chunk. Writes results/threads/. `--model DIR`
takes the shape of a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from statistics import fmean, median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bandwidth import ARRAY_BYTES, ReadBandwidth
from experiments.bench import PAUSE, ratios, spread
from experiments.bench_decode import floors
from experiments.bench_steps import Held, Steps, bytes_read
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, by_repeat
from experiments.sources import N1 as SOURCE
from experiments.turns import Subject
from models.inference import plan_chunks
from models.quantisation import SCHEMES

PREFILL, DECODE, READING = "prefill", "decode", "reading"
# Threads -> seconds of a prompt, ms per token
Times = dict[int, tuple[float, float]]
EIGHT: Times = {
    1: (72.262, 619.0),
    2: (36.537, 313.0),
    4: (18.725, 162.0),
    8: (9.800, 86.0),
    16: (5.461, 49.0),
    32: (3.337, 36.0),
    40: (3.151, 35.0),
    48: (2.828, 35.0),
    56: (2.655, 36.0),
    64: (2.494, 54.0),
}
THIRTY: Times = {
    1: (132.930, 951.5),
    2: (78.092, 485.5),
    4: (40.219, 251.5),
    8: (19.530, 135.0),
    16: (11.561, 117.0),
    32: (7.155, 110.0),
    64: (4.543, 129.5),
}
CONFIGURATION = "Qwen3-VL-8B q4, prompt of 502 tokens, context 512"
BOARD_SOURCE = "docs of the original, changelog"
BOARD = "RK3588, 8B q4, warm, 4 threads on the fast cores against 8 on all"


def default_threads(cores: int) -> list[int]:
    """Powers of two, and all cores."""
    return sorted({2**power for power in range(cores.bit_length())} | {cores})


def thread_count(text: str) -> int:
    """A number of threads from the command line."""
    cores = len(os.sched_getaffinity(0))
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number from 1 to {cores}, the cores of this process")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is timed, and with how many threads."""
    parser.add_argument("--model", default="qwen3-vl-2b", help="a preset, or a model or folder for its shape")
    parser.add_argument("--quant", choices=SCHEMES, default="q4")
    parser.add_argument(
        "--threads",
        type=thread_count,
        nargs="+",
        default=default_threads(len(os.sched_getaffinity(0))),
        help="by default powers of two up to the cores that this process may use, and all of these",
    )
    parser.add_argument("--length", type=int, default=502, help="tokens of the prompt, and of the cache while decoding")
    parser.add_argument("--steps", type=int, default=24, help="tokens decoded per repeat")
    parser.add_argument("--repeats", type=int, default=5)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Numbers of threads in turn, in the other order in every other repeat."""
    return [
        {"threads": threads, "repeat": repeat}
        for repeat in range(options.repeats)
        for threads in (options.threads if repeat % 2 == 0 else reversed(options.threads))
    ]


class ThreadedSteps(Steps):
    """Prompts and decode steps on one network, and reading, in a process that is kept to `threads` cores."""

    def __init__(
        self, model: str, quant: str, length: int, steps: int, threads: int, array_bytes: int = ARRAY_BYTES
    ) -> None:
        super().__init__(model, quant, "int8", [(length, 1)], steps)
        self.length, self.steps = length, steps
        self.bandwidth = ReadBandwidth(threads, array_bytes)
        self.tokens: list[int] = []
        self.prefill(length)  # compiles

    def step(self, held: Held, token: np.ndarray, tokens: int) -> np.ndarray:
        """A decode step whose token is noted."""
        sampled = super().step(held, token, tokens)
        self.tokens.append(int(sampled[0]))
        return sampled

    def measure(self) -> list[Sample]:
        """Milliseconds of a prompt and per token, with the bytes of weights that they read and the bandwidth just
        before; and the tokens decoded."""
        bandwidth = self.bandwidth.sample()
        prompt = self.prefill(self.length)["ms"]
        self.tokens.clear()
        decoded = self.decode(self.length, 1, self.steps)
        return [
            {"part": PREFILL, "ms": prompt, "bytes_read": self._prompt_bytes(), "bandwidth": bandwidth},
            {"part": DECODE, "ms": fmean(decoded["ms"]), "bytes_read": decoded["bytes_read"], "bandwidth": bandwidth}
            | {"tokens": list(self.tokens)},
        ]

    def _prompt_bytes(self) -> float:
        config = self.inference.config
        return sum(bytes_read(self.weights, config, chunk.tokens) for chunk in plan_chunks(self.length))


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A process for each number of threads, which keeps its weights and sleeps while the others have their turn."""
    with ExitStack() as stack:

        @cache
        def subject(threads: int) -> Subject:
            arguments = (options.model, options.quant, options.length, options.steps, threads)
            return stack.enter_context(Subject(threads, ThreadedSteps, *arguments))

        def measure(cell: Cell) -> list[Sample]:
            chosen = subject(cell["threads"])
            time.sleep(PAUSE)
            return chosen.call("measure")

        yield measure


def own(samples: Sequence[Sample], part: str, threads: int) -> list[Sample]:
    """The samples of one number of threads by their repeats."""
    return [sample for sample in by_repeat(samples, threads=threads) if sample["part"] == part]


def times(samples: Sequence[Sample], part: str, threads: int) -> list[float]:
    """Milliseconds of a prompt or per token, or, for `READING`, what reading 10^9 bytes takes, in each repeat."""
    if part == READING:
        return [1e3 / max(sample["bandwidth"].values()) for sample in own(samples, DECODE, threads)]
    return [sample["ms"] for sample in own(samples, part, threads)]


def gains(samples: Sequence[Sample], part: str, threads: int, fewer: int = 1) -> list[float]:
    """How many times as fast as with `fewer` threads, within each repeat; nothing where one of them was not timed."""
    few, many = (times(samples, part, count) for count in (fewer, threads))
    return ratios(few, many) if few and many else []


def over_floor(samples: Sequence[Sample], part: str, threads: int) -> list[float]:
    """Times over what reading the weights takes with as many threads."""
    found = own(samples, part, threads)
    return ratios([sample["ms"] for sample in found], floors(found))


def counts(samples: Sequence[Sample]) -> list[int]:
    """The numbers of threads that were measured."""
    return sorted({sample["cell"]["threads"] for sample in samples})


def answers(samples: Sequence[Sample]) -> set[tuple[int, ...]]:
    """The different sequences of tokens that were decoded."""
    return {tuple(sample["tokens"]) for sample in samples if sample["part"] == DECODE}


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per number of threads, with what is documented."""
    base = counts(samples)[0]
    lines = [
        f"{options.model} {options.quant}, random weights, int8 cache: a prompt of {options.length} tokens, and "
        f"{options.steps} tokens behind as many; median (lowest..highest) of {options.repeats} repeats. The gain is "
        f"over {base} thread{'s' * (base > 1)} within a repeat, the floor what reading the weights takes at the "
        "bandwidth of as many threads: for each token, and for each chunk of a prompt. Each process computes the "
        "prompt once before it is timed, which compiles it; the first two steps of a turn are not timed, and in the "
        "first turn they compile.",
        "",
        "| threads | bandwidth, GB/s | gain | prompt, s | gain | over the floor | ms per token | gain | over the floor "
        "| documented gain of prompts, 8B (30B-A3B) | documented gain of decoding |",
        "|" + "---|" * 11,
    ]
    for threads in counts(samples):
        bandwidth = [1e3 / ms for ms in times(samples, READING, threads)]
        cells = [str(threads), spread(bandwidth), spread(gains(samples, READING, threads, base), 2)]
        seconds = [ms / 1e3 for ms in times(samples, PREFILL, threads)]
        for part, values, digits in ((PREFILL, seconds, 2), (DECODE, times(samples, DECODE, threads), 1)):
            cells += [spread(values, digits), spread(gains(samples, part, threads, base), 2)]
            cells.append(spread(over_floor(samples, part, threads), 2))
        cells += [documented_gains(threads, base, place) for place in (0, 1)]
        lines.append(f"| {' | '.join(cells)} |")
    same = len(answers(samples)) == 1
    lines += ["", f"The tokens decoded are {'the same' if same else 'not the same'} with every number of threads."]
    return "\n".join(lines) + "\n"


def documented_gains(threads: int, fewer: int, place: int) -> str:
    """The documented gain of both models; of prompts for `place` 0, of decoding for 1."""
    found = [
        f"{model[fewer][place] / model[threads][place]:.2f}"
        for model in (EIGHT, THIRTY)
        if threads in model and fewer in model
    ]
    return f"{found[0]} ({found[1]})" if len(found) == 2 else " ".join(found)


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """The gain from threads, beside the documented one, and how far each time is from its floor."""
    figure, (gain, floor) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    plot_documented(gain)
    here = counts(samples)
    styles = {PREFILL: ("o", "-", COLOURS[0]), DECODE: ("D", "-", COLOURS[1]), READING: ("x", "-.", COLOURS[3])}
    labels = {PREFILL: "prompts, here", DECODE: "decoding, here", READING: "reading of memory, here"}
    for part, (marker, dash, colour) in styles.items():
        style = {"marker": marker, "ls": dash, "color": colour, "label": labels[part]}
        gain.plot(here, [median(gains(samples, part, threads, here[0])) for threads in here], **style)
        if part != READING:
            floor.plot(here, [median(over_floor(samples, part, threads)) for threads in here], **style)
    floor.axhline(1, color="grey", ls=":", lw=1, label="all time is reading")
    floor.plot([], [], " ", label="documented: no bandwidth by threads, so no such ratio")
    gain.set_yscale("log", base=2)
    gain.yaxis.set_major_formatter("{x:g}")
    gain.set_ylabel(f"times as fast as with {here[0]} thread{'s' * (here[0] > 1)}")
    floor.set(ylabel="time over what reading the weights takes", yscale="log")
    floor.yaxis.set_major_formatter("{x:g}")
    for axes, shown in ((gain, sorted({*EIGHT, *here} - {40, 48, 56})), (floor, here)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, labels=map(str, shown))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("threads")
        axes.legend(fontsize=8)
    floor.set_xlim(here[0] / 1.3, here[-1] * 1.3)
    figure.suptitle(f"{options.model} {options.quant}")
    return figure


def plot_documented(axes: Axes) -> None:
    """The documented gains of the 8B model, and the ideal."""
    axes.plot(list(EIGHT), list(EIGHT), ":", color="grey", lw=1, label="as many times as threads")
    for place, marker, dash, what in ((0, "s", "--", "prompts"), (1, "^", ":", "decoding")):
        gain = [EIGHT[1][place] / told[place] for told in EIGHT.values()]
        label = f"{what}, documented, 8B on 64 N1 cores"
        axes.plot(list(EIGHT), gain, marker + dash, color=COLOURS[place], mfc="none", ms=5, lw=1, label=label)


def _gain(part: str, threads: int, fewer: int) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: gains(samples, part, threads, fewer)


MEMORY = (
    "; the table has the gain of reading memory beside it, which decoding cannot exceed for long: where that is "
    "smaller than documented, this machine's memory is the reason, since one core alone reads more than half of what "
    "all can"
)


def _gain_figure(what: str, part: str, threads: int) -> Documented:
    place = (PREFILL, DECODE).index(part)
    one, many = EIGHT[1][place], EIGHT[threads][place]
    least = 0.9 * one / many
    return Documented(
        f"{what} with {threads} threads, times as fast as with one",
        f"{one:g} / {many:g} = {one / many:.2f}",
        one / many,
        "times",
        SOURCE,
        CONFIGURATION,
        _gain(part, threads, 1),
        lambda values: median(values) >= least,
        f"no less than documented, less a tenth{MEMORY if part == DECODE else ''}",
    )


def _different_answers(samples: Sequence[Sample]) -> list[float]:
    return [len(answers(samples))] if len(counts(samples)) > 1 else []


FIGURES = (
    _gain_figure("a prompt", PREFILL, 2),
    _gain_figure("decoding", DECODE, 2),
    _gain_figure("a prompt", PREFILL, 8),
    _gain_figure("decoding", DECODE, 8),
    _gain_figure("a prompt", PREFILL, 32),
    _gain_figure("decoding", DECODE, 32),
    _gain_figure("a prompt", PREFILL, 64),
    Documented(
        "decoding with 64 threads, times as fast as with 32",
        "36 / 54 = 0.67",
        36 / 54,
        "times",
        SOURCE,
        CONFIGURATION,
        _gain(DECODE, 64, 32),
        lambda values: median(values) < 1,
        "slower with all cores than with half of them",
    ),
    *(
        Documented(
            f"{what} with 8 threads on the board, times as fast as with 4",
            printed,
            value,
            "times",
            BOARD_SOURCE,
            BOARD,
            _gain(part, 8, 4),
            None,
            "a matter of the board's four fast and four slow cores",
        )
        for what, part, printed, value in (
            ("a prompt", PREFILL, "1.605 / 2.135 = 0.75", 1.605 / 2.135),
            ("decoding", DECODE, "185 / 468 = 0.40", 185 / 468),
        )
    ),
    Documented(
        "answers that the number of threads makes of one text",
        "1",
        1,
        "",
        SOURCE,
        "greedy, the same ids with every number of threads",
        _different_answers,
        lambda values: max(values) == 1,
        "the tokens decoded in every repeat with every number of threads are compared",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": "tiny-vl", "length": 64, "steps": 4, "repeats": 2})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
