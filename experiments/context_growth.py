"""Time per token, and time for a prompt, as the context grows from 256 to 8192 tokens.

Claims: the time per token grows by less than it did in the original, whose decoding left out most of a long context;
prompts are taken in the more slowly the longer they are, at 8K tokens at little more than half the rate of 1K, because
every chunk attends to all that is before it. Documented, 2B q4: 73.4 ms per token at 1028 tokens, 131.9 to 136.7 at
8109; prompts at 53 and at 40 tokens/s, and no slower at 8K than at 4K; 1.5 times as fast as llama.cpp at 2K. Cost: five
minutes on 2 cores, 4 GiB of memory.

    python -m experiments.context_growth

Random weights at real shape, int8 cache. What a shorter prompt takes is read off a longer one, whose first chunks are
the same. The comparison with llama.cpp is read from results/speed. Writes results/context_growth/. `--model DIR` takes
the shape of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.bench import OURS, ROOT, THEIRS, ratios, select, spread
from experiments.bench_steps import Steps
from experiments.environment import measured_here
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, by_repeat, of
from experiments.sources import BASELINE as SOURCE
from models.inference import CHUNKS
from models.quantisation import SCHEMES

DECODE, PROMPT, BESIDE = "decode", "prompt", "llama.cpp"
LONG = 2048  # tokens; the longest prompt is computed once, and once more up to here
SHAPE = "qwen3-vl-2b"
SPEED = ROOT / "results" / "speed" / "decode-2b" / "raw.jsonl"  # of experiments.speed
BOARD = "RK3588, 2B q4, sparse attention over 1024 positions, 64 tokens generated"


@dataclass(frozen=True)
class Tier:
    """A documented tier: its name, the tokens of its prompt, milliseconds per token as printed and their median, tokens
    of the prompt per second, and seconds to the first token as printed and their median."""

    name: str
    tokens: int
    printed_ms: str
    ms: float
    rate: float
    printed_first: str
    first: float


TIERS = {
    1024: Tier("1K", 1028, "73.4 ms", 73.4, 53.0, "19.07-19.63 s", 19.35),
    2048: Tier("2K", 2049, "84.6-85.0 ms", 84.8, 45.4, "44.64-45.16 s", 45.06),
    4096: Tier("4K", 4091, "100.7-103.0 ms", 101.8, 40.4, "100.3-102.3 s", 101.3),
    8192: Tier("8K", 8109, "131.9-136.7 ms", 134.3, 40.0, "202.0-203.0 s", 202.6),
}
LLAMA = ((1032, 102.3), (2056, 126.4), (4104, 217.6), (8136, 410.5))  # prompt tokens, ms per token


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is timed, and at which lengths."""
    parser.add_argument("--model", default=SHAPE, help="a preset, or a model or folder for its shape")
    parser.add_argument("--quant", choices=SCHEMES, default="q4")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192], help="tokens in the cache"
    )
    parser.add_argument(
        "--prompt", type=whole_chunks, nargs="+", default=[256, 1024, 2048, 4096, 8192], help="tokens of prompts"
    )
    parser.add_argument("--steps", type=int, default=24, help="timed, per repeat and context")
    parser.add_argument("--repeats", type=int, default=5, help="of the steps; prompts are computed less often")


def whole_chunks(text: str) -> int:
    """A prompt's length, which must be a multiple of the largest chunk."""
    length = int(text)
    if length < 1 or length % CHUNKS[-1]:
        raise argparse.ArgumentTypeError(f"should be a multiple of {CHUNKS[-1]}, found {text}")
    return length


def cells(options: argparse.Namespace) -> list[Cell]:
    """Contexts in turn, then prompts; and what `experiments.speed` has measured of the 2B shape on this machine."""
    decoded = [
        {"part": DECODE, "tokens": context, "repeat": repeat}
        for repeat in range(options.repeats)
        for context in (options.context if repeat % 2 == 0 else reversed(options.context))
    ]
    again = [length for length in options.prompt if length <= LONG and options.repeats > 1]
    computed = [max(options.prompt), *([max(again)] if again else [])]
    taken_in = [{"part": PROMPT, "tokens": length, "repeat": repeat} for repeat, length in enumerate(computed)]
    beside = [{"part": BESIDE, "file": str(SPEED.relative_to(ROOT))}]
    asked = options.model == SHAPE and options.quant == "q4"
    there = asked and measured_here(SPEED.parent) and beside_llama(SPEED)
    return decoded + taken_in + (beside if there else [])


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One network; the chunks of prompts have been compiled before they are timed."""

    @cache
    def opened() -> Steps:
        contexts = [(context, 1) for context in options.context]
        steps = Steps(options.model, options.quant, "int8", contexts, options.steps)
        for cell in cells(options):
            if cell["part"] == PROMPT:
                steps.inference.compile(cell["tokens"] + 1, 0)
        return steps

    def measure(cell: Cell) -> list[Sample]:
        if cell["part"] == BESIDE:
            return beside_llama(ROOT / cell["file"])
        if cell["part"] == PROMPT:
            return [opened().prefill(cell["tokens"])]
        return [{"ms": fmean(opened().decode(cell["tokens"], 1, options.steps)["ms"])}]

    yield measure


def beside_llama(file: Path) -> list[Sample]:
    """How many times as fast as llama.cpp decode steps of one sequence were in the raw samples of
    `experiments.bench_decode`, in each repeat, by the tokens in the cache; nothing if it was not measured."""
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = []
    for context in sorted({sample["context"] for sample in told}):
        ours, theirs = (
            [fmean(sample["ms"]) for sample in select(told, program=name, quant="q4", batch=1, context=context)]
            for name in (OURS, THEIRS)
        )
        if theirs:
            found += [{"context": context, "times_as_fast": ratio} for ratio in ratios(theirs, ours)]
    return found


def step_ms(samples: Sequence[Sample], tokens: int) -> list[float]:
    """Milliseconds per token in each repeat."""
    return [sample["ms"] for sample in by_repeat(samples, part=DECODE, tokens=tokens)]


def prompt_ms(samples: Sequence[Sample], tokens: int) -> list[float]:
    """Milliseconds for the first so many tokens of each prompt that has them, the longest prompt first."""
    return [ms for sample in by_repeat(samples, part=PROMPT) for end, ms in sample["chunks"] if end == tokens]


def seconds(samples: Sequence[Sample], tokens: int) -> list[float]:
    """The same in seconds."""
    return [ms / 1e3 for ms in prompt_ms(samples, tokens)]


def rates(samples: Sequence[Sample], tokens: int) -> list[float]:
    """Tokens of a prompt per second."""
    return [1e3 * tokens / ms for ms in prompt_ms(samples, tokens)]


def times_as_fast(samples: Sequence[Sample], context: int) -> list[float]:
    """Against llama.cpp, in each repeat."""
    return [sample["times_as_fast"] for sample in of(samples, part=BESIDE) if sample["context"] == context]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per context, and per prompt."""
    shortest = min(options.context)
    lines = [
        f"{options.model} {options.quant}, random weights, int8 cache, one sequence; median (lowest..highest) of "
        f"{options.repeats} repeats of {options.steps} steps. Ratios and differences to {shortest} tokens are taken "
        "within a repeat. All chunks are compiled before the first prompt is timed; the first two steps of a turn are "
        "not timed, and in the first turn they compile.",
        "",
        f"| tokens in the cache | ms per token | over {shortest} | ms more per 1000 tokens |",
        "|---|---|---|---|",
    ]
    for context in sorted(options.context):
        ms = step_ms(samples, context)
        pairs = list(zip(ms, step_ms(samples, shortest), strict=True))
        over = [one / base for one, base in pairs]
        more = [1e3 * (one - base) / (context - shortest) for one, base in pairs if context != shortest]
        lines.append(f"| {context} | {spread(ms)} | {spread(over, 2)} | {spread(more, 2) if more else ''} |")
    lines += ["", "| tokens of the prompt | n | seconds | tokens/s |", "|---|---|---|---|"]
    for length in sorted(options.prompt):
        taken = seconds(samples, length)
        lines.append(f"| {length} | {len(taken)} | {spread(taken, 2)} | {spread(rates(samples, length))} |")
    if told := of(samples, part=BESIDE):
        lines += ["", f"Beside llama.cpp, from {told[0]['cell']['file']}:", ""]
        lines += ["| tokens in the cache | times as fast |", "|---|---|"]
        contexts = sorted({sample["context"] for sample in told})
        lines += [f"| {context} | {spread(times_as_fast(samples, context), 2)} |" for context in contexts]
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Time per token and rate of prompts by length, with the documented ones."""
    figure, (decode, prompt) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lengths = [tier.tokens for tier in TIERS.values()]
    decode.plot(lengths, [tier.ms for tier in TIERS.values()], "s--", color=COLOURS[1], label="documented, RK3588")
    decode.plot(*zip(*LLAMA, strict=True), "^:", color=COLOURS[2], label="documented, llama.cpp on the RK3588")
    contexts = sorted(options.context)
    here = {"color": COLOURS[0], "label": "here"}
    decode.plot(contexts, [median(step_ms(samples, context)) for context in contexts], "o-", **here)
    prompt.plot(lengths, [tier.rate for tier in TIERS.values()], "s--", color=COLOURS[1], label="documented, RK3588")
    prompts = sorted(options.prompt)
    prompt.plot(prompts, [median(rates(samples, length)) for length in prompts], "o-", **here)
    decode.set(xlabel="tokens in the cache", ylabel="ms per token", ylim=(0, None))
    prompt.set(xlabel="tokens of the prompt", ylabel="tokens/s taken in", ylim=(0, None))
    decode.legend(fontsize=7)
    prompt.legend(fontsize=7)
    figure.suptitle(f"{options.model} {options.quant}")
    return figure


Values = Callable[[Sequence[Sample], int], list[float]]


def _at(values: Values, tokens: int) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: values(samples, tokens)


def _over(values: Values, tokens: int, other: int) -> Callable[[Sequence[Sample]], list[float]]:
    """The ratio in each repeat that has both: a prompt of each length is the beginning of the same one."""
    return lambda samples: [
        one / base for one, base in zip(values(samples, tokens), values(samples, other), strict=False)
    ]


FIGURES = (
    *(
        Documented(
            f"time per token at {tier.name}",
            tier.printed_ms,
            tier.ms,
            "ms",
            SOURCE,
            f"{BOARD}, {tier.tokens} tokens",
            _at(step_ms, tokens),
            absolute="at most",
        )
        for tokens, tier in TIERS.items()
    ),
    Documented(
        "time per token at 8K over 1K",
        "134.3 / 73.4 = 1.83",
        1.83,
        "times",
        SOURCE,
        BOARD,
        _over(step_ms, 8192, 1024),
        lambda values: median(values) <= 1.83,
        "no steeper than documented, though here all positions are attended to; llama.cpp's is documented as 4.0",
    ),
    Documented(
        "times as fast as llama.cpp per token at 2K",
        "126.4 / 84.8 = 1.5",
        1.5,
        "times",
        SOURCE,
        f"{BOARD}; llama.cpp Q4_0 on the same board, 2056 tokens",
        lambda samples: times_as_fast(samples, 2048),
        lambda values: median(values) >= 0.9 * 1.5,
        "at least nine tenths of the documented ratio; read from results/speed, where `python -m experiments.speed` "
        "has measured both in turns",
    ),
    *(
        Documented(
            f"prompt of {tier.name}",
            f"about {tier.rate:g} tokens/s",
            tier.rate,
            "tokens/s",
            SOURCE,
            f"{BOARD}, {tier.tokens} tokens",
            _at(rates, tokens),
            absolute="at least",
        )
        for tokens, tier in TIERS.items()
    ),
    *(
        Documented(
            f"first token after a prompt of {tier.name}",
            tier.printed_first,
            tier.first,
            "s",
            SOURCE,
            f"{BOARD}, {tier.tokens} tokens, served",
            _at(seconds, tokens),
            absolute="at most",
        )
        for tokens, tier in TIERS.items()
    ),
    Documented(
        "rate of a prompt of 8K over one of 1K",
        "40 / 53 = 0.75",
        0.75,
        "times",
        SOURCE,
        BOARD,
        _over(rates, 8192, 1024),
        lambda values: median(values) >= 0.9 * 0.75,
        "falls no further than documented, less a tenth. Where it falls further, attention is the reason: here every "
        "chunk attends to all before it and takes longer than the last one (`chunks` in the raw data), while there the "
        "rate stays the same from 4K to 8K, as it would not if all were attended to",
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__], {"model": "tiny-vl", "context": [64, 256], "prompt": [256, 512], "steps": 4, "repeats": 2}
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
