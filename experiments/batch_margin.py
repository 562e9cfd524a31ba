"""When does batching change a token? Logits of every step alone and in a batch of eight, and the margin between them.

Claims: with kernels whose result for a row does not depend on its neighbours, nothing changes, not even the last bit.
With others a token flips only where the margin (largest logit minus second largest) is less than twice the difference
that batching makes to a logit. That rule follows from what a flip is, and only the emulated engine puts it to the test:
XLA's operations differ in every step, but by so little that no token flips. Documented: a margin of 0.71 is safe, one
of 0.032 flips. Cost: eighteen minutes on 2 cores.

    python -m experiments.batch_margin

Writes results/batch_margin/. Each step of eight conversations is computed once alone and once together, both after the
tokens that the model chose alone. `--model DIR` measures a real checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.engines import BY_WIDTH, ENGINES, FLOAT_KERNELS, KERNELS, XLA, EngineSteps
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.tiny_data import conversations
from experiments.tiny_tasks import text_tasks
from models import LoadedModel

ROWS = 8
LONGEST = 48  # tokens of an answer
NOISE_LENGTH = 12  # tokens of a prompt of random tokens
RUNS = 32  # answers to one prompt under changing load
WIDTHS = (1, 2, 4, 8)
CONTEXT = 512
QUESTIONS, NOISE, LOAD = "questions", "random tokens", "changing load"
SAFE, RISKY = 0.71, 0.032
SOURCE = "article 14-2 (title of 14-3); docs of the original"
BOARD = "x86, 8B, 16 threads, greedy, 8 requests (probably); prompts not stated"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Models, engines and how much is measured."""
    parser.add_argument("--model", nargs="+", default=["tiny-vl", "tiny-moe"], help="trained models or folders")
    parser.add_argument("--groups", type=int, default=120, help=f"of {ROWS} questions, and of {ROWS} random prompts")
    parser.add_argument("--prompts", type=int, default=4, help="that are answered under changing load")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Engines in turn."""
    counts = {QUESTIONS: options.groups, NOISE: options.groups, LOAD: options.prompts}
    return [
        {"model": model, "engine": engine, "kind": kind, "group": group}
        for model in options.model
        for kind, count in counts.items()
        for group in range(count)
        for engine in ENGINES
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """Each model under each engine, opened when it is first needed."""

    @cache
    def opened(model: str, engine: str) -> Comparison:
        return Comparison(EngineSteps(model, ENGINES[engine], ROWS, CONTEXT))

    def measure(cell: Cell) -> list[Sample]:
        comparison = opened(cell["model"], cell["engine"])
        seed = f"{options.seed} {cell['kind']} {cell['group']}"
        prompts = prompts_of(comparison.steps.model, cell["kind"], seed)
        return [comparison.under_load(prompts[0], seed) if cell["kind"] == LOAD else comparison.compare(prompts)]

    yield measure


def prompts_of(model: LoadedModel, kind: str, seed: str) -> list[np.ndarray]:
    """Eight prompts: held-out questions of the small models' tasks, or random tokens, for which a model has no ready
    answer and margins are small."""
    random = Random(seed)
    if kind == QUESTIONS:
        tasks = {name: (task, 1.0) for name, task in text_tasks(pictures=False).items()}
        asked = islice(conversations(tasks, random, evaluation=True), ROWS)
        return [model.prompt(messages[:-1]).token_ids for messages in asked]
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ["".join(random.choices(letters, k=2 * NOISE_LENGTH)) for _ in range(ROWS)]
    return [model.prompt([{"role": "user", "content": text}]).token_ids for text in texts]


class Comparison:
    """Steps alone and together under one engine."""

    def __init__(self, steps: EngineSteps) -> None:
        self.steps = steps

    def compare(self, prompts: Sequence[np.ndarray]) -> Sample:
        """Answers eight prompts, each step once with a row alone and once with all rows: per row and step the margin
        alone, the largest difference of a logit, and whether the most likely token is another."""
        steps, ends = self.steps, self.steps.model.end_tokens
        alone, together = steps.new_cache(), steps.new_cache()
        tokens = np.zeros(ROWS, np.int64)
        for slot, ids in enumerate(prompts):
            logits, alone = steps.prefill(alone, slot, ids)
            _, together = steps.prefill(together, slot, ids)
            tokens[slot] = np.argmax(logits)
        held = np.array([len(ids) for ids in prompts], np.int32)
        slots = np.arange(ROWS, dtype=np.int32)
        found = Differences()
        for _ in range(LONGEST):
            running = ~np.isin(tokens, list(ends))
            if not running.any():
                break
            slots = np.where(running, slots, -1).astype(np.int32)
            batched, together, batched_routing = steps.take(together, tokens[:, None], slots, held)
            for row in np.flatnonzero(running):
                own, alone, routing = steps.take(
                    alone, tokens[row : row + 1, None], slots[row : row + 1], held[row : row + 1]
                )
                found.add(
                    own[0], batched[row], routing.margins[:, 0], routing.chosen[:, 0], batched_routing.chosen[:, row]
                )
                tokens[row] = np.argmax(own[0])
            held = np.where(running, held + 1, held).astype(np.int32)
        return found.sample()

    def under_load(self, prompt: np.ndarray, seed: str) -> Sample:
        """Answers one prompt many times, every step in a batch of another width, and counts the different answers."""
        answers = [self._answer(prompt, Random(f"{seed} {run}")) for run in range(RUNS)]
        first = answers[0]
        splits = [
            next((at for at, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
            for other in answers
        ]
        split = min((at for at in splits if at is not None), default=None)
        return {"unique": len(set(answers)), "runs": RUNS, "tokens": len(first), "first_split": split}

    def _answer(self, prompt: np.ndarray, random: Random) -> tuple[int, ...]:
        logits, layers = self.steps.prefill(self.steps.new_cache(), 0, prompt)
        said, held = [int(np.argmax(logits))], len(prompt)
        while len(said) < LONGEST and said[-1] not in self.steps.model.end_tokens:
            width = random.choice(WIDTHS)
            row = random.randrange(width)
            tokens, slots = np.zeros((width, 1), np.int64), np.full(width, -1, np.int32)
            tokens[row], slots[row] = said[-1], 0
            logits, layers, _ = self.steps.take(layers, tokens, slots, np.full(width, held, np.int32))
            said.append(int(np.argmax(logits[row])))
            held += 1
        return tuple(said)


class Differences:
    """What batching did to the steps of a group."""

    def __init__(self) -> None:
        self.margins: list[float] = []
        self.differences: list[float] = []
        self.flipped: list[int] = []
        self.routes: list[float] = []
        self.rerouted: list[int] = []

    def add(
        self, alone: np.ndarray, together: np.ndarray, margins: np.ndarray, chosen: np.ndarray, others: np.ndarray
    ) -> None:
        """One step of one row: logits `[vocab]` alone and together; the router's margins `[layers]` and the experts
        chosen alone and together, `[layers, top_k]`."""
        second, first = np.partition(alone, -2)[-2:]
        self.margins.append(_short(first - second))
        self.differences.append(_short(np.abs(alone - together).max()))
        if np.argmax(alone) != np.argmax(together):
            self.flipped.append(len(self.margins) - 1)
        if len(margins):
            self.routes.append(_short(margins.min()))
            if (chosen != others).any():
                self.rerouted.append(len(self.margins) - 1)

    def sample(self) -> Sample:
        """All of it; `flipped` and `rerouted` are places in the lists."""
        return vars(self)


def _short(value: Any) -> float:
    """Three digits, which a raw file of 100,000 steps has room for; never rounded down to zero."""
    return float(f"{value:.3g}")


def joined(samples: Sequence[Sample], name: str) -> np.ndarray:
    """One list of all samples that have it."""
    return np.concatenate([np.array(sample[name], float) for sample in samples if name in sample] or [np.zeros(0)])


def flips(samples: Sequence[Sample]) -> np.ndarray:
    """Margin and difference of every step whose token flipped, `[flips, 2]`."""
    pairs = [
        (sample["margins"][place], sample["differences"][place])
        for sample in samples
        if "flipped" in sample
        for place in sample["flipped"]
    ]
    return np.array(pairs, float).reshape(-1, 2)


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per model and engine."""
    lines = [
        f"Every step of {ROWS} conversations alone and together, after the same tokens. The difference is the largest "
        "of any logit; exceptions are flips at a margin of at least twice the difference. A router's margin is the "
        f"smallest of a step's layers. One prompt is answered {RUNS} times in batches of changing width.",
        "",
        "No time is taken, so that there is neither warm-up nor compile time to tell.",
        "",
        "| model | engine | steps | differ | largest difference | margin, median | flips | largest margin of a flip | "
        "exceptions | routed otherwise | router margin, median | different answers to one prompt |",
        "|" + "---|" * 12,
    ]
    for model in options.model:
        for engine in ENGINES:
            lines.append(row(model, engine, of(samples, model=model, engine=engine)))
    return "\n".join(lines) + "\n"


def row(model: str, engine: str, samples: Sequence[Sample]) -> str:
    """One row of the table."""
    margins, differences, found = joined(samples, "margins"), joined(samples, "differences"), flips(samples)
    routes = joined(samples, "routes")
    rerouted = sum(len(sample.get("rerouted", ())) for sample in samples)
    unique = [sample["unique"] for sample in samples if "unique" in sample]
    cells = [
        model,
        engine,
        f"{len(margins):,}",
        f"{np.mean(differences > 0):.1%}",
        f"{differences.max():.3g}",
        f"{np.median(margins):.3g}",
        str(len(found)),
        f"{found[:, 0].max():.3g}" if len(found) else "",
        str(exceptions(found)),
        f"{rerouted:,}" if len(routes) else "",
        f"{np.median(routes):.3g}" if len(routes) else "",
        ", ".join(map(str, unique)),
    ]
    return f"| {' | '.join(cells)} |"


def exceptions(found: np.ndarray) -> int:
    """Flips at a margin of at least twice the difference, which cannot be explained by it."""
    return int(np.sum(found[:, 0] >= 2 * found[:, 1]))


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Difference against margin of every step, and where tokens flip, on the same axes for both engines that differ."""
    shown = [engine.name for engine in (XLA, BY_WIDTH)]
    figure, axes = plt.subplots(1, len(shown), figsize=(11, 5.5), sharex=True, sharey=True, layout="constrained")
    for engine, axis in zip(shown, axes, strict=True):
        found = of(samples, engine=engine)
        plot_engine(axis, found)
        steps = len(joined(found, "margins"))
        axis.set(title=f"{engine}: {steps:,} steps", xlabel="margin alone: largest minus second largest logit")
        axis.set(xscale="log", yscale="log")
    axes[0].set_ylabel("largest difference of a logit, batched against alone")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside lower center")
    same = [
        name for name in ENGINES if len(found := joined(of(samples, engine=name), "differences")) and not found.any()
    ]
    figure.suptitle(f"{' and '.join(same)}: no step differs" if same else "", fontsize=9)
    return figure


def plot_engine(axis: Axes, samples: Sequence[Sample]) -> None:
    """One engine's steps; those without any difference cannot be drawn."""
    margins, differences, found = joined(samples, "margins"), joined(samples, "differences"), flips(samples)
    thinned = max(1, len(margins) // 20000)
    drawn = np.flatnonzero((differences > 0) & (margins > 0))[::thinned]
    label = "steps" if thinned == 1 else f"steps, one in {thinned}"
    # As a picture within the SVG: tens of thousands of marks of their own would take megabytes.
    axis.plot(
        margins[drawn], differences[drawn], ".", ms=1.5, color=COLOURS[0], alpha=0.4, label=label, rasterized=True
    )
    axis.plot(found[:, 0], found[:, 1], "x", ms=6, color=COLOURS[1], label="the token flips")
    if len(drawn):
        lowest, highest = differences[drawn].min() / 2, 2 * max([differences[drawn].max(), *found[:, 1]])
        line = np.array([lowest, highest])
        axis.plot(2 * line, line, "k--", lw=1, label="margin = 2 x difference")
    axis.axvline(SAFE, color="grey", ls="-.", lw=1, label=f"documented as safe: {SAFE}")
    axis.axvline(RISKY, color="grey", ls=":", lw=1, label=f"documented as at risk: {RISKY}")


def _by_engine(read: Callable[[Sequence[Sample]], list[float]], *engines: Any) -> Callable[..., list[float]]:
    names = [engine.name for engine in engines]
    return lambda samples: read([sample for sample in samples if sample["cell"]["engine"] in names])


def _flip_margins(samples: Sequence[Sample]) -> list[float]:
    return flips(samples)[:, 0].tolist()


def _differences(samples: Sequence[Sample]) -> list[float]:
    return joined(samples, "differences").tolist()


def _exceptions(samples: Sequence[Sample]) -> list[float]:
    return [float(exceptions(flips(samples)))] if samples else []


def _steps(samples: Sequence[Sample]) -> list[float]:
    return [float(len(joined(samples, "margins")))] if samples else []


def _flips(samples: Sequence[Sample]) -> list[float]:
    return [float(len(flips(samples)))] if samples else []


def _router_margins(samples: Sequence[Sample]) -> list[float]:
    return joined(samples, "routes").tolist()


def _rerouted(samples: Sequence[Sample]) -> list[float]:
    """The share of a mixture's steps in which some layer chooses other experts."""
    routed = len(joined(samples, "routes"))
    return [sum(len(sample.get("rerouted", ())) for sample in samples) / routed] if routed else []


def _unique(samples: Sequence[Sample]) -> list[float]:
    return [float(sample["unique"]) for sample in samples if "unique" in sample]


FEW_FLIPS = (
    "the values are the margins of the tokens that flipped, in small models with an emulation of kernels picked by "
    "width; the range of their logits is not that of the documented model, and what flips depends on it"
)
UNDOCUMENTED = "no figure is given; measured beside the margins"
FIGURES = (
    Documented(
        "margins that flip, where 0.71 is documented as safe",
        "0.71",
        None,
        "logit",
        SOURCE,
        BOARD,
        _by_engine(_flip_margins, BY_WIDTH),
        why=f"{FEW_FLIPS}. A safe margin is one that nothing flips at, so that no ratio to it says anything",
    ),
    Documented(
        "margins that flip, where 0.032 is documented as at risk",
        "0.032",
        None,
        "logit",
        SOURCE,
        BOARD,
        _by_engine(_flip_margins, BY_WIDTH),
        why=FEW_FLIPS,
    ),
    Documented(
        "a token flips only where the margin is less than twice the difference",
        "stated as a reading rule",
        None,
        "exceptions",
        SOURCE,
        BOARD,
        _by_engine(_exceptions, XLA, BY_WIDTH),
        lambda values: values == [0.0],
        "a check of the measurement, for it follows from what a flip is: flips at a larger margin, over all steps of "
        "XLA's operations and of the emulated engine picked by width. It says little where nothing flips: on how many "
        "steps it was tried, and how many tokens flipped, stands beside it",
    ),
    Documented(
        "steps that the rule was tried on, XLA's operations and the emulated engine",
        "not stated",
        None,
        "steps",
        SOURCE,
        UNDOCUMENTED,
        _by_engine(_steps, XLA, BY_WIDTH),
        why="all steps of all models, each computed alone and in a batch of eight",
        category="beside",
    ),
    Documented(
        "tokens that flipped among them, XLA's operations",
        "not stated",
        None,
        "tokens",
        SOURCE,
        UNDOCUMENTED,
        _by_engine(_flips, XLA),
        why="its differences are those of the last bits of float32, far below the margins",
        category="beside",
    ),
    Documented(
        "tokens that flipped among them, the emulated engine",
        "not stated",
        None,
        "tokens",
        SOURCE,
        UNDOCUMENTED,
        _by_engine(_flips, BY_WIDTH),
        why="an emulation, the only engine here whose tokens flip",
        category="beside",
    ),
    Documented(
        "margin of a mixture's router, last expert chosen against the first left out",
        "not stated",
        None,
        "of probability",
        SOURCE,
        UNDOCUMENTED,
        _by_engine(_router_margins, BY_WIDTH),
        why="the smallest over the layers of each step of the emulated engine; the small mixture chooses 2 of 8 "
        "experts, the documented one 8 of 128, so that there it is the margin of the 8th against the 9th",
        category="beside",
    ),
    Documented(
        "steps of a mixture that are routed otherwise in a batch, the emulated engine",
        "not stated",
        None,
        "of all steps",
        SOURCE,
        UNDOCUMENTED,
        _by_engine(_rerouted, BY_WIDTH),
        why="other experts in at least one layer; the table has the other engines",
        category="beside",
    ),
    Documented(
        "batched logits differ from those of a request alone, XLA's operations",
        "equality is not guaranteed",
        None,
        "logit",
        SOURCE,
        BOARD,
        _by_engine(_differences, XLA),
        lambda values: max(values) > 0,
        "the largest difference of any logit in each step; some must differ",
    ),
    Documented(
        "batched logits are those of a request alone",
        "not guaranteed; own guarantee",
        None,
        "logit",
        SOURCE,
        BOARD,
        _by_engine(_differences, KERNELS, FLOAT_KERNELS),
        lambda values: max(values) == 0,
        "the largest difference of any logit, kernels of this project; it must be 0",
        category="guarantee",
    ),
    Documented(
        "one prompt has one greedy answer whatever the load",
        "not guaranteed; own guarantee",
        None,
        "answers",
        SOURCE,
        BOARD,
        _by_engine(_unique, KERNELS, FLOAT_KERNELS),
        lambda values: set(values) == {1.0},
        f"different answers among {RUNS} in batches of changing width, kernels of this project",
        category="guarantee",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"groups": 2, "prompts": 1})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
