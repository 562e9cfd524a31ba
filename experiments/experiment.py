"""What the experiments of the reproduction have in common: cells measured in turn, raw samples from which a stopped run
goes on, a table, a plot, and documented figures set beside what was measured.

A cell is one condition in one repeat. Cells are measured in the order in which an experiment lists them, in which
conditions alternate, and each is written to `raw.jsonl` as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench import ROOT, Sample, command_line
from experiments.environment import board, write_environment

Cell = dict[str, Any]
Measure = Callable[[Cell], list[Sample]]
Verdict = Literal["holds", "does not hold", "cannot be judged on this machine"]

ELSEWHERE = "an absolute time of another machine"
SAME_BOARD = 1.25  # on the documented board, a figure holds within this factor
# Told apart without colour too: by dashes, markers and hatches.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


@dataclass(frozen=True)
class Documented:
    """A figure of the articles or documents of the original, and how it is found and judged here.

    `printed` is the figure as printed, `value` the number of it that the median of `measured` is divided by, both in
    `unit`. `holds` says of the measured values whether they bear it out; None marks an absolute figure, which only the
    board that it was measured on can repeat. `why` says what the verdict rests on.
    """

    what: str
    printed: str
    value: float | None
    unit: str
    source: str
    configuration: str
    measured: Callable[[Sequence[Sample]], list[float]]
    holds: Callable[[list[float]], bool] | None = None
    why: str = ELSEWHERE

    def found(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The figure as a row of `figures.json`. One for which nothing was measured has no `measured`."""
        values = self.measured(samples)
        told = {name: getattr(self, name) for name in ("what", "printed", "unit", "source", "configuration", "why")}
        if not values:
            return told | {"verdict": "cannot be judged on this machine", "why": "not measured in this run"}
        middle = median(values)
        ratio = None if not self.value else middle / self.value
        numbers = {"measured": middle, "lowest": min(values), "highest": max(values), "n": len(values), "ratio": ratio}
        return told | numbers | {"verdict": self._verdict(values, ratio)}

    def _verdict(self, values: list[float], ratio: float | None) -> Verdict:
        if self.holds is not None:
            return "holds" if self.holds(values) else "does not hold"
        if "RK3588" not in board() or ratio is None:
            return "cannot be judged on this machine"
        return "holds" if 1 / SAME_BOARD <= ratio <= SAME_BOARD else "does not hold"


class Raw:
    """The samples of a run, in a file whose first line holds the run's settings."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.settings: dict[str, Any] | None = None
        self.samples: list[Sample] = []
        if file.is_file():
            head, *rows = file.read_text().splitlines()
            self.settings = json.loads(head)["settings"]
            self.samples = [json.loads(row) for row in rows]

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Drops what was measured, for a new run."""
        self.settings, self.samples = dict(settings), []
        self.file.write_text(json.dumps({"settings": settings}) + "\n")

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that were not measured."""
        done = {json.dumps(sample["cell"]) for sample in self.samples}
        return [cell for cell in cells if json.dumps(cell) not in done]

    def add(self, cell: Cell, samples: Sequence[Sample]) -> None:
        """Keeps the samples of a cell, all at once."""
        rows = [{"cell": cell} | sample for sample in samples]
        self.samples += rows
        with self.file.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Experiment:
    """One experiment. `cells` lists what is to be measured; `session` opens what it is measured on, and gives the
    function that measures one cell; `quick` holds the options that `--quick` changes."""

    name: str
    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    quick: Mapping[str, Any]
    cells: Callable[[argparse.Namespace], list[Cell]]
    session: Callable[[argparse.Namespace], AbstractContextManager[Measure]]
    table: Callable[[Sequence[Sample], argparse.Namespace], str]
    plot: Callable[[Sequence[Sample], argparse.Namespace], Figure]
    figures: Sequence[Documented]

    @classmethod
    def of_module(cls, module: ModuleType, quick: Mapping[str, Any]) -> Experiment:
        """The experiment that a module is: named as its file, told by its docstring, made of its functions
        `add_options`, `cells`, `session`, `table` and `plot`, and of its `FIGURES`."""
        return cls(
            Path(module.__file__).stem,
            module.__doc__,
            module.add_options,
            quick,
            module.cells,
            module.session,
            module.table,
            module.plot,
            module.FIGURES,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options of a command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m experiments.{self.name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--render", action="store_true", help="only write table and plot of what was measured")
        parser.add_argument(
            "--quick", action="store_true", help="a small run, in a folder for temporary files if --out names none"
        )
        parser.add_argument("--out", type=Path, default=ROOT / "results" / self.name, help="folder of the results")
        if "--quick" in arguments:
            parser.set_defaults(**self.quick, out=Path(tempfile.gettempdir()) / f"kestrel_{self.name}")
        return parser.parse_args(arguments)

    def run(self, arguments: Sequence[str]) -> Path:
        """Measures and writes the folder of results, which it returns. A run with these settings that was stopped goes
        on; one that is complete begins anew."""
        options = self.parse(arguments)
        folder: Path = options.out
        folder.mkdir(parents=True, exist_ok=True)
        raw = Raw(folder / "raw.jsonl")
        if not options.render:
            self._measure(raw, options)
        self._write(folder, raw.samples, options, arguments)
        return folder

    def _measure(self, raw: Raw, options: argparse.Namespace) -> None:
        """Every cell that is missing."""
        before, cells, settings = os.getloadavg(), self.cells(options), self._settings(options)
        if raw.settings != settings or not raw.missing(cells):
            raw.begin(settings)
        with self.session(options) as measure:
            for cell in tqdm(raw.missing(cells), desc=self.name, unit="cell"):
                raw.add(cell, measure(cell))
        write_environment(raw.file.parent, load_average_before=before, settings_of_run=settings)

    def _settings(self, options: argparse.Namespace) -> dict[str, Any]:
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "render")}
        return json.loads(json.dumps(settings, default=str))

    def _write(
        self, folder: Path, samples: Sequence[Sample], options: argparse.Namespace, arguments: Sequence[str]
    ) -> None:
        """Table, plot and figures of all samples."""
        shown = [argument for argument in arguments if argument != "--render"]
        command = command_line(self.name, shown)
        text = self.table(samples, options)
        (folder / "table.md").write_text(f"    {command}\n\n{text}")
        print(text)
        mpl.use("Agg")
        mpl.rcParams["svg.hashsalt"] = self.name  # the same samples give the same file
        figure = self.plot(samples, options)
        figure.savefig(folder / "plot.svg", metadata={"Date": None})
        figure.savefig(folder / "plot.png", dpi=110)
        plt.close(figure)
        found = {"experiment": self.name, "command": command, "figures": [each.found(samples) for each in self.figures]}
        (folder / "figures.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def of(samples: Sequence[Sample], **cell: Any) -> list[Sample]:
    """The samples whose cell has these values."""
    return [sample for sample in samples if all(sample["cell"].get(name) == value for name, value in cell.items())]
