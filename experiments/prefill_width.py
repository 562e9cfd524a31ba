"""Does a prompt leave the same keys, values and logits whatever the chunks it is computed in?

Claims: with quantised weights and this project's kernels it does, to the last bit; with products that depend on the
number of rows no row stays the same. Documented: 258 tokens at once against 123 at a time, all rows differ, logits by
about 0.9. Cost: two minutes on 2 cores.

    python -m experiments.prefill_width

Writes results/prefill_width/. `--model DIR` measures a real checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.engines import BY_WIDTH, ENGINES, KERNELS, XLA, EngineSteps
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from models.inference import Layers

LENGTH = 258  # tokens of the prompt, and the width that the others are compared with
SOURCE = "docs of the original, digest of the batch engine"
BOARD = "258-token prefill against the same tokens 123 at a time; machine and model not stated"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models, chunk widths and prompts."""
    parser.add_argument("--model", nargs="+", default=["tiny-vl", "tiny-moe"], help="trained models or folders")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 123], help=f"compared with {LENGTH} at once")
    parser.add_argument("--prompts", type=int, default=5)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Engines in turn."""
    return [
        {"model": model, "engine": engine, "prompt": prompt}
        for model in options.model
        for prompt in range(options.prompts)
        for engine in ENGINES
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One model under one engine at a time."""
    held: dict[tuple[str, str], EngineSteps] = {}

    def measure(cell: Cell) -> list[Sample]:
        key = (cell["model"], cell["engine"])
        if key not in held:
            held[key] = EngineSteps(cell["model"], ENGINES[cell["engine"]], 1, 2 * LENGTH)
        return compare(held[key], np.random.default_rng([options.seed, cell["prompt"]]), options.widths)

    yield measure


def compare(steps: EngineSteps, random: np.random.Generator, widths: Sequence[int]) -> list[Sample]:
    """One prompt of random words in chunks of each width: how many of its rows of the cache, and by how much its last
    logits, are not those of the whole prompt at once; and the logits' range, to judge that by."""
    text = " ".join("".join(random.choice(list("aeionrst"), 4)) for _ in range(LENGTH))
    ids = np.array(steps.model.tokenizer.encode_text(text)[:LENGTH])
    whole_logits, whole = in_chunks(steps, ids, LENGTH)
    samples = []
    for width in widths:
        logits, layers = in_chunks(steps, ids, width)
        same = np.ones(LENGTH, bool)
        for one, other in zip(jax.tree.leaves(layers), jax.tree.leaves(whole), strict=True):
            equal = np.asarray(one)[0, :, :LENGTH] == np.asarray(other)[0, :, :LENGTH]
            same &= equal.all(axis=tuple(axis for axis in range(equal.ndim) if axis != 1))
        difference = float(np.abs(logits - whole_logits).max())
        told = {"width": width, "rows_differ": int(np.sum(~same)), "logits_differ": difference}
        flips = bool(logits.argmax() != whole_logits.argmax())
        samples.append(told | {"range": float(np.ptp(whole_logits)), "flips": flips})
    return samples


def in_chunks(steps: EngineSteps, ids: np.ndarray, width: int) -> tuple[np.ndarray, Layers]:
    """Last logits `[vocab]` and cache of a prompt computed `width` tokens at a time."""
    layers = steps.new_cache()
    for start in range(0, len(ids), width):
        chunk = ids[None, start : start + width]
        logits, layers, _ = steps.take(layers, chunk, np.zeros(1, np.int32), np.array([start], np.int32))
    return logits[0], layers


def widths_of(samples: Sequence[Sample]) -> list[int]:
    """The widths measured, ascending."""
    return sorted({sample["width"] for sample in samples})


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per model, engine and width."""
    lines = [
        f"{options.prompts} prompts of {LENGTH} tokens in chunks, against all at once. Rows are tokens whose keys or "
        "values differ in any bit of any layer; logits are those after the last token, the largest difference of any.",
        "",
        "| model | engine | chunk | rows that differ | logits differ by | of their range | most likely token changes |",
        "|" + "---|" * 7,
    ]
    for model in options.model:
        for engine in ENGINES:
            for width in options.widths:
                found = [sample for sample in of(samples, model=model, engine=engine) if sample["width"] == width]
                rows = sum(sample["rows_differ"] for sample in found)
                most = max(sample["logits_differ"] for sample in found)
                share = max(sample["logits_differ"] / sample["range"] for sample in found)
                cells = [model, engine, str(width), f"{rows} of {LENGTH * len(found)}", f"{most:.3g}", f"{share:.2g}"]
                cells.append(f"{sum(sample['flips'] for sample in found)} of {len(found)}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Largest difference of a logit by chunk width, for each engine."""
    columns = len(options.model)
    figure, axes = plt.subplots(1, columns, figsize=(10, 4.5), sharey=True, layout="constrained", squeeze=False)
    for model, axis in zip(options.model, axes[0], strict=True):
        for number, engine in enumerate(ENGINES):
            found = of(samples, model=model, engine=engine)
            most = [max(s["logits_differ"] for s in found if s["width"] == width) for width in widths_of(found)]
            at = [place + 0.2 * (number - 1.5) for place in range(len(most))]
            drawn = axis.bar(at, most, 0.18, color=COLOURS[number], hatch=("", "//", "..", "xx")[number], label=engine)
            axis.bar_label(drawn, labels=["0" if value == 0 else "" for value in most], fontsize=8)
        axis.axhline(0.9, color="grey", ls="--", lw=1, label="documented: about 0.9")
        widths = widths_of(of(samples, model=model))
        axis.set(xticks=range(len(widths)), xticklabels=widths, xlabel="tokens per chunk", title=model)
        axis.set_yscale("symlog", linthresh=1e-7)
    axes[0][0].set_ylabel(f"largest difference of a logit, against {LENGTH} at once")
    axes[0][0].legend(fontsize=7)
    return figure


def _shares(samples: Sequence[Sample], engine: str) -> list[float]:
    return [sample["rows_differ"] / LENGTH for sample in of(samples, engine=engine)]


FIGURES = (
    Documented(
        "rows of the cache that depend on the chunk width, products picked by width",
        "all (3444 of 3444)",
        1.0,
        "of all rows",
        SOURCE,
        BOARD,
        lambda samples: [s["rows_differ"] / LENGTH for s in of(samples, engine=BY_WIDTH.name) if s["width"] == 1],
        lambda values: min(values) > 0.9,
        "chunks of one token against the whole prompt, which the emulated engine multiplies in two ways; more than "
        "nine rows of ten",
    ),
    Documented(
        "logits differ by the chunk width, products picked by width",
        "about 0.9",
        0.9,
        "logit",
        SOURCE,
        BOARD,
        lambda samples: [s["logits_differ"] for s in of(samples, engine=BY_WIDTH.name) if s["width"] == 1],
        None,
        "the logits of the small models here have another range than those of the documented one",
    ),
    Documented(
        "rows of the cache that depend on the chunk width, XLA's operations",
        "all",
        1.0,
        "of all rows",
        SOURCE,
        BOARD,
        lambda samples: _shares(samples, XLA.name),
        lambda values: min(values) > 0.5,
        "more than half the rows for every width; the table says which widths differ",
    ),
    Documented(
        "rows of the cache that depend on the chunk width, this project's kernels with q4",
        "all",
        1.0,
        "of all rows",
        SOURCE,
        BOARD,
        lambda samples: _shares(samples, KERNELS.name),
        lambda values: max(values) > 0,
        "here none does: each row is multiplied in the same order whatever stands beside it",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": ["tiny-vl"], "prompts": 1})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
