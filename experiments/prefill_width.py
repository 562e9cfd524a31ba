"""Does a prompt leave the same keys, values and logits whatever the chunks it is computed in?

Claims: with quantised weights and this project's kernels it does, to the last bit. With products that are picked by the
number of rows, those rows differ that were computed by another product than in the whole prompt: with float32 weights
chunks of up to 32 tokens, because this project leaves wider ones to XLA; with XLA alone, chunks of one token; with the
emulated engine, chunks of up to three. Documented: 258 tokens at once against 123 at a time, all rows differ, logits by
about 0.9. Cost: two minutes on 2 cores.

    python -m experiments.prefill_width

Writes results/prefill_width/. `--model DIR` measures a real checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.engines import BY_WIDTH, ENGINES, FLOAT_KERNELS, KERNELS, NARROW, XLA, EngineSteps
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from models.inference import Layers
from models.layers import DECODE_ROWS

LENGTH = 258  # tokens of the prompt, and the width that the others are compared with
DOCUMENTED = 123  # the width that the documented figure compares with it
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
        "No time is taken, so that there is neither warm-up nor compile time to tell.",
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
            rows = [sum(s["rows_differ"] for s in found if s["width"] == width) for width in widths_of(found)]
            every = [LENGTH * sum(s["width"] == width for s in found) for width in widths_of(found)]
            shares = [f"{100 * some / all_:.0f} %" for some, all_ in zip(rows, every, strict=True)]
            axis.bar_label(drawn, labels=shares, fontsize=7, rotation=90, padding=2)
        axis.axhline(0.9, color="grey", ls="--", lw=1, label="documented: about 0.9")
        widths = widths_of(of(samples, model=model))
        axis.set(xticks=range(len(widths)), xticklabels=widths, xlabel="tokens per chunk")
        axis.set_title(f"{model}; above the bars: rows of the cache that differ")
        axis.set_yscale("symlog", linthresh=1e-7)
        axis.set_ylim(0, 10)
    axes[0][0].set_ylabel(f"largest difference of a logit, against {LENGTH} at once")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    return figure


def _shares(samples: Sequence[Sample], engine: str, width: int) -> list[float]:
    return [sample["rows_differ"] / LENGTH for sample in of(samples, engine=engine) if sample["width"] == width]


def _rows(engine: str, width: int, printed: str, value: float | None, what: str, why: str, **judged: Any) -> Documented:
    """The share of rows that differ in chunks of a width."""
    return Documented(
        f"rows of the cache that depend on the chunk width, {what}",
        printed,
        value,
        "of all rows",
        SOURCE,
        BOARD,
        lambda samples: _shares(samples, engine, width),
        why=why,
        **judged,
    )


def _all_differ(values: list[float]) -> bool:
    """As documented, with room for a row that is the same by chance."""
    return min(values) > 0.9


BY_FLOAT = (
    f"with float32 weights up to {DECODE_ROWS} rows are multiplied by this project's kernels and more by XLA, so "
    "that the chunk width decides, as in the original"
)
FIGURES = (
    _rows(
        BY_WIDTH.name,
        DOCUMENTED,
        "all (3444 of 3444)",
        1.0,
        "products picked by width",
        f"chunks of {DOCUMENTED} tokens. The emulated engine multiplies in another way only up to {NARROW} rows, and "
        f"all chunks are wider, so that nothing can differ, whatever the original does at {LENGTH} and {DOCUMENTED}",
    ),
    Documented(
        "logits differ by the chunk width, products picked by width",
        "about 0.9",
        0.9,
        "logit",
        SOURCE,
        BOARD,
        lambda samples: [s["logits_differ"] for s in of(samples, engine=BY_WIDTH.name) if s["width"] == 1],
        why="chunks of one token; the logits of the small models here have another range than those of the documented "
        "one",
    ),
    *(
        _rows(
            FLOAT_KERNELS.name,
            width,
            f"all, at {DOCUMENTED}",
            None,
            f"this project's kernels with float32, chunks of {width}",
            f"{BY_FLOAT}: a chunk of {width} is computed otherwise than {LENGTH} at once. The original's width was "
            f"{DOCUMENTED}, and nothing is documented of this one",
            category="beside",
        )
        for width in (1, 8)
    ),
    _rows(
        FLOAT_KERNELS.name,
        DOCUMENTED,
        "all",
        1.0,
        f"this project's kernels with float32, chunks of {DOCUMENTED}",
        f"more than nine rows of ten. {BY_FLOAT}, but {LENGTH} and {DOCUMENTED} are both beyond: only the last chunk, "
        f"of {LENGTH % DOCUMENTED} tokens, is computed otherwise, and just its rows differ in the table",
        holds=_all_differ,
    ),
    _rows(
        XLA.name,
        DOCUMENTED,
        "all",
        1.0,
        "XLA's operations",
        "more than nine rows of ten. With chunks of one token all rows differ in the table, because XLA multiplies "
        f"a single row in another way; {LENGTH % DOCUMENTED}, {DOCUMENTED} and {LENGTH} rows it adds up in one order",
        holds=_all_differ,
    ),
    Documented(
        "rows of the cache that depend on the chunk width, this project's kernels with q4",
        "all differ; own guarantee: none",
        None,
        "of all rows",
        SOURCE,
        BOARD,
        lambda samples: [sample["rows_differ"] / LENGTH for sample in of(samples, engine=KERNELS.name)],
        lambda values: max(values) == 0,
        "all widths of the table; each row is multiplied in the same order whatever stands beside it",
        category="guarantee",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"model": ["tiny-vl"], "prompts": 1})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
