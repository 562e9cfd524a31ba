"""What a trained small model can do, measured on held-out conversations through the ordinary inference path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

import models
from experiments.environment import write_environment
from experiments.exercises import held_out, is_right
from experiments.tiny_models import COPYING_FOR, FINISHING_FROM, LOOKING_FROM, PRACTISING_FROM, SEEING_UNTIL, TinyModel
from experiments.tiny_tasks import Task, outside

WANTED = 0.97
LONGEST_ANSWER = 160  # tokens


def evaluate(model: TinyModel, folder: Path, count: int) -> list[dict[str, Any]]:
    """Asks the exported model `count` held-out conversations per task: a row per conversation with the wanted and the
    given answer. `outside, new wordings` uses sentence patterns that no training conversation has."""
    loaded = models.load(folder)
    tasks: dict[str, Task] = dict(model.tasks()) | {"outside, new wordings": outside(model.pictures, unseen=True)}
    rows = []
    for name, task in tasks.items():
        for messages in tqdm(held_out(task, f"report {name}", count), desc=name, leave=False):
            steps = loaded.generate(messages[:-1], max_tokens=LONGEST_ANSWER)
            given, wanted = "".join(step.text for step in steps), messages[-1]["content"]
            asked = messages[-2]["content"]
            text = asked if isinstance(asked, str) else asked[-1]["text"]
            told = {"task": name, "asked": text, "wanted": wanted, "given": given}
            rows.append(told | {"right": is_right(given, wanted)})
    return rows


def shares(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Right answers and conversations per task."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        right, count = found.get(row["task"], (0, 0))
        found[row["task"]] = (right + row["right"], count + 1)
    return found


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """The shares in Markdown."""
    lines = ["| task | right | of | accuracy |", "|---|---|---|---|"]
    lines += [f"| {name} | {right} | {count} | {right / count:.1%} |" for name, (right, count) in shares(rows).items()]
    return "\n".join(lines) + "\n"


def write_report(model: TinyModel, folder: Path, log: Path, results: Path, count: int) -> None:
    """Evaluates the exported model in `folder`, and writes `results` (answers, table, loss curve, environment) and the
    model card. `log` is the training run's."""
    results.mkdir(parents=True, exist_ok=True)
    rows = evaluate(model, folder, count)
    (results / "answers.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (results / "table.md").write_text(accuracy_table(rows))
    (results / "raw.jsonl").write_text(log.read_text())
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    figure = plot(entries, model.name)
    figure.savefig(results / "plot.svg")
    figure.savefig(results / "plot.png", dpi=110)
    plt.close(figure)
    write_environment(results)
    (folder / "README.md").write_text(card(model, rows, entries))


def plot(entries: list[Mapping[str, Any]], name: str) -> Figure:
    """Losses, and held-out accuracy per task, over the training time."""
    mpl.use("Agg")
    figure, (losses, accuracies) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    _plot_losses(losses, entries)
    losses.set_title(f"{name}: training")
    _plot_accuracies(accuracies, [entry for entry in entries if "accuracy" in entry])
    accuracies.set_xlabel("training time (minutes)")
    return figure


def _plot_losses(axes: Axes, entries: list[Mapping[str, Any]]) -> None:
    for kind, label, colour in (
        ("seeing", "vision tower alone: cell loss", "tab:blue"),
        ("loss", "answers: weighted cross-entropy", "black"),
    ):
        curve = [entry for entry in entries if kind in entry]
        if curve:
            minutes, values = [entry["seconds"] / 60 for entry in curve], [entry[kind] for entry in curve]
            axes.plot(minutes, values, color=colour, lw=1, label=label)
    axes.set(yscale="log", ylabel="loss (nats)")
    axes.legend(fontsize=7)


def _plot_accuracies(axes: Axes, points: list[Mapping[str, Any]]) -> None:
    styles = [(marker, dash) for marker in "os^Dv" for dash in ("-", "--", ":")]
    tasks = dict.fromkeys(task for point in points for task in point["accuracy"])
    for task, (marker, dash) in zip(tasks, styles, strict=False):
        known = [point for point in points if task in point["accuracy"]]
        values = [100 * point["accuracy"][task] for point in known]
        axes.plot([point["seconds"] / 60 for point in known], values, dash, marker=marker, ms=4, lw=1, label=task)
    axes.axhline(100 * WANTED, color="grey", lw=0.8)
    axes.set(ylabel="held-out answers exactly right (%)", ylim=(-2, 102))
    if points:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))


CARD = Path(__file__).with_name("tiny_card.md")
PICTURES = """
- pictures of one to three circles, squares and triangles in six colours on a light ground: description, number, colour,
  place, yes or no, questions about the picture of an earlier turn, and saying that there is no picture"""


def card(model: TinyModel, rows: list[dict[str, Any]], entries: list[Mapping[str, Any]]) -> str:
    """The model card: `tiny_card.md` with its blanks filled."""
    last = [entry for entry in entries if "loss" in entry][-1]
    return CARD.read_text(encoding="utf-8").format(
        name=model.name,
        family="Qwen3-VL (text decoder, vision tower, DeepStack)"
        if model.pictures
        else "Qwen3-MoE (8 experts, 2 used)",
        pictures=PICTURES if model.pictures else "",
        sources="`experiments/tiny_tasks.py`" + (" and `experiments/tiny_pictures.py`" if model.pictures else ""),
        accuracy=accuracy_table(rows),
        steps=last["step"],
        minutes=round(last["seconds"] / 60),
        loss=last["loss"],
        phases=_phases(model),
    )


def _phases(model: TinyModel) -> str:
    """What was taught when."""
    copying = (
        f"{COPYING_FOR:.0%} of the time went to conversations that\nmostly need copying (`COPYING_WEIGHTS` in "
        "`experiments/tiny_models.py`), the rest to all of them"
    )
    if not model.pictures:
        return f"The first {copying}."
    return (
        f"The vision tower learned alone for the first {SEEING_UNTIL:.0%} of the time, by a loss that reads the kind, "
        "colour and place\nof a shape out of each visual token along the embeddings of the words for them. "
        f"The next {copying},\nfrom {PRACTISING_FROM:.0%} of the time on more to what is slow to learn of texts "
        f"(`PRACTICE_WEIGHTS`),\nfrom {LOOKING_FROM:.0%} on of pictures (`LOOKING_WEIGHTS`), from {FINISHING_FROM:.0%} "
        "on of both (`FINISHING_WEIGHTS`)."
    )
