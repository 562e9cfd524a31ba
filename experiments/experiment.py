"""What the experiments of the reproduction have in common: cells measured in turn, raw samples from which a stopped run
goes on, a table, a plot, and documented figures set beside what was measured.

A cell is one condition in one repeat. Cells are measured in the order in which an experiment lists them, in which
conditions alternate, and each is written to `raw.jsonl` as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bandwidth import ReadBandwidth
from experiments.bench import ROOT, Sample, command_line
from experiments.environment import board, model_fingerprint, write_environment
from experiments.served import folder_of
from experiments.tiny_models import TINY_MODELS

Cell = dict[str, Any]
Measure = Callable[[Cell], list[Sample]]
Category = Literal["documented", "question", "guarantee", "beside"]
Verdict = Literal[
    "holds",
    "does not hold",
    "cannot be judged on this machine",
    "not measured",
    "answered",
    "answered otherwise than expected",
    "kept",
    "broken",
    "measured",
]

VERDICTS: Mapping[str, tuple[Verdict, Verdict]] = {
    "documented": ("holds", "does not hold"),
    "question": ("answered", "answered otherwise than expected"),
    "guarantee": ("kept", "broken"),
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DOCUMENTED_BOARD = "RK3588"
SAME_BOARD = 1.25  # on the documented board, an absolute figure holds if it is worse by no more than this factor
ELSEWHERE = (
    f"an absolute figure of another machine; on an {DOCUMENTED_BOARD} it holds if it is worse by no more than a factor "
    f"of {SAME_BOARD}"
)
BESIDES = "[Raw data](raw.jsonl), [environment](environment.json), [plot](plot.svg)."
# Told apart without colour too: by dashes, markers and hatches.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


@dataclass(frozen=True)
class Documented:
    """A figure of the articles or documents of the original, and how it is found and judged here.

    `printed` is the figure as printed, `value` the number of it that the median of `measured` is divided by, both in
    `unit`. `why` says what the verdict rests on.

    `holds` says of the measured values whether they bear out what `category` says it is: a statement of the document;
    a question that it asks its reader, of which `holds` is what is expected; a guarantee of this project where the
    document has none; or what is measured beside documented figures, with nothing to hold. Without `holds` a statement
    cannot be judged, unless `absolute` marks it as a time or memory ("at most") or a rate ("at least") of the
    documented board, which such a board has to reach. `over_network` marks an absolute figure that means nothing with
    the client on the server's machine.
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
    absolute: Literal["at most", "at least"] | None = None
    category: Category = "documented"
    over_network: bool = False

    def found(self, samples: Sequence[Sample], machine: str | None = None, *, remote: bool = False) -> dict[str, Any]:
        """The figure as a row of `figures.json`. One for which nothing was measured has no `measured`. `machine` names
        what was measured (None: this one), `remote` says that its client was another."""
        values = self.measured(samples)
        if not values:
            return self.unmeasured()
        middle = median(values)
        ratio = None if not self.value else middle / self.value
        numbers = {"measured": middle, "lowest": min(values), "highest": max(values), "n": len(values), "ratio": ratio}
        documented = DOCUMENTED_BOARD in (board() if machine is None else machine).upper()
        on_board = documented and (remote or not self.over_network)
        return self._told() | numbers | {"verdict": self._verdict(values, ratio, on_board)}

    def unmeasured(self) -> dict[str, Any]:
        """The row of a figure that was not measured."""
        return self._told() | {"verdict": "not measured"}

    def _told(self) -> dict[str, Any]:
        names = ("what", "printed", "unit", "source", "configuration", "why", "category")
        return {name: getattr(self, name) for name in names}

    def _verdict(self, values: list[float], ratio: float | None, on_board: bool) -> Verdict:
        if self.holds is not None:
            return VERDICTS[self.category][0 if self.holds(values) else 1]
        if self.category in ("question", "beside"):
            return "answered" if self.category == "question" else "measured"
        if self.absolute is None or ratio is None or not on_board:
            return "cannot be judged on this machine"
        reached = ratio <= SAME_BOARD if self.absolute == "at most" else ratio >= 1 / SAME_BOARD
        return "holds" if reached else "does not hold"


class Raw:
    """The samples of a run, in a file whose first line holds the run's settings and the arguments that it got."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.settings: dict[str, Any] | None = None
        self.arguments: list[str] | None = None
        self.samples: list[Sample] = []
        if file.is_file():
            head, *rows = map(json.loads, file.read_text().splitlines())
            self.settings, self.arguments = head["settings"], head.get("arguments")
            self.samples = rows

    def begin(self, settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
        """Drops what was measured, for a new run."""
        self.settings, self.arguments, self.samples = dict(settings), list(arguments), []
        self.file.write_text(json.dumps({"settings": settings, "arguments": self.arguments}) + "\n")

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
        parser.add_argument(
            "--out", type=Path, help=f"folder of the results: results/{self.name}, or in a folder of the server's"
        )
        if "--quick" in arguments:
            parser.set_defaults(**self.quick)
        options = parser.parse_args(arguments)
        options.out = options.out or self._folder(options)
        return options

    def _folder(self, options: argparse.Namespace) -> Path:
        """Where results go if nothing else is said: those of each server that ran already by themselves."""
        url = getattr(options, "url", None)
        if options.quick:
            return Path(tempfile.gettempdir()) / "_".join(["kestrel", *([folder_of(url)] if url else []), self.name])
        return ROOT / "results" / (folder_of(url) if url else "") / self.name

    def run(self, arguments: Sequence[str]) -> Path:
        """Measures and writes the folder of results, which it returns. A run with these settings that was stopped goes
        on; one that is complete begins anew. With `--render` table and plot are those of the run that was measured,
        whatever else the arguments say.

        Raises:
            SystemExit: there is nothing to render.
        """
        options = self.parse(arguments)
        folder: Path = options.out
        folder.mkdir(parents=True, exist_ok=True)
        raw = Raw(folder / "raw.jsonl")
        if options.render:
            if not raw.samples:
                sys.exit(f"{raw.file} holds nothing that was measured; run this without --render")
            given = [argument for argument in arguments if argument != "--render"]
            arguments = given if raw.arguments is None else raw.arguments
            options = self.parse(arguments)
        else:
            self._measure(raw, options, arguments)
        self._write(folder, raw.samples, options, arguments)
        print(f"{self.name}: results in {os.path.relpath(folder)}")
        return folder

    def _measure(self, raw: Raw, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        """Every cell that is missing."""
        before, cells, settings = os.getloadavg(), self.cells(options), self._settings(options)
        if raw.settings != settings or not raw.missing(cells):
            raw.begin(settings, arguments)
        with self.session(options) as measure:
            for cell in tqdm(raw.missing(cells), desc=self.name, unit="cell"):
                raw.add(cell, measure(cell))
        told = {"load_average_before": before, "settings_of_run": settings, "models": _fingerprints(options)}
        if getattr(options, "server_machine", None):
            told["server_machine"] = options.server_machine
        if not options.quick:
            told["bandwidth"] = ReadBandwidth(len(os.sched_getaffinity(0))).sample()  # GB/s
        write_environment(raw.file.parent, **told)

    def _settings(self, options: argparse.Namespace) -> dict[str, Any]:
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "render")}
        return json.loads(json.dumps(settings, default=str))

    def _write(
        self, folder: Path, samples: Sequence[Sample], options: argparse.Namespace, arguments: Sequence[str]
    ) -> None:
        """Table, plot and figures of all samples."""
        command = command_line(self.name, arguments)
        text = self.table(samples, options)
        (folder / "table.md").write_text(f"    {command}\n\n{BESIDES}\n\n{text}")
        print(text)
        mpl.use("Agg")
        mpl.rcParams["svg.hashsalt"] = self.name  # the same samples give the same file
        figure = self.plot(samples, options)
        figure.savefig(folder / "plot.svg", metadata={"Date": None})
        figure.savefig(folder / "plot.png", dpi=110)
        plt.close(figure)
        machine, remote = judged_machine(options, folder)
        figures = [each.found(samples, machine, remote=remote) for each in self.figures]
        found = {"experiment": self.name, "command": command, "figures": figures}
        (folder / "figures.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def judged_machine(options: argparse.Namespace, folder: Path) -> tuple[str, bool]:
    """What was measured, by name, as far as absolute figures go by it, and whether its client was another machine. A
    small model is nothing to set beside a board's times, and of a server that ran already nothing is known but what
    --server-machine says of it."""
    if getattr(options, "url", None):
        remote = urlsplit(options.url).hostname not in LOOPBACK
        return options.server_machine or "", remote
    named = getattr(options, "model", None) or []
    if any(Path(name).name in TINY_MODELS for name in ([named] if isinstance(named, str) else named)):
        return "", False
    file = folder / "environment.json"  # of the run, which may have been on another machine than this one
    return (json.loads(file.read_text()).get("board", "") if file.is_file() else board()), False


def _fingerprints(options: argparse.Namespace) -> dict[str, str]:
    """What tells the models of a run from others of their names; of a server that ran already nothing is known."""
    named = getattr(options, "model", None) or []
    names = [named] if isinstance(named, str) else named
    return {} if getattr(options, "url", None) else {name: model_fingerprint(name) for name in names}


def of(samples: Sequence[Sample], **cell: Any) -> list[Sample]:
    """The samples whose cell has these values."""
    return [sample for sample in samples if all(sample["cell"].get(name) == value for name, value in cell.items())]


def by_repeat(samples: Sequence[Sample], **cell: Any) -> list[Sample]:
    """The same in the order of their repeats, however these alternated."""
    return sorted(of(samples, **cell), key=lambda sample: sample["cell"]["repeat"])
