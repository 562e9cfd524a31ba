"""All weights resident, against the pages of each layer dropped as soon as it has been computed.

Claims: a model then needs memory for its head and one layer, its tokens stay the same, and a token costs the faults
that bring the pages back, which is more beside a token and a prompt the faster these are computed. Documented, 32
tokens of prompt and of answer: 1.81 GB against 0.39 (2B), 4.18 against 0.47 (8B), 11.73 against 0.51 (30B-A3B); 221 ms
per token against 257 (2B), 185 against 318 (8B), 324 against 564 (30B-A3B). Cost: four minutes on 2 cores, 4 GiB of
memory, 2 GB of disk.

    python -m experiments.residency

A converted checkpoint, of random weights for a preset, is used where its file is mapped. As in the original, a layer's
pages are dropped (madvise DONTNEED) when it has been computed, and the next one's asked for (WILLNEED) when it begins;
embeddings and head stay. Unlike there, each layer is a call of its own then, because otherwise this project computes
all layers in one. So there are four ways: one call, as requests are served; a call per layer; the same with pages
dropped, which come back from the page cache; and with the page cache dropped too, from the disk. All but the last
compute the same answer once before it is timed.

Resident is what /proc/self/smaps says of the file's mappings, cached what mincore says of the page cache: the most at
the end of a layer, while a prompt is computed that is not timed. Writes results/residency/. `--model` takes checkpoints
too; a preset of any size needs memory and disk for its quantised weights.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

import models
from experiments.bench import ratios, spread
from experiments.bench_open import converted
from experiments.bench_steps import config_of
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, by_repeat, of
from experiments.layer_steps import AtLayer, LayerSteps, nothing
from experiments.mapped_pages import MappedFile
from models.checkpoint import SINGLE_FILE, Checkpoint
from models.errors import CheckpointError
from models.model import find_folder
from models.quantisation import SCHEMES
from models.weights import stored_scheme

ONE_CALL, BY_LAYER, DROPPED, FROM_DISK = "one call", "a call per layer", "dropped", "dropped, from disk"
IN_MEMORY = (ONE_CALL, BY_LAYER, DROPPED)
WAYS = (*IN_MEMORY, FROM_DISK)
DISK_REPEATS = 2
TWO, EIGHT, THIRTY = "qwen3-vl-2b", "qwen3-vl-8b", "qwen3-30b-a3b"


@dataclass(frozen=True)
class Published:
    """What is documented of a model, each of all weights and with pages dropped: kB of the weights that are resident,
    ms per token, seconds of a prompt, and how the times were measured; all of them with 32 tokens and 32."""

    name: str
    resident: tuple[int, int]
    ms: tuple[float, float]
    prompt: tuple[float, float]
    conditions: str


WARM = "warm, 4 threads, 32 tokens and 32"
PUBLISHED = {
    TWO: Published(
        *("2B", (1_806_732, 394_464), (221.0, 257.0), (7.14, 8.02)),
        "page cache dropped before the prompt, 8 threads, 32 tokens and 32",
    ),
    EIGHT: Published("8B", (4_183_048, 471_800), (185.0, 318.0), (1.605, 1.724), WARM),
    THIRTY: Published("30B-A3B", (11_728_860, 506_368), (324.0, 564.0), (6.67, 6.93), WARM),
}
MATRIX, CHANGELOG = "docs of the original, matrix of 2026-09-12", "docs of the original, changelog"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models, and the lengths of prompt and answer."""
    parser.add_argument("--model", nargs="+", default=[TWO], help="presets, trained models or checkpoint folders")
    parser.add_argument("--quant", choices=SCHEMES, default="q4", help="of what is not converted already")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens after the first")
    parser.add_argument("--disk-answer", type=int, default=2, help="the same from the disk; 0 leaves that way out")
    parser.add_argument("--repeats", type=int, default=5, help=f"of reading from the disk at most {DISK_REPEATS}")


def cells(options: argparse.Namespace) -> list[Cell]:
    """The ways in turn, model by model."""
    return [
        {"model": model, "way": way, "repeat": repeat}
        for model in options.model
        for repeat in range(options.repeats)
        for way in (WAYS if repeat % 2 == 0 else reversed(WAYS))
        if way != FROM_DISK or (options.disk_answer and repeat < DISK_REPEATS)
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One model after the other."""
    with ExitStack() as stack:
        held: dict[str, Residency] = {}

        def measure(cell: Cell) -> list[Sample]:
            model, way = cell["model"], cell["way"]
            if model not in held:
                held.clear()
                stack.close()
                folder = stack.enter_context(converted_folder(model, options.quant))
                held[model] = stack.enter_context(closing(Residency(folder, options.prompt)))
            answer = options.disk_answer if way == FROM_DISK else options.answer
            return [{"shape": shape_of(model)} | held[model].measure(way, 1 + answer)]

        yield measure


@contextmanager
def converted_folder(model: str, quant: str) -> Iterator[Path]:
    """The folder itself, if it is converted already."""
    folder = find_folder(model)
    if folder is not None and stored_scheme(Checkpoint.open(folder)):
        yield folder
    else:
        with converted(model, quant) as made:
            yield made


def shape_of(model: str) -> str:
    """The preset whose shape is documented that a model has, or the model."""

    def sizes(name: str) -> tuple[int, int]:
        text = config_of(name).text
        return text.layers, text.hidden

    return next((name for name in PUBLISHED if sizes(name) == sizes(model)), model)


class Residency:
    """A converted checkpoint that answers one prompt in several ways."""

    def __init__(self, folder: Path, prompt: int) -> None:
        """`prompt` is the number of its tokens.

        Raises:
            CheckpointError: the weights are not used where the folder's file is mapped.
        """
        self.model = models.load(folder)
        self.file = MappedFile(folder / SINGLE_FILE)
        self.steps = LayerSteps(self.model.inference)
        self.pages = [self.file.stretches(leaves) for leaves in self.steps.layers]
        if not all(self.pages):
            raise CheckpointError(f"{folder}: its weights are not used where {SINGLE_FILE} is mapped; convert it anew")
        self.prompt = np.random.default_rng(0).integers(0, 200, prompt).astype(np.int32)
        self.at_layer: dict[str, tuple[AtLayer, AtLayer]] = {
            BY_LAYER: (nothing, nothing),
            DROPPED: (self._ask_for_next, self._drop),
            FROM_DISK: (self._ask_for_next, self._forget),
        }

    def close(self) -> None:
        """Lets go of the file."""
        self.file.close()

    def measure(self, way: str, tokens: int) -> Sample:
        """Milliseconds to the first token and for each after it, page faults per token, the ids, and the most bytes
        that are resident and cached."""
        if way == FROM_DISK:
            for layer in range(len(self.pages)):
                self._forget(layer)
        else:
            self._answer(way, tokens)
        before = resource.getrusage(resource.RUSAGE_SELF)
        times, ids = self._answer(way, tokens)
        after = resource.getrusage(resource.RUSAGE_SELF)
        told = {"first_ms": times[0], "token_ms": fmean(times[1:]), "ids": ids}
        faults = {"faults": after.ru_minflt - before.ru_minflt, "reads": after.ru_majflt - before.ru_majflt}
        return told | {name: count / tokens for name, count in faults.items()} | self._most(way)

    def _answer(self, way: str, tokens: int) -> tuple[list[float], list[int]]:
        """Milliseconds that each token took, and its id."""
        times, ids, start = [], [], time.perf_counter()
        for token in self._tokens(way, tokens):
            times.append(1e3 * (time.perf_counter() - start))
            ids.append(token)
            start = time.perf_counter()
        return times, ids

    def _tokens(self, way: str, tokens: int) -> Iterator[int]:
        if way != ONE_CALL:
            return self.steps.answer(self.prompt, tokens, *self.at_layer[way])
        return (step.token_id for step in self.model.generate(self.prompt, max_tokens=tokens, ignore_eos=True))

    def _ask_for_next(self, layer: int) -> None:
        self.file.ask_for(self.pages[(layer + 1) % len(self.pages)])

    def _drop(self, layer: int) -> None:
        self.file.drop(self.pages[layer])

    def _forget(self, layer: int) -> None:
        self._drop(layer)
        self.file.forget(self.pages[layer])

    def _most(self, way: str) -> dict[str, int]:
        """The most bytes that are resident and cached at the end of a layer, while the prompt is computed once more;
        for one call, what it has left."""
        if way == ONE_CALL:
            return {"resident": self.file.resident(), "cached": self.file.cached()}
        before, after = self.at_layer[way]
        resident, cached = [], []

        def look(layer: int) -> None:
            resident.append(self.file.resident())
            cached.append(self.file.cached())
            after(layer)

        list(self.steps.answer(self.prompt, 1, before, look))
        return {"resident": max(resident), "cached": max(cached)}


def ways_of(samples: Sequence[Sample], model: str) -> list[str]:
    """Those that were measured."""
    return [way for way in WAYS if of(samples, model=model, way=way)]


def values(samples: Sequence[Sample], model: str, way: str, name: str) -> list[float]:
    """Of each repeat, in its order."""
    return [sample[name] for sample in by_repeat(samples, model=model, way=way)]


def over(samples: Sequence[Sample], model: str, name: str, way: str, other: str = BY_LAYER) -> list[float]:
    """A way's values over another's, within each repeat that has both."""
    return ratios(*zip(*zip(*(values(samples, model, each, name) for each in (way, other)), strict=False), strict=True))


def same_ids(samples: Sequence[Sample], model: str, way: str) -> float:
    """The share of tokens that are those of one call, of the repeats that have them."""
    [whole] = {tuple(ids) for ids in values(samples, model, ONE_CALL, "ids")}
    pairs = [pair for ids in values(samples, model, way, "ids") for pair in zip(ids, whole, strict=False)]
    return sum(one == other for one, other in pairs) / len(pairs)


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per model and way."""
    lines = [
        f"Converted checkpoints, one sequence: {options.prompt} tokens of prompt and {1 + options.answer} of answer "
        f"(from the disk {1 + options.disk_answer}), greedy; median (lowest..highest) of the repeats. Resident is what "
        "the process holds of the weights' file (smaps), cached what the page cache holds of it (mincore), both at "
        "most. Ratios are taken within a repeat. Each answer is computed once before it is timed, which compiles it "
        "and brings its pages into memory; only from the disk the first one is timed, compiled by the way before it.",
        "",
        "| model | way | n | resident, MB | cached, MB | first token, ms | ms per token | over a call per layer "
        "| page faults per token | of the disk | same tokens as one call |",
        "|" + "---|" * 11,
    ]
    for model in options.model:
        for way in ways_of(samples, model):
            cells = [model, way, str(len(of(samples, model=model, way=way)))]
            for name in ("resident", "cached"):
                cells.append(f"{max(values(samples, model, way, name)) / 1e6:.1f}")
            for name in ("first_ms", "token_ms"):
                cells.append(spread(values(samples, model, way, name)))
            cells.append(spread(over(samples, model, "token_ms", way), 2))
            for name in ("faults", "reads"):
                cells.append(f"{median(values(samples, model, way, name)):.0f}")
            lines.append(f"| {' | '.join(cells)} | {same_ids(samples, model, way):.0%} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Memory and time of each way, a row per model, with the documented values."""
    rows = len(options.model)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 1.6 + 3.4 * rows), layout="constrained", squeeze=False)
    for model, (memory, milliseconds) in zip(options.model, axes, strict=True):
        for number, way in enumerate(ways_of(samples, model)):
            style = {"color": COLOURS[number], "hatch": ("", "//", "..", "xx")[number], "edgecolor": "white"}
            drawn = memory.barh(number, max(values(samples, model, way, "resident")) / 1e6, **style)
            memory.bar_label(drawn, fmt=short, fontsize=8, padding=2)
            ms, marker = values(samples, model, way, "token_ms"), "osD^"[number]
            milliseconds.plot(ms, [number] * len(ms), marker, color=COLOURS[number], mfc="none")
            milliseconds.plot(median(ms), number, marker, color=COLOURS[number], ms=9)
            milliseconds.annotate(short(median(ms)), (median(ms), number - 0.15), ha="center", va="bottom", fontsize=8)
        for axis in (memory, milliseconds):
            axis.set(yticks=range(number + 1), yticklabels=ways_of(samples, model), ylim=(number + 0.6, -0.6))
        memory.set(xlabel="weights resident in memory (MB)", title=model)
        memory.margins(x=0.15)
        milliseconds.set(xlabel="ms per token: each repeat, and the median", title=model, xscale="log")
        milliseconds.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        milliseconds.xaxis.set_major_formatter(lambda value, _: short(value))
        milliseconds.xaxis.set_minor_formatter(NullFormatter())
        milliseconds.grid(axis="x", which="both", lw=0.3)
        plot_published(memory, milliseconds, of(samples, model=model)[0]["shape"])
    return figure


def plot_published(memory: Axes, milliseconds: Axes, shape: str) -> None:
    """The documented values of a model of this shape, if there are any, told below the axes, where they hide
    nothing."""
    if shape not in PUBLISHED:
        return
    published = PUBLISHED[shape]
    for axes, pair, scale in ((memory, published.resident, 1e3), (milliseconds, published.ms, 1)):
        for value, dash, what in zip(pair, ("--", ":"), ("all resident", "dropped"), strict=True):
            label = f"documented, RK3588, {what}: {short(value / scale)}"
            axes.axvline(value / scale, color="black", ls=dash, lw=1.5, label=label)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def short(value: float) -> str:
    """Three digits, or whole ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


Measured = Callable[[Sequence[Sample]], list[float]]


def _models(samples: Sequence[Sample], shape: str | None = None) -> list[str]:
    """The models that were measured, of this shape."""
    return list(dict.fromkeys(s["cell"]["model"] for s in samples if shape in (None, s["shape"])))


def _over(name: str, way: str, other: str, shape: str | None = None) -> Measured:
    """One ratio per repeat and model."""
    return lambda samples: [
        ratio for model in _models(samples, shape) for ratio in over(samples, model, name, way, other)
    ]


def _same_ids(samples: Sequence[Sample]) -> list[float]:
    return [
        same_ids(samples, model, way)
        for model in _models(samples)
        for way in ways_of(samples, model)
        if way in (DROPPED, FROM_DISK)
    ]


def _memory_figure(shape: str, published: Published) -> Documented:
    kept, dropped = published.resident
    least = 0.9 * kept / dropped
    chosen = (
        "; of a mixture, only experts that the prompt chose are resident: with random weights its tokens choose mostly "
        "the same ones, so that there is less to drop than of a trained model"
    )
    return Documented(
        f"{published.name}: resident weights, all over dropped",
        f"{kept / 1e6:.2f} / {dropped / 1e6:.2f} GB = {kept / dropped:.1f}",
        kept / dropped,
        "times",
        MATRIX,
        "RK3588, q4, cold, resident after a prompt of 32 tokens",
        _over("resident", BY_LAYER, DROPPED, shape),
        lambda values: median(values) >= least,
        "no less than documented, less a tenth; what stays, the head, is a larger part of a smaller model"
        f"{chosen if shape == THIRTY else ''}; takes --model {shape}",
    )


def _time_figure(shape: str, published: Published, part: str) -> Documented:
    """What dropping costs a prompt (`first_ms`) or a token (`token_ms`) of a shape."""
    token = part == "token_ms"
    what, unit, (kept, dropped) = ("token", "ms", published.ms) if token else ("prompt", "s", published.prompt)
    most = 1.1 * dropped / kept
    cold = "; there the prompt reads the weights from the disk in both ways, here from the page cache"
    return Documented(
        f"{published.name}: time per {what}, dropped over resident",
        f"{dropped:g} / {kept:g} {unit} = {dropped / kept:.2f}",
        dropped / kept,
        "times",
        MATRIX if shape == TWO else CHANGELOG,
        f"RK3588, q4, {published.conditions}",
        _over(part, DROPPED, BY_LAYER, shape),
        lambda values: median(values) <= most,
        "no dearer than documented and a tenth; both with a call per layer, and with the page cache warm"
        f"{cold if shape == TWO and not token else ''}. Where it is dearer, the faults that the table has are the "
        f"reason. They come once per {what} for all layers and cost the same however fast it is computed: there they "
        f"add {dropped - kept:.3g} {unit}, here what the table's two rows differ by, beside a {what} that takes less "
        f"time than there; takes --model {shape}",
    )


FIGURES = (
    *(_memory_figure(*each) for each in PUBLISHED.items()),
    *(_time_figure(*each, part) for part in ("token_ms", "first_ms") for each in PUBLISHED.items()),
    Documented(
        "tokens that are the same with pages dropped",
        "all",
        1.0,
        "of all tokens",
        MATRIX,
        "RK3588, 2B, 8B and 30B-A3B, 32 greedy tokens",
        _same_ids,
        lambda values: min(values) == 1,
        "each token of each repeat is that of one call with all weights resident",
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__], {"model": ["tiny-vl"], "answer": 8, "disk_answer": 2, "repeats": 2}
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
