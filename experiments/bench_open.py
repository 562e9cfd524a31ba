"""Opening: seconds from a converted checkpoint on disk to the first token of an answer, in a new process each time.

Claim: weights are used where the page cache holds them and steps come from the compile cache, so a process answers
within seconds, and needs little memory beyond weights and cache. Cost: about four minutes for the 2B shape.

    python -m experiments.bench_open --model qwen3-vl-2b --quant q4

A preset is first written as a converted checkpoint of random weights, in a folder that is removed afterwards. The first
process fills the compile cache and is not measured. Prints a table and writes results/bench_open/.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from experiments.bench import Sample, parse, parser, spread, write_results
from experiments.bench_steps import Memory, weight_bytes
from experiments.random_checkpoint import write_random_checkpoint
from experiments.turns import Subject
from models.cache import bytes_per_token
from models.compilation import cache_folder
from models.convert import convert
from models.model import find_folder

QUICK = {"answer": 4}


class Opening:
    """A process that opens a checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, length: int, tokens: int) -> dict[str, Any]:
        """Milliseconds to open the checkpoint, from there to the first token after `length` random ones, and for each
        of the `tokens` after it; and the memory beyond the decoder's weights and the cache."""
        start = time.perf_counter()
        model = models.load(self.folder)
        opened = time.perf_counter()
        prompt = np.random.default_rng(0).integers(0, 200, length).tolist()
        stream = model.generate(prompt, max_tokens=1 + tokens, ignore_eos=True)
        times = [time.perf_counter() for _ in stream]
        inference = model.inference
        cache_bytes = (length + tokens) * bytes_per_token(inference.config.text, inference.cache_type)
        weights = weight_bytes(inference)
        decoder = sum(size for path, size in weights.items() if not path.startswith("visual."))
        known = decoder + cache_bytes
        return {
            "open_ms": 1e3 * (opened - start),
            "first_token_ms": 1e3 * (times[0] - opened),
            "token_ms": [1e3 * (after - before) for before, after in pairwise(times)],
        } | Memory(known).beyond()


@contextmanager
def converted(model: str, quant: str) -> Iterator[Path]:
    """A folder with the converted checkpoint of a model, random weights for a preset, as long as it is needed."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="bench_open_") as name:
        source, folder = find_folder(model), Path(name) / quant
        if source is None:
            write_random_checkpoint(model, quant, folder)
        else:
            convert(source, folder, quant)
        yield folder


def measure(options: argparse.Namespace) -> Iterator[Sample]:
    """One sample of every process but the first of a format."""
    for quant in options.quant:
        with converted(options.model, quant) as folder:
            for repeat in tqdm(range(-1, options.repeats), unit="process"):
                start = time.perf_counter()
                with Subject(options.threads, Opening, folder) as subject:
                    found = subject.call("answer", options.tokens, options.answer)
                    whole = {"process_ms": 1e3 * (time.perf_counter() - start)}
                if repeat >= 0:
                    yield {"quant": quant, "repeat": repeat} | found | whole


def to_first_token(samples: Sequence[Sample]) -> list[float]:
    """Milliseconds from opening the checkpoint to the first token."""
    return [sample["open_ms"] + sample["first_token_ms"] for sample in samples]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """One row for each format, with what the columns mean."""
    lines = [
        f"Shape of {options.model}, {options.threads} threads, a prompt of {options.tokens} tokens; median of "
        f"{options.repeats} processes (lowest..highest). `open` is `models.load` of a converted checkpoint that the "
        "page cache holds, `first token` what follows until there is one, `process` all of it with Python's start, "
        f"imports and {options.answer} more tokens. Memory is the process's beyond weights and cache at its end.",
        "",
        "| weights | open, ms | first token, ms | together, ms | process, ms | memory, MB |",
        "|" + "---|" * 6,
    ]
    for quant in options.quant:
        chosen = [sample for sample in samples if sample["quant"] == quant]
        columns = [[sample[name] for sample in chosen] for name in ("open_ms", "first_token_ms")]
        columns += [to_first_token(chosen), [sample["process_ms"] for sample in chosen]]
        memory = median(sample["resident"] for sample in chosen) / 1e6
        lines.append(f"| {quant} | {' | '.join(spread(column, 0) for column in columns)} | {memory:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Measures as the command line says, prints the table and writes the results."""
    made = parser("bench_open", __doc__.split("\n")[0])
    made.add_argument("--tokens", type=int, default=16, help="length of the prompt")
    made.add_argument("--answer", type=int, default=24, help="tokens of the answer after the first")
    options = parse(made, arguments, QUICK)
    write_results("bench_open", options, arguments, measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
