"""What bench_decode and bench_prefill have in common: options, turns, raw samples, and how results are written."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from experiments.bandwidth import ReadBandwidth
from experiments.environment import write_environment
from experiments.llama_cpp import check_llama_cpp
from experiments.turns import Subject
from models.cache import CACHE_TYPES
from models.compilation import cache_folder
from models.quantisation import SCHEMES
from models.weights import DTYPES

ROOT = Path(__file__).parent.parent
OURS, THEIRS = "kestrel-jax", "llama.cpp"
PAUSE = 0.2  # seconds before a turn, in which the threads of the one before go to sleep

Sample = dict[str, Any]


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that both have."""
    made = argparse.ArgumentParser(prog=f"python -m experiments.{name}", description=description)
    made.add_argument("--model", default="qwen3-vl-2b", help="a preset, or a model or folder for its shape")
    made.add_argument("--quant", nargs="+", choices=(*SCHEMES, *DTYPES), default=["q4"], help="formats of the weights")
    made.add_argument("--kv", choices=CACHE_TYPES, default="int8", help="the cache's type")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores to use")
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--vs", choices=(THEIRS,), help="another program that takes turns with this one")
    made.add_argument("--vs-kv", default="f16", help="the type of llama.cpp's cache (f16 is its own choice; q8_0)")
    made.add_argument(
        "--separately",
        action="store_true",
        help="measure one program after the other instead of in turns, where memory does not hold both",
    )
    made.add_argument("--quick", action="store_true", help="check in about a minute that everything works")
    made.add_argument("--out", type=Path, default=ROOT / "results" / name, help="folder of the results")
    return made


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str], quick: dict[str, Any]) -> argparse.Namespace:
    """The options; with `--quick` those that are not given are taken from `quick`, and results go to a new folder."""
    if "--quick" in arguments:
        parser.set_defaults(**quick, model="tiny-vl", repeats=2, out=Path(tempfile.mkdtemp(prefix="bench_")))
    options = parser.parse_args(arguments)
    if options.vs:
        check_llama_cpp()
    return options


@contextmanager
def llama_model_file() -> Iterator[Path]:
    """Where llama.cpp's model can be written, for as long as it is needed; model files are large."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="llama_cpp_") as folder:
        yield Path(folder) / "model.gguf"


@dataclass(frozen=True)
class Program:
    """What takes turns: `make(*arguments)` gives the object whose methods are the turns."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]


def take_turns(
    programs: dict[str, Program], turns: Sequence[dict[str, Any]], method: str, options: argparse.Namespace
) -> Iterator[Sample]:
    """Calls `method` of every program with the arguments of each turn, as often as `options` say, and yields what it
    returns with the turn's arguments and a sample of the read bandwidth taken just before.

    Within a repeat the programs alternate turn by turn, and the order changes from repeat to repeat; with
    `--separately` all of one program's repeats come first. What comes before the first repeat is not measured.
    """
    sets = [[name] for name in programs] if options.separately else [list(programs)]
    total = len(programs) * len(turns) * options.repeats
    with Subject(options.threads, ReadBandwidth, options.threads) as bandwidth, tqdm(total=total, unit="turn") as bar:
        for names in sets:
            with ExitStack() as stack:
                subjects = {
                    name: stack.enter_context(Subject(options.threads, programs[name].make, *programs[name].arguments))
                    for name in names
                }
                for turn, name in product(turns, names):
                    subjects[name].call(method, *turn.values())
                for repeat, turn in product(range(options.repeats), turns):
                    for name in names if repeat % 2 == 0 else reversed(names):
                        time.sleep(PAUSE)
                        before = {"program": name, "repeat": repeat, "bandwidth": bandwidth.call("sample")}
                        yield turn | before | subjects[name].call(method, *turn.values())
                        bar.update()


def command_line(name: str, arguments: Sequence[str]) -> str:
    """The command that runs an experiment."""
    return shlex.join([".venv/bin/python", "-m", f"experiments.{name}", *arguments])


class Results:
    """The folder of a measurement: raw samples as they come, then the table and the environment."""

    def __init__(self, name: str, options: argparse.Namespace, arguments: Sequence[str], raw: str) -> None:
        """`raw` is the name of the file of samples."""
        self.folder: Path = options.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.raw = self.folder / raw
        self.raw.write_text("")
        self.command = command_line(name, arguments)
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Keeps a sample, at once also on disk."""
        self.samples.append(sample)
        with self.raw.open("a") as file:
            file.write(json.dumps(sample) + "\n")

    def write(self, file: str, text: str) -> None:
        """Writes and prints a table, below the command that remakes it; and the environment."""
        (self.folder / file).write_text(f"    {self.command}\n\n{text}")
        write_environment(self.folder)
        print(text)


def write_results(
    name: str,
    options: argparse.Namespace,
    arguments: Sequence[str],
    measure: Callable[[argparse.Namespace], Iterable[Sample]],
    table: Callable[[Sequence[Sample], argparse.Namespace], str],
) -> None:
    """Measures, keeps every sample, and writes and prints the table made of them."""
    results = Results(name, options, arguments, raw="raw.jsonl")
    for sample in measure(options):
        results.add(sample)
    results.write("table.md", table(results.samples, options))


def note(options: argparse.Namespace) -> str:
    """How to read a table of these options."""
    text = (
        f"Shape of {options.model}, random weights, {options.kv} cache, {options.threads} threads; median of "
        f"{options.repeats} repeats (lowest..highest). "
    )
    if options.vs is None:
        return text
    order = "each measured alone" if options.separately else "in turns with this one, ratios taken within a repeat"
    return f"{text}llama.cpp (xllamacpp {version('xllamacpp')}, {options.vs_kv} cache) runs the same shape, {order}. "


def select(samples: Iterable[Sample], **fields: Any) -> list[Sample]:
    """The samples with these values, in the order of their repeats."""
    found = (sample for sample in samples if all(sample[name] == value for name, value in fields.items()))
    return sorted(found, key=lambda sample: sample["repeat"])


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, with the lowest and the highest."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of each pair."""
    return [value / other for value, other in zip(values, others, strict=True)]
