"""Speed: every figure that decode, prefill and opening are to reach, measured in one go and compared.

Claim: decode runs near the limit that memory sets, and no slower than llama.cpp. Cost: about 25 minutes on 2 cores,
20 GiB of memory and 8 GB of disk.

    python -m experiments.speed

Runs bench_decode, bench_prefill and bench_open, each into a folder of results/speed/, and writes results/speed/table.md
from their raw samples. A part whose table is there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments import bench_decode, bench_open, bench_prefill
from experiments.bench import OURS, ROOT, THEIRS, Sample, ratios, select, spread
from experiments.bench_decode import floors, step_ms
from experiments.environment import write_environment

Samples = dict[str, list[Sample]]
VS = ("--vs", THEIRS)
PARTS: dict[str, tuple[Callable[[Sequence[str]], None], tuple[str, ...]]] = {
    "decode-2b": (bench_decode.main, ("--quant", "q4", "q8", "--context", "256", "2048", *VS)),
    # Both contexts by themselves and often: a difference of milliseconds drowns in what other turns bring between.
    "context-2b": (bench_decode.main, ("--context", "256", "2048", "--repeats", "21")),
    "batch-2b": (bench_decode.main, ("--context", "256", "--batch", "1", "8")),
    "decode-8b": (bench_decode.main, ("--model", "qwen3-vl-8b", "--context", "256", "--repeats", "5", *VS)),
    "decode-30b-a3b": (bench_decode.main, ("--model", "qwen3-30b-a3b", "--context", "256", "--repeats", "5")),
    "prefill-2b": (bench_prefill.main, ("--tokens", "24", "512", "--repeats", "5", *VS)),
    "open-2b": (bench_open.main, ("--quant", "q4")),
}


@dataclass(frozen=True)
class Goal:
    """A figure to reach: `limit` must hold, `aim` is hoped for. `values` gives one value for every repeat."""

    what: str
    limit: float
    aim: float
    values: Callable[[Samples], list[float]]
    more_is_better: bool = False

    def row(self, samples: Samples) -> str:
        """The figure as a row of the table."""
        values = self.values(samples)
        found = median(values)
        sign, better = (">=", float.__ge__) if self.more_is_better else ("<=", float.__le__)
        verdict = "aim" if better(found, self.aim) else "yes" if better(found, self.limit) else "no"
        return f"| {self.what} | {sign} {self.limit:g} | {self.aim:g} | {spread(values, 2)} | {verdict} |"


def decode_cell(
    samples: Samples, part: str, quant: str, program: str, context: int = 256, batch: int = 1
) -> list[Sample]:
    """The samples of one program, format, context and batch."""
    return select(samples[part], quant=quant, context=context, batch=batch, program=program)


def over_floor(part: str, quant: str) -> Callable[[Samples], list[float]]:
    """The time of a step over what reading its weights takes."""

    def values(samples: Samples) -> list[float]:
        ours = decode_cell(samples, part, quant, OURS)
        return ratios(step_ms(ours), floors(ours))

    return values


def over_llama(part: str, quant: str) -> Callable[[Samples], list[float]]:
    """The time of a step over llama.cpp's in the same repeat."""

    def values(samples: Samples) -> list[float]:
        return ratios(*(step_ms(decode_cell(samples, part, quant, program)) for program in (OURS, THEIRS)))

    return values


def longer_context(samples: Samples) -> list[float]:
    """Milliseconds that a step takes longer at 2048 tokens than at 256."""
    long, short = (step_ms(decode_cell(samples, "context-2b", "q4", OURS, context)) for context in (2048, 256))
    return [more - less for more, less in zip(long, short, strict=True)]


def batch_gain(samples: Samples) -> list[float]:
    """Tokens per second of 8 rows over those of one."""
    many, one = (step_ms(decode_cell(samples, "batch-2b", "q4", OURS, batch=batch)) for batch in (8, 1))
    return [8 * ratio for ratio in ratios(one, many)]


def prefill_gain(samples: Samples) -> list[float]:
    """Tokens per second of a prompt of 512 tokens over llama.cpp's."""
    ours, theirs = (
        [sample["ms"] for sample in select(samples["prefill-2b"], tokens=512, program=program)]
        for program in (OURS, THEIRS)
    )
    return ratios(theirs, ours)


def resident_gib(samples: Samples) -> list[float]:
    """All memory of the process that decodes the 30B-A3B shape."""
    return [sample["process"] / 2**30 for sample in decode_cell(samples, "decode-30b-a3b", "q4", OURS)]


GOALS = (
    Goal("Qwen3-VL-2B q4, context 256: step over the floor", 1.35, 1.15, over_floor("decode-2b", "q4")),
    Goal("the same over llama.cpp Q4_0", 1.0, 0.8, over_llama("decode-2b", "q4")),
    Goal("2B q8: step over the floor", 1.3, 1.12, over_floor("decode-2b", "q8")),
    Goal("the same over llama.cpp Q8_0", 1.0, 0.9, over_llama("decode-2b", "q8")),
    Goal("2B q4: ms more at context 2048 than at 256", 8, 4, longer_context),
    Goal("Qwen3-VL-8B q4: step over the floor", 1.3, 1.12, over_floor("decode-8b", "q4")),
    Goal("the same over llama.cpp Q4_0", 1.0, 0.9, over_llama("decode-8b", "q4")),
    Goal("Qwen3-30B-A3B q4: resident memory, GiB", 20, 20, resident_gib),
    Goal("the same: step over the floor of its active weights", 1.5, 1.2, over_floor("decode-30b-a3b", "q4")),
    Goal("2B q4, prefill of 512 tokens: tokens/s over llama.cpp's", 1.15, 1.6, prefill_gain, more_is_better=True),
    Goal("2B q4, 8 rows: tokens/s over one row", 2.0, 2.6, batch_gain, more_is_better=True),
    Goal(
        "2B q4: seconds from opening to the first token of 16",
        3,
        1.5,
        lambda samples: [ms / 1e3 for ms in bench_open.to_first_token(samples["open-2b"])],
    ),
    Goal(
        "2B q4: MB resident beyond weights and cache",
        600,
        350,
        lambda samples: [sample["resident"] / 1e6 for sample in samples["open-2b"]],
    ),
)


def table(samples: Samples) -> str:
    """Every goal with what was found."""
    lines = [
        "    .venv/bin/python -m experiments.speed",
        "",
        "Random weights at real shape, int8 cache, 2 threads. Found is the median (lowest..highest); ratios are taken "
        "within a repeat. The floor is the time that reading a step's weights takes at the bandwidth measured just "
        "before. Each part's own table, raw samples and environment are in the folders beside this one.",
        "",
        "| what | must | aim | found | reached |",
        "|---|---|---|---|---|",
        *(goal.row(samples) for goal in GOALS),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Measures what is missing and writes the table."""
    made = argparse.ArgumentParser(prog="python -m experiments.speed", description=__doc__.split("\n")[0])
    made.add_argument("--again", nargs="+", choices=PARTS, default=[], help="parts to measure although they are there")
    made.add_argument("--quick", action="store_true", help="check in some minutes, on the small model, that it works")
    made.add_argument("--out", type=Path, default=ROOT / "results" / "speed")
    options = made.parse_args(arguments)
    samples = {}
    for name, (run, own_arguments) in PARTS.items():
        folder = options.out / name
        if name in options.again or not (folder / "table.md").is_file():
            quick = ("--quick", "--model", "tiny-moe", "--repeats", "1") if options.quick else ()
            run([*own_arguments, "--out", os.path.relpath(folder), *quick])
        samples[name] = [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]
    text = table(samples)
    (options.out / "table.md").write_text(text)
    write_environment(options.out)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
