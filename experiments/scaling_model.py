"""Tokens per second on paper: the bytes that a token has to read over what a machine's memory gives.

Claim: a decode step takes at least as long as reading its weights and its cache, so memory sets the limit of every
machine, and tells which documented figures are near it, far from it, or beyond it. A 2B model in q8 needs all that an
RK3588's memory can give at the slower of its documented times and more than that at the faster; 30B-A3B is far from
what memory allows on both machines. Documented: 50 to 55 ms per token of a 2B model on an RK3588; 35 ms of 8B and 110
ms of 30B-A3B on 64 Neoverse-N1 cores. Cost: half a minute.

    python -m experiments.scaling_model

Nothing is computed by a model: bytes follow from shapes and formats, bandwidths are published ones, and what was
measured here is read from results/speed. Writes results/scaling_model/. `--model DIR` adds the shape of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bandwidth import ReadBandwidth
from experiments.bench import OURS, ROOT, ratios, spread
from experiments.bench_decode import floors
from experiments.bench_steps import bytes_read, config_of
from experiments.environment import measured_here
from experiments.experiment import COLOURS, SAME_BOARD, Cell, Documented, Experiment, Measure, Sample, of
from models.cache import bytes_per_token
from models.quantisation import CODINGS, SCHEMES, scale_name, stored_shapes
from models.switches import Switches
from models.weights import DTYPES, float_parameters

TWO, EIGHT, THIRTY = "qwen3-vl-2b", "qwen3-vl-8b", "qwen3-30b-a3b"
NAMES = {TWO: "2B", EIGHT: "8B", THIRTY: "30B-A3B"}
SHAPE, HERE, SPEED = "shape", "bandwidth here", "speed here"
BOARD, N1 = "RK3588", "64 Neoverse-N1 cores"
FORMATS = (*SCHEMES, *DTYPES)
SPEED_SHAPES = {"decode-2b": TWO, "decode-8b": EIGHT, "decode-30b-a3b": THIRTY}  # parts of experiments.speed


@dataclass(frozen=True)
class Machine:
    """A machine's memory: the highest rate at which it can be read, in GB/s, as published, and by whom."""

    bandwidth: float
    source: str


MACHINES = {
    "Raspberry Pi 5": Machine(17.1, "32 bits of LPDDR4X-4267 (Raspberry Pi's product brief)"),
    BOARD: Machine(34.1, "four channels of 16 bits (Rockchip's datasheet) of LPDDR4X-4267, as on an Orange Pi 5 Plus"),
    N1: Machine(204.8, "eight channels of DDR4-3200, as of AWS Graviton2 (WikiChip) and Ampere Altra"),
    "AWS Graviton3": Machine(307.2, "eight channels of DDR5-4800 (WikiChip)"),
    "AWS Graviton4": Machine(537.6, "twelve channels of DDR5-5600 (AWS, at the announcement)"),
}


@dataclass(frozen=True)
class Point:
    """A documented time per token (ms) of a model in a format, with `context` tokens in an int8 cache."""

    machine: str
    model: str
    quant: str
    context: int
    ms: float
    source: str


POINTS = (
    Point(BOARD, TWO, "q4", 64, 50, "article 20-3: about 50 ms, format not stated"),
    Point(BOARD, TWO, "q4", 64, 55, "article 20-3: tpot_ms about 55"),
    Point(BOARD, TWO, "q8", 64, 50, "technical document: 2B Q8, about 50 ms"),
    Point(BOARD, TWO, "q8", 64, 55, "articles 19-2 and 20-3: tpot_ms about 55"),
    Point(BOARD, EIGHT, "q4", 64, 185, "changelog: 8B q4, all weights resident, 4 threads, warm"),
    Point(BOARD, THIRTY, "q4", 64, 324, "changelog: 30B, all weights resident, 4 threads, warm, float32 activations"),
    Point(BOARD, THIRTY, "q4", 64, 197, "changelog: the same with int8 activations"),
    Point(N1, EIGHT, "q4", 512, 35, "N1 report: 8B q4, 40 to 48 threads"),
    Point(N1, THIRTY, "q4", 256, 109.5, "N1 report: 30B q4, 32 to 40 threads"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Shapes, formats, and where measured times are."""
    parser.add_argument("--model", nargs="*", default=[], help="shapes besides the published ones: folders")
    parser.add_argument("--quant", nargs="+", default=["q4", "q8", "bfloat16"], choices=FORMATS)
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of this machine's bandwidth")
    parser.add_argument("--speed", type=Path, help="results of experiments.speed; by default those in results/")


def models_of(options: argparse.Namespace) -> list[str]:
    """All shapes."""
    return [TWO, EIGHT, THIRTY, *options.model]


def cells(options: argparse.Namespace) -> list[Cell]:
    """Shapes, this machine's bandwidth, and what `experiments.speed` has measured."""
    shapes = [{"part": SHAPE, "model": model, "quant": quant} for model in models_of(options) for quant in FORMATS]
    here = [{"part": HERE, "repeat": repeat} for repeat in range(options.repeats)]
    speed = [{"part": SPEED, "folder": folder} for folder in SPEED_SHAPES if there(speed_file(options, folder))]
    return shapes + here + speed


def speed_file(options: argparse.Namespace, folder: str) -> Path:
    """The raw samples of a part of `experiments.speed`."""
    return (options.speed or ROOT / "results" / "speed") / folder / "raw.jsonl"


def there(file: Path) -> bool:
    """Whether raw samples were measured, on this machine."""
    return file.is_file() and measured_here(file.parent)


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """Nothing but an array whose reading is timed."""

    @cache
    def bandwidth() -> ReadBandwidth:
        return ReadBandwidth(len(os.sched_getaffinity(0)))

    def measure(cell: Cell) -> list[Sample]:
        if cell["part"] == SHAPE:
            return [token_bytes(cell["model"], cell["quant"])]
        if cell["part"] == HERE:
            return [{"bandwidth": max(bandwidth().sample().values())}]
        return measured_steps(speed_file(options, cell["folder"]))

    yield measure


def token_bytes(model: str, quant: str) -> Sample:
    """Bytes of weights that a decode step of one sequence reads, and bytes of an int8 cache per token in it."""
    config = config_of(model)
    weights = bytes_read(stored_bytes(model, quant), config, 1)
    return {"weights": weights, "cache_per_token": bytes_per_token(config.text, "int8")}


@cache
def parameters(model: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all parameters."""
    return float_parameters(config_of(model), Switches())


def stored_bytes(model: str, quant: str) -> dict[str, int]:
    """Bytes of every parameter by its dotted path, as `bench_steps.weight_bytes` gives them for a network that is in
    memory; `quant` is a scheme or a dtype."""
    scheme, sizes = SCHEMES.get(quant), dict[str, int]()
    for path, parameter in parameters(model).items():
        format = None if scheme is None else scheme.format_of(path)
        if format is not None:
            weight, scale = stored_shapes(parameter.shape, format)
            sizes[path] = math.prod(weight) * np.dtype(CODINGS[format].dtype).itemsize
            sizes[scale_name(path)] = math.prod(scale) * np.dtype(np.float16).itemsize
        else:
            narrow = scheme is None and len(parameter.shape) > 1
            sizes[path] = math.prod(parameter.shape) * np.dtype(DTYPES[quant] if narrow else np.float32).itemsize
    return sizes


def measured_steps(file: Path) -> list[Sample]:
    """Mean time of every turn of decode steps in a file of `experiments.bench_decode`, with the floor of that turn."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    ours = [sample for sample in samples if sample["program"] == OURS and sample["batch"] == 1]
    return [
        {"quant": sample["quant"], "context": sample["context"], "ms": fmean(sample["ms"]), "floor": floor}
        | {"bytes_read": sample["bytes_read"]}
        for sample, floor in zip(ours, floors(ours), strict=True)
    ]


def gigabytes(samples: Sequence[Sample], model: str, quant: str, context: int) -> float:
    """10^9 bytes that a token reads."""
    [told] = of(samples, part=SHAPE, model=model, quant=quant)
    return (told["weights"] + context * told["cache_per_token"]) / 1e9


def machines(samples: Sequence[Sample]) -> dict[str, float]:
    """GB/s of every machine, this one last."""
    published = {name: machine.bandwidth for name, machine in MACHINES.items()}
    here = [sample["bandwidth"] for sample in of(samples, part=HERE)]
    return published | ({"this machine, measured": median(here)} if here else {})


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """Bytes, times on paper, what was measured here, and the documented figures."""
    parts = [
        bytes_table(samples, options),
        paper_table(samples, options),
        here_table(samples),
        points_table(samples),
        "Bandwidths: " + "; ".join(f"{name}, {machine.source}" for name, machine in MACHINES.items()) + ".\n",
    ]
    return "\n".join(part for part in parts if part)


def bytes_table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """What a token reads."""
    lines = [
        "GB (10^9 bytes) of weights that a token of one sequence reads: the decoder and the head, of a mixture the "
        "experts that are chosen; and kB of an int8 cache per token in it.",
        "",
        f"| shape | {' | '.join(FORMATS)} | cache, kB |",
        "|" + "---|" * (2 + len(FORMATS)),
    ]
    for model in models_of(options):
        [told] = of(samples, part=SHAPE, model=model, quant=FORMATS[0])
        sizes = [f"{gigabytes(samples, model, quant, 0):.2f}" for quant in FORMATS]
        lines.append(f"| {model} | {' | '.join(sizes)} | {told['cache_per_token'] / 1e3:.1f} |")
    return "\n".join(lines) + "\n"


def paper_table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """Shortest time and most tokens per second of every machine."""
    rates = machines(samples)
    lines = [
        f"Least milliseconds per token on paper with {options.context} tokens in the cache (most tokens per second): "
        "bytes over bandwidth.",
        "",
        f"| shape | format | {' | '.join(f'{name}, {rate:.1f} GB/s' for name, rate in rates.items())} |",
        "|" + "---|" * (2 + len(rates)),
    ]
    for model in models_of(options):
        for quant in options.quant:
            read = gigabytes(samples, model, quant, options.context)
            times = [f"{1e3 * read / rate:.1f} ({rate / read:.1f})" for rate in rates.values()]
            lines.append(f"| {model} | {quant} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def here_table(samples: Sequence[Sample]) -> str:
    """Measured times over those on paper."""
    told = of(samples, part=SPEED)
    lines = [
        "Measured by `experiments.speed`, over the time that reading the weights takes at the bandwidth measured just "
        "before; median (lowest..highest).",
        "",
        "| results | format | context | GB read | GB on paper | ms per token | over paper |",
        "|" + "---|" * 7,
    ]
    for folder, quant, context in dict.fromkeys((s["cell"]["folder"], s["quant"], s["context"]) for s in told):
        own = [s for s in of(told, folder=folder) if (s["quant"], s["context"]) == (quant, context)]
        paper = gigabytes(samples, SPEED_SHAPES[folder], quant, 0)
        ms = [sample["ms"] for sample in own]
        over = ratios(ms, [sample["floor"] for sample in own])
        cells = [folder, quant, str(context), f"{own[0]['bytes_read'] / 1e9:.2f}", f"{paper:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {spread(ms)} | {spread(over, 2)} |")
    return "\n".join(lines) + "\n" if told else ""


def points_table(samples: Sequence[Sample]) -> str:
    """The documented times, and the bandwidth that they need."""
    lines = [
        "Documented times per token, and the bandwidth at which they would be all reading. Nothing here is timed but "
        "the reading of memory, of which the fastest of three passes counts, so that nothing needs to be warmed up or "
        "compiled.",
        "",
        "| machine | shape | format | ms | GB read | GB/s needed | of the highest | source |",
        "|" + "---|" * 8,
    ]
    for point in POINTS:
        need = needed(samples, point)
        share = need / MACHINES[point.machine].bandwidth
        cells = [point.machine, point.model, point.quant, f"{point.ms:g}", f"{need * point.ms / 1e3:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {need:.1f} | {share:.0%} | {point.source} |")
    return "\n".join(lines) + "\n"


def needed(samples: Sequence[Sample], point: Point) -> float:
    """GB/s at which reading alone takes a documented time."""
    return 1e3 * gigabytes(samples, point.model, point.quant, point.context) / point.ms


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Time against bytes: a line per machine, the documented figures and the measured ones as points."""
    figure, axes = plt.subplots(figsize=(9, 6.5), layout="constrained")
    shapes = [(model, quant) for model in models_of(options) for quant in options.quant]
    read = sorted(gigabytes(samples, model, quant, options.context) for model, quant in shapes)
    span = np.array([read[0] / 1.4, read[-1] * 1.4])
    for number, (name, rate) in enumerate(machines(samples).items()):
        dash = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))[number % 6]
        axes.plot(span, 1e3 * span / rate, ls=dash, color=COLOURS[number % 6], label=f"{name}: {rate:.1f} GB/s")
    plot_points(axes, samples)
    axes.set(xscale="log", yscale="log", xlim=(span[0] / 1.4, None))
    axes.set_ylim(axes.get_ylim()[0], 8 * axes.get_ylim()[1])  # above the lines there is room for names
    label_shapes(axes, [(gigabytes(samples, *shape, options.context), " ".join(shape)) for shape in shapes])
    axes.set(xlabel="GB read per token", ylabel="ms per token")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=3)
    return figure


def label_shapes(axes: Axes, shapes: Sequence[tuple[float, str]]) -> None:
    """A line at the bytes of each shape and its name beside it: to the left, but where the line before is near to the
    right."""
    before = 0.0
    for at, name in sorted(shapes):
        side = "left" if at < 1.1 * before else "right"
        axes.axvline(at, color="grey", lw=0.4)
        top = {"rotation": 90, "fontsize": 8, "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(at, 0.99, f" {name} ", ha=side, **top)
        before = at


def plot_points(axes: Axes, samples: Sequence[Sample]) -> None:
    """Documented times on their machines, and measured ones on this."""
    for machine, marker in ((BOARD, "D"), (N1, "s")):
        own = [point for point in POINTS if point.machine == machine]
        at = [gigabytes(samples, point.model, point.quant, point.context) for point in own]
        colour = COLOURS[list(MACHINES).index(machine)]
        style = {"marker": marker, "color": colour, "mec": "black", "ls": "", "ms": 8}
        axes.plot(at, [point.ms for point in own], label=f"documented: {machine}", **style)
        for x, name, times in named(own, at):
            told = f"{name}: {' and '.join(f'{ms:g}' for ms in times)}"
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            place = {"textcoords": "offset points", "fontsize": 8, "ha": "right", "bbox": box}
            axes.annotate(f"{told} ms", (x, max(times)), (-5, 6), **place)
    told = of(samples, part=SPEED)
    at = [sample["bytes_read"] / 1e9 for sample in told]
    axes.plot(at, [s["ms"] for s in told], "o", mfc="none", color="black", ms=5, label="measured on this machine")


def named(points: Sequence[Point], at: Sequence[float]) -> list[tuple[float, str, list[float]]]:
    """Where documented times of one machine stand: GB, short name of model and format, and all its times."""
    found: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for point, x in zip(points, at, strict=True):
        found.setdefault((point.model, point.quant), (x, []))[1].append(point.ms)
    return [(x, f"{NAMES[model]} {quant}", sorted(times)) for (model, quant), (x, times) in found.items()]


def _needed(machine: str, model: str, quant: str) -> Callable[[Sequence[Sample]], list[float]]:
    points = [point for point in POINTS if (point.machine, point.model, point.quant) == (machine, model, quant)]
    return lambda samples: [needed(samples, point) for point in points] if samples else []


def _bytes_ratio(larger: str, smaller: str, context: int) -> Callable[[Sequence[Sample]], list[float]]:
    def measured(samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        return [gigabytes(samples, larger, "q4", context) / gigabytes(samples, smaller, "q4", context)]

    return measured


def _possible(machine: str) -> Callable[[list[float]], bool]:
    return lambda values: min(values) <= MACHINES[machine].bandwidth


def _near(printed: float) -> Callable[[list[float]], bool]:
    return lambda values: 1 / SAME_BOARD <= values[0] / printed <= SAME_BOARD


def _bandwidth_figure(machine: str, model: str, quant: str, what: str, more: str = "") -> Documented:
    rate = MACHINES[machine].bandwidth
    return Documented(
        f"{what} is possible: bandwidth that it needs",
        f"{rate} GB/s at most",
        rate,
        "GB/s",
        "; ".join(p.source for p in POINTS if (p.machine, p.model, p.quant) == (machine, model, quant)),
        f"{machine}: {MACHINES[machine].source}",
        _needed(machine, model, quant),
        _possible(machine),
        "bytes of a token over the documented time; of several documented times at least one needs no more than the "
        f"memory can give{more}",
    )


OWN = (
    "no document states this; the question is this project's own, whether memory sets the time of both models, and "
    "what is documented are only the two times"
)

FIGURES = (
    _bandwidth_figure(BOARD, TWO, "q4", "2B on the board in 50 to 55 ms per token, if its weights are q4,"),
    _bandwidth_figure(
        *(BOARD, TWO, "q8", "2B on the board in 50 to 55 ms per token, if its weights are q8,"),
        ". At 50 ms it is not: that needs 36.6 of 34.1 GB/s; at 55 ms it needs 33.3, which no program reaches in "
        "practice, so that q4 or a rounded time is likelier",
    ),
    _bandwidth_figure(BOARD, EIGHT, "q4", "8B q4 on the board in 185 ms per token"),
    _bandwidth_figure(BOARD, THIRTY, "q4", "30B-A3B q4 on the board in 197 to 324 ms per token"),
    _bandwidth_figure(N1, EIGHT, "q4", "8B q4 on 64 N1 cores in 35 ms per token"),
    _bandwidth_figure(N1, THIRTY, "q4", "30B-A3B q4 on 64 N1 cores in 109.5 ms per token"),
    Documented(
        "bytes that q4 weights add to those of a 2B model in q8",
        "4.16 - 3.19 = 0.97 GB",
        0.97,
        "GB",
        "docs of the original, a converter's log",
        "sizes of the file that holds both (mode dual) and of the one in q8",
        lambda samples: [gigabytes(samples, TWO, "q4", 0)] if samples else [],
        lambda values: abs(values[0] / 0.97 - 1) <= 0.1,
        "within a tenth; decoder and head in q4, which is what a token reads of them",
    ),
    Documented(
        "8B over 2B on the board goes by the bytes read",
        "185 / 50 = 3.7",
        3.7,
        "",
        "changelog and article 20-3",
        "RK3588, 4 threads, short context, 8B in q4; the format of the 2B is not stated",
        _bytes_ratio(EIGHT, TWO, 64),
        None,
        "no document states this; the ratio of the bytes if both are q4, while with a 2B in q8 it is 2.3, and which of "
        "them was timed is not stated",
    ),
    Documented(
        "30B-A3B over 8B on the board goes by the bytes read",
        "324 / 185 = 1.75",
        1.75,
        "",
        "changelog",
        "RK3588, q4, 4 threads, all weights resident, warm",
        _bytes_ratio(THIRTY, EIGHT, 64),
        _near(1.75),
        f"{OWN}. Expected is that both ratios agree within a factor of {SAME_BOARD}. They do not: the mixture reads "
        "less than half of what 8B does and takes longer, so that something else than memory sets its time (of the "
        "highest bandwidth it needs a sixth, in the table of documented times)",
        category="question",
    ),
    Documented(
        "30B-A3B over 8B on 64 N1 cores goes by the bytes read",
        "109.5 / 35 = 3.1",
        3.1,
        "",
        "N1 report",
        "64 Neoverse-N1 cores, q4, the best number of threads of each",
        _bytes_ratio(THIRTY, EIGHT, 256),
        _near(3.1),
        f"{OWN}. Likewise: it needs a twelfth of the highest bandwidth",
        category="question",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"repeats": 2})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
