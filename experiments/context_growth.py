"""Time per token, and time for a prompt, as the context grows from 256 to 8192 tokens.

Claims: the time per token grows by less than it did in the original, whose decoding left out most of a long context;
prompts are taken in at nearly the same rate however long they are. Documented, 2B q4: 73.4 ms per token at 1028 tokens,
131.9 to 136.7 at 8109; prompts at 53 and at 40 tokens/s. Cost: five minutes on 2 cores, 5 GiB of memory.

    python -m experiments.context_growth

Random weights at real shape, int8 cache. Writes results/context_growth/. `--model DIR` takes the shape of a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import fmean, median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.bench_steps import DecodeSteps, Prefill
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from models.quantisation import SCHEMES

DECODE, PROMPT = "decode", "prompt"
LONG = 1024  # tokens; prompts longer than this are computed once
SHORT_REPEATS = 2
SOURCE = "docs of the original, baseline report of 2026-09-05"
BOARD = "RK3588, 2B q4, sparse attention over 1024 positions, 64 tokens generated"
# Prompt tokens, ms per token, tokens/s of the prompt
PUBLISHED = ((1028, 73.4, 53.0), (2049, 84.8, 45.4), (4091, 101.8, 40.4), (8109, 134.3, 40.0))
LLAMA = ((1032, 102.3), (2056, 126.4), (4104, 217.6), (8136, 410.5))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is timed, and at which lengths."""
    parser.add_argument("--model", default="qwen3-vl-2b", help="a preset, or a model or folder for its shape")
    parser.add_argument("--quant", choices=SCHEMES, default="q4")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192], help="tokens in the cache"
    )
    parser.add_argument("--prompt", type=int, nargs="+", default=[256, 1024, 4096, 8192], help="tokens of prompts")
    parser.add_argument("--steps", type=int, default=24, help="timed, per repeat and context")
    parser.add_argument("--repeats", type=int, default=5, help="of the steps; prompts are computed less often")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Contexts in turn, then prompts."""
    decoded = [
        {"part": DECODE, "tokens": context, "repeat": repeat}
        for repeat in range(options.repeats)
        for context in (options.context if repeat % 2 == 0 else reversed(options.context))
    ]
    taken_in = [
        {"part": PROMPT, "tokens": length, "repeat": repeat}
        for repeat in range(min(options.repeats, SHORT_REPEATS))
        for length in options.prompt
        if repeat == 0 or length <= LONG
    ]
    return decoded + taken_in


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One network for decode steps and one for prompts, whose chunks have been compiled before they are timed."""

    @cache
    def decoder() -> DecodeSteps:
        contexts = [(context, 1) for context in options.context]
        return DecodeSteps(options.model, options.quant, "int8", contexts, options.steps)

    @cache
    def prefill() -> Prefill:
        opened = Prefill(options.model, options.quant, "int8")
        for length in options.prompt:
            opened.inference.compile(length + 1, 0)
        return opened

    def measure(cell: Cell) -> list[Sample]:
        if cell["part"] == PROMPT:
            return [prefill().prefill(cell["tokens"])]
        return [{"ms": fmean(decoder().decode(cell["tokens"], 1, options.steps)["ms"])}]

    yield measure


def times(samples: Sequence[Sample], part: str, tokens: int) -> list[float]:
    """Milliseconds per token in each repeat, or for a whole prompt."""
    return [sample["ms"] for sample in of(samples, part=part, tokens=tokens)]


def rates(samples: Sequence[Sample], tokens: int) -> list[float]:
    """Tokens of a prompt per second."""
    return [1e3 * tokens / ms for ms in times(samples, PROMPT, tokens)]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per context, and per prompt."""
    shortest = min(options.context)
    base = median(times(samples, DECODE, shortest))
    lines = [
        f"{options.model} {options.quant}, random weights, int8 cache, one sequence; median (lowest..highest) of "
        f"{options.repeats} repeats of {options.steps} steps.",
        "",
        f"| tokens in the cache | ms per token | over {shortest} | ms more per 1000 tokens |",
        "|---|---|---|---|",
    ]
    for context in sorted(options.context):
        ms = times(samples, DECODE, context)
        more = "" if context == shortest else f"{1e3 * (median(ms) - base) / (context - shortest):.2f}"
        lines.append(f"| {context} | {spread(ms)} | {median(ms) / base:.2f} | {more} |")
    lines += ["", "| tokens of the prompt | n | seconds | tokens/s |", "|---|---|---|---|"]
    for length in sorted(options.prompt):
        seconds = [ms / 1e3 for ms in times(samples, PROMPT, length)]
        lines.append(f"| {length} | {len(seconds)} | {spread(seconds, 2)} | {spread(rates(samples, length))} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Time per token and rate of prompts by length, with the documented ones."""
    figure, (decode, prompt) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lengths = [length for length, _, _ in PUBLISHED]
    decode.plot(lengths, [ms for _, ms, _ in PUBLISHED], "s--", color=COLOURS[1], label="documented, RK3588")
    decode.plot(*zip(*LLAMA, strict=True), "^:", color=COLOURS[2], label="documented, llama.cpp on the RK3588")
    contexts = sorted(options.context)
    here = {"color": COLOURS[0], "label": "here"}
    decode.plot(contexts, [median(times(samples, DECODE, context)) for context in contexts], "o-", **here)
    prompt.plot(lengths, [rate for _, _, rate in PUBLISHED], "s--", color=COLOURS[1], label="documented, RK3588")
    prompts = sorted(options.prompt)
    prompt.plot(prompts, [median(rates(samples, length)) for length in prompts], "o-", **here)
    decode.set(xlabel="tokens in the cache", ylabel="ms per token", ylim=(0, None))
    prompt.set(xlabel="tokens of the prompt", ylabel="tokens/s taken in", ylim=(0, None))
    decode.legend(fontsize=7)
    prompt.legend(fontsize=7)
    figure.suptitle(f"{options.model} {options.quant}")
    return figure


Values = Callable[[Sequence[Sample], int], list[float]]


def _decode_ms(samples: Sequence[Sample], tokens: int) -> list[float]:
    return times(samples, DECODE, tokens)


def _at(values: Values, tokens: int) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: values(samples, tokens)


def _over(values: Values, tokens: int, other: int) -> Callable[[Sequence[Sample]], list[float]]:
    """The ratio of two medians, where both were measured."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        both = values(samples, tokens), values(samples, other)
        return [median(both[0]) / median(both[1])] if all(both) else []

    return measured


FIGURES = (
    Documented("time per token at 1K", "73.4 ms", 73.4, "ms", SOURCE, BOARD, _at(_decode_ms, 1024)),
    Documented("time per token at 8K", "131.9-136.7 ms", 134.3, "ms", SOURCE, BOARD, _at(_decode_ms, 8192)),
    Documented(
        "time per token at 8K over 1K",
        "134.3 / 73.4 = 1.83",
        1.83,
        "times",
        SOURCE,
        BOARD,
        _over(_decode_ms, 8192, 1024),
        lambda values: values[0] <= 1.83,
        "no steeper than documented, though here all positions are attended to; llama.cpp's is documented as 4.0",
    ),
    Documented("prompt of 1K", "about 53 tokens/s", 53.0, "tokens/s", SOURCE, BOARD, _at(rates, 1024)),
    Documented("prompt of 8K", "about 40 tokens/s", 40.0, "tokens/s", SOURCE, BOARD, _at(rates, 8192)),
    Documented(
        "rate of a prompt of 8K over one of 1K",
        "40 / 53 = 0.75",
        0.75,
        "times",
        SOURCE,
        BOARD,
        _over(rates, 8192, 1024),
        lambda values: values[0] >= 0.9 * 0.75,
        "falls no further than documented, less a tenth",
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__], {"model": "tiny-vl", "context": [64, 256], "prompt": [64, 256], "steps": 4, "repeats": 2}
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
