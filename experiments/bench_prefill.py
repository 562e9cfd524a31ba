"""Prefill: tokens per second from a prompt to the first token of its answer, against llama.cpp.

Claim: prompts are taken in at least as fast as llama.cpp does it. Cost: about ten minutes for the 2B shape in q4 with
llama.cpp, on 2 cores.

    python -m experiments.bench_prefill --vs llama.cpp

Prints a table and writes results/bench_prefill/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

from experiments.bench import (
    OURS,
    THEIRS,
    Program,
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
from experiments.bench_steps import Prefill, config_of
from experiments.llama_cpp import LlamaCpp, LlamaModel
from models.inference import plan_chunks

QUICK = {"tokens": [24, 80]}
LLAMA_MARGIN = 8  # tokens of room beyond the prompt


def measure(options: argparse.Namespace) -> Iterator[Sample]:
    """All samples: one for every prompt taken in by every program."""
    for quant in options.quant:
        with llama_model_file() as file:
            programs = {OURS: Program(Prefill, (options.model, quant, options.kv))}
            if options.vs == THEIRS:
                model = LlamaModel(config_of(options.model), quant, file)
                sizes = (options.threads, (), 1, max(options.tokens) + LLAMA_MARGIN)
                programs[THEIRS] = Program(LlamaCpp, (model, options.vs_kv, *sizes))
            turns = [{"tokens": length} for length in options.tokens]
            for sample in take_turns(programs, turns, "prefill", options):
                yield {"quant": quant} | sample


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """One row for each format and prompt length, with what the columns mean."""
    lines = [
        f"{note(options)}`chunks` are the steps of the generate loop; those that a prompt does not fill are padded.",
        "",
        "| weights | tokens | chunks | ms | tokens/s | llama.cpp, ms | llama.cpp, tokens/s | tokens/s / llama.cpp's |",
        "|" + "---|" * 8,
    ]
    for quant, length in product(options.quant, options.tokens):
        chosen = select(samples, quant=quant, tokens=length)
        ours, theirs = ([sample["ms"] for sample in select(chosen, program=name)] for name in (OURS, THEIRS))
        chunks = " + ".join(str(chunk.bucket) for chunk in plan_chunks(length))
        cells = [quant, str(length), chunks, spread(ours, 0), f"{1e3 * length / median(ours):.1f}"]
        if theirs:
            cells += [spread(theirs, 0), f"{1e3 * length / median(theirs):.1f}", spread(ratios(theirs, ours), 2)]
        lines.append(f"| {' | '.join(cells + [''] * (8 - len(cells)))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Measures as the command line says, prints the table and writes the results."""
    made = parser("bench_prefill", __doc__.split("\n")[0])
    made.add_argument("--tokens", type=int, nargs="+", default=[24, 123, 258, 512], help="lengths of the prompts")
    options = parse(made, arguments, QUICK)
    write_results("bench_prefill", options, arguments, measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
