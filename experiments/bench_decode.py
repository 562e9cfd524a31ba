"""Decode: milliseconds per step against the floor that memory sets, and against llama.cpp.

Claim: a decode step reads every weight once, so reading them is what it costs at least; with q4 weights a step comes
close to it, a longer context adds little, and a batch shares the reading. Cost: about ten minutes for each format of
the 2B shape with llama.cpp, on 2 cores.

    python -m experiments.bench_decode --quant q4 q8 --context 256 2048 --batch 1 8 --vs llama.cpp

Prints tables and writes results/bench_decode/. `--profile` instead traces single operations into profile.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean, median

from experiments import step_profile
from experiments.bench import (
    OURS,
    THEIRS,
    Program,
    Results,
    Sample,
    llama_model_file,
    note,
    parse,
    parser,
    ratios,
    select,
    spread,
    take_turns,
    write_results,
)
from experiments.bench_steps import DecodeSteps, config_of
from experiments.llama_cpp import LlamaCpp, LlamaModel
from experiments.turns import Subject

QUICK = {"context": [16, 64], "batch": [1, 2], "steps": 3}
LLAMA_MARGIN = 8  # tokens of room beyond context and steps


def measure(options: argparse.Namespace) -> Iterator[Sample]:
    """All samples: one for every turn of every program."""
    cells = list(product(options.context, options.batch))
    for quant in options.quant:
        with llama_model_file() as file:
            programs = {OURS: Program(DecodeSteps, (options.model, quant, options.kv, cells, options.steps))}
            if options.vs == THEIRS:
                model = LlamaModel(config_of(options.model), quant, file)
                room = max(options.context) + options.steps + LLAMA_MARGIN
                sizes = (options.threads, options.context, max(options.batch), room)
                programs[THEIRS] = Program(LlamaCpp, (model, options.vs_kv, *sizes))
            turns = [{"context": context, "batch": batch, "steps": options.steps} for context, batch in cells]
            for sample in take_turns(programs, turns, "decode", options):
                yield {"quant": quant} | sample


def step_ms(samples: Sequence[Sample]) -> list[float]:
    """The mean step of each turn."""
    return [fmean(sample["ms"]) for sample in samples]


def floors(samples: Sequence[Sample]) -> list[float]:
    """Milliseconds that reading a step's weights takes at the bandwidth measured just before each turn."""
    return [sample["bytes_read"] / max(sample["bandwidth"].values()) / 1e6 for sample in samples]


def steps_table(samples: Sequence[Sample], cells: Sequence[tuple[str, int, int]]) -> str:
    """One row for each format, context and batch."""
    lines = [
        "| weights | context | batch | ms per step | tokens/s | weights read, GB | GB/s | bandwidth, GB/s | floor, ms "
        "| step / floor | llama.cpp, ms | step / llama.cpp's | memory beyond weights and cache, MB (peak) |",
        "|" + "---|" * 13,
    ]
    for quant, context, batch in cells:
        chosen = select(samples, quant=quant, context=context, batch=batch)
        ours, theirs = select(chosen, program=OURS), step_ms(select(chosen, program=THEIRS))
        ms, read = step_ms(ours), ours[0]["bytes_read"]
        against = f"{spread(theirs)} | {spread(ratios(ms, theirs), 2)}" if theirs else " | "
        lines.append(
            f"| {quant} | {context} | {batch} | {spread(ms)} | {1e3 * batch / median(ms):.1f} | {read / 1e9:.2f} "
            f"| {read / median(ms) / 1e6:.1f} | {spread([max(sample['bandwidth'].values()) for sample in ours])} "
            f"| {median(floors(ours)):.1f} | {spread(ratios(ms, floors(ours)), 2)} | {against} "
            f"| {median(sample['resident'] for sample in ours) / 1e6:.0f} "
            f"({max(sample['peak'] for sample in ours) / 1e6:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def contexts_table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """What the longer contexts cost over the shortest."""
    shortest = min(options.context)
    lines = [
        f"| weights | batch | context | ms more than at {shortest} | per 1000 tokens | llama.cpp, ms more |",
        "|---|---|---|---|---|---|",
    ]
    for quant, batch, context in product(options.quant, options.batch, sorted(options.context)):
        if context == shortest:
            continue
        extra = {}
        for program in (OURS, THEIRS):
            chosen = select(samples, quant=quant, batch=batch, program=program)
            long, short = (step_ms(select(chosen, context=length)) for length in (context, shortest))
            extra[program] = [more - less for more, less in zip(long, short, strict=True)]
        lines.append(
            f"| {quant} | {batch} | {context} | {spread(extra[OURS])} "
            f"| {1e3 * median(extra[OURS]) / (context - shortest):.1f} "
            f"| {spread(extra[THEIRS]) if extra[THEIRS] else ''} |"
        )
    return "\n".join(lines) + "\n"


def batches_table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """Tokens per second of the larger batches over those of the smallest."""
    smallest = min(options.batch)
    over = f"over batch {smallest}"
    lines = [
        f"| weights | context | batch | tokens/s | {over} | llama.cpp, tokens/s | {over} |",
        "|---|---|---|---|---|---|---|",
    ]
    for quant, context, batch in product(options.quant, options.context, sorted(options.batch)):
        if batch == smallest:
            continue
        cells = []
        for program in (OURS, THEIRS):
            chosen = select(samples, quant=quant, context=context, program=program)
            many, few = (step_ms(select(chosen, batch=size)) for size in (batch, smallest))
            gains = [batch / smallest * ratio for ratio in ratios(few, many)]
            cells += [f"{1e3 * batch / median(many):.1f}", spread(gains, 2)] if many else ["", ""]
        lines.append(f"| {quant} | {context} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """Everything in Markdown, with what the columns mean."""
    parts = [
        f"{note(options)}A turn is {options.steps} greedy steps, each with its tokens fetched, behind `context` tokens "
        "in the cache; `weights read` is what a step reads of them, the floor is that over the read bandwidth measured "
        "before each turn. Memory is the process's with Python, JAX and the steps compiled so far.",
        steps_table(samples, list(product(options.quant, options.context, options.batch))),
    ]
    if len(options.context) > 1:
        parts.append(contexts_table(samples, options))
    if len(options.batch) > 1:
        parts.append(batches_table(samples, options))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def profile(options: argparse.Namespace, results: Results) -> None:
    """Traces a step of every format, context and batch, and writes what its time is made of."""
    text = [
        f"Shape of {options.model}, random weights, {options.kv} cache, {options.threads} threads. Wall time of one "
        "decode step by the operations that XLA's trace shows; `between operations` is XLA's own, `host` what lies "
        "outside of it: Python, dispatch and fetching the token."
    ]
    cells = list(product(options.context, options.batch))
    for quant in options.quant:
        arguments = (options.model, quant, options.kv, cells, options.steps)
        with Subject(options.threads, step_profile.ProfiledSteps, *arguments) as subject:
            for context, batch in cells:
                found = subject.call("profile", context, batch, options.steps)
                results.add({"quant": quant, "context": context, "batch": batch} | found)
                text += [
                    f"## {quant}, context {context}, batch {batch}",
                    f"{median(found['plain_ms']):.1f} ms per step, {median(found['traced_ms']):.1f} while traced.",
                    step_profile.table(found["rows"]),
                ]
    results.write("profile.md", "\n\n".join(part.strip() for part in text) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Measures as the command line says, prints the tables and writes the results."""
    made = parser("bench_decode", __doc__.split("\n")[0])
    made.add_argument("--context", type=int, nargs="+", default=[256, 2048], help="tokens that the cache holds")
    made.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences decoded together")
    made.add_argument("--steps", type=int, default=24, help="steps in a turn")
    made.add_argument("--profile", action="store_true", help="trace single operations instead")
    options = parse(made, arguments, QUICK)
    if options.profile:
        profile(options, Results("bench_decode", options, arguments, raw="profile.jsonl"))
        return
    write_results("bench_decode", options, arguments, measure, tables)


if __name__ == "__main__":
    main(sys.argv[1:])
