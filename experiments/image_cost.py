"""What a picture costs by its size, and what is saved when it comes again.

Claims: a picture that has been seen is not encoded again, and where all that stands before it is the same too, nothing
of it is computed again. Documented, 2B: 64, 128 and 512 pixels square take 4, 6 and 22 s; the first token comes after
28.3 s, and after 5.2 s when the picture comes again. Cost: two minutes on 2 cores, 3 GiB of memory.

    python -m experiments.image_cost

Random weights at real shape. A picture has a patch for every 16 x 16 pixels, as in the original; the published
preprocessing would enlarge the small ones. Writes results/image_cost/. `--model DIR` takes the shape of a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.bench_batch import first_token, random_ids, request
from experiments.bench_steps import open_inference
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from models.batch import Batch, BatchLimits
from models.images import VisionInput
from models.inference import Inference
from models.quantisation import SCHEMES

BEGINNING, QUESTION = 8, 24  # tokens before the picture and after it
ROOM = 64  # tokens of context beyond the picture's
TOWER, FIRST, SECOND, REUSED = "tower_ms", "first_ms", "second_ms", "reused_ms"
NAMES = {
    TOWER: "vision tower",
    FIRST: "first token, new picture",
    SECOND: "first token, picture seen before",
    REUSED: "first token, and all before it too",
}
PUBLISHED = {64: 4.0, 128: 6.0, 512: 21.65}  # seconds
SOURCE = "docs of the original, technical document"
BOARD = "RK3588, 2B, 4 threads"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is timed, and which pictures it sees."""
    parser.add_argument("--model", default="qwen3-vl-2b", help="a preset, or a model or folder for its shape")
    parser.add_argument("--quant", choices=SCHEMES, default="q4")
    parser.add_argument("--size", type=int, nargs="+", default=[64, 128, 512], help="pixels of a side")
    parser.add_argument("--repeats", type=int, default=5)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Sizes in turn."""
    return [{"size": size, "repeat": repeat} for repeat in range(options.repeats) for size in options.size]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One network; each size is seen once before it is timed."""

    @cache
    def opened() -> Inference:
        inference = open_inference(options.model, options.quant, "int8")
        for size in options.size:
            see(inference, size, -1)
        return inference

    yield lambda cell: [see(opened(), cell["size"], cell["repeat"])]


def see(inference: Inference, size: int, seed: int) -> Sample:
    """Milliseconds for the vision tower alone, and to the first token of a question: about a new picture, about one
    that has been encoded, and about one that stands behind the same beginning as before."""
    picture = noise(inference, size, seed + 1)
    start = time.perf_counter()
    inference.encode(picture.patches, picture.grid)
    told = {TOWER: 1e3 * (time.perf_counter() - start)}
    tokens = picture.tokens(inference.config.vision.merge)
    for reuse, names in ((False, (FIRST, SECOND)), (True, (None, REUSED))):
        limits = BatchLimits(slots=2, image_cache_bytes=2**28, reuse=reuse)
        batch = Batch(inference, tokens + ROOM, limits)
        for number, name in enumerate(names):
            ids = prompt(inference, tokens, 1000 * number + seed + 1)
            ms, _ = first_token(batch, request(ids, 1, [picture]))
            told |= {name: ms} if name else {}
    return told


def noise(inference: Inference, size: int, seed: int) -> VisionInput:
    """A square picture of random values."""
    vision = inference.config.vision
    side = size // vision.patch
    values = np.random.default_rng([seed, size]).standard_normal((side * side, vision.patch_values), np.float32)
    return VisionInput(values, (1, side, side), "image")


def prompt(inference: Inference, tokens: int, seed: int) -> np.ndarray:
    """Token ids of a beginning that is always the same, a picture of so many tokens, and a question."""
    config = inference.config
    pads = np.full(tokens, config.image_token, np.int32)
    return np.concatenate([random_ids(config, BEGINNING, 0), pads, random_ids(config, QUESTION, seed)])


def milliseconds(samples: Sequence[Sample], size: int, name: str) -> list[float]:
    """Of each repeat."""
    return [sample[name] for sample in of(samples, size=size)]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per size."""
    lines = [
        f"{options.model} {options.quant}, random weights; milliseconds, median (lowest..highest) of {options.repeats} "
        f"repeats. The prompt is {BEGINNING} tokens, the picture and a question of {QUESTION} tokens.",
        "",
        f"| pixels | patches | {' | '.join(NAMES.values())} | documented, vision tower |",
        "|" + "---|" * (3 + len(NAMES)),
    ]
    for size in options.size:
        cells = [f"{size} x {size}", str((size // 16) ** 2)]
        cells += [spread(milliseconds(samples, size, name)) for name in NAMES]
        cells.append(f"{1e3 * PUBLISHED[size]:,.0f}" if size in PUBLISHED else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Times by size on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    width = 0.8 / len(NAMES)
    for number, (name, label) in enumerate(NAMES.items()):
        at = [place + width * (number - 0.5 * (len(NAMES) - 1)) for place in range(len(options.size))]
        seconds = [median(milliseconds(samples, size, name)) / 1e3 for size in options.size]
        style = {"color": COLOURS[number], "hatch": ("", "//", "..", "xx")[number], "label": label}
        drawn = axes.bar(at, seconds, 0.9 * width, **style)
        axes.bar_label(drawn, fmt="%.2g", fontsize=7)
    for place, size in enumerate(options.size):
        if size in PUBLISHED:
            axes.plot([place - 0.42, place + 0.42], [PUBLISHED[size]] * 2, "k--", lw=1)
    axes.plot([], [], "k--", lw=1, label="documented, vision tower on the RK3588")
    for seconds, dash, label in ((28.3, "-.", "new"), (5.2, ":", "seen before")):
        axes.axhline(seconds, color="grey", ls=dash, lw=1, label=f"documented, first token, picture {label}")
    axes.set(yscale="log", xticks=range(len(options.size)), xticklabels=[f"{size} x {size}" for size in options.size])
    axes.set(xlabel="pixels", ylabel="seconds", title=f"{options.model} {options.quant}")
    figure.legend(fontsize=7, ncols=2, loc="outside lower center")
    return figure


def _seconds(size: int, name: str) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: [ms / 1e3 for ms in milliseconds(samples, size, name)]


def _second_over_first(samples: Sequence[Sample]) -> list[float]:
    return [sample[SECOND] / sample[FIRST] for sample in of(samples, size=512)]


FIGURES = (
    *(
        Documented(
            f"vision tower, {size} x {size}",
            "21.5-21.8 s" if size == 512 else f"about {seconds:g} s",
            seconds,
            "s",
            SOURCE,
            BOARD,
            _seconds(size, TOWER),
        )
        for size, seconds in PUBLISHED.items()
    ),
    Documented("first token, new picture", "28.3 s", 28.3, "s", SOURCE, f"{BOARD}, 512 x 512", _seconds(512, FIRST)),
    Documented(
        "first token, picture seen before", "5.2 s", 5.2, "s", SOURCE, f"{BOARD}, 512 x 512", _seconds(512, SECOND)
    ),
    Documented(
        "first token, picture seen before over new",
        "5.2 / 28.3 = 0.18",
        0.18,
        "",
        SOURCE,
        f"{BOARD}, 512 x 512",
        _second_over_first,
        lambda values: median(values) <= 0.5,
        "the vision tower must have been spared: at most half the time; what is left is the prompt, whose share "
        "depends on the machine",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": "tiny-vl", "size": [64, 128], "repeats": 2})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
