"""What a trained small model can do, measured on held-out conversations through the ordinary inference path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from tqdm import tqdm

import models
from experiments.environment import write_environment
from experiments.tiny_data import conversations
from experiments.tiny_models import TinyModel
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
        source = conversations({"": (task, 1.0)}, Random(f"report {name}"), evaluation=True)
        for messages in tqdm(islice(source, count), total=count, desc=name, leave=False):
            steps = loaded.generate(messages[:-1], max_tokens=LONGEST_ANSWER)
            given, wanted = "".join(step.text for step in steps), messages[-1]["content"]
            asked = messages[-2]["content"]
            text = asked if isinstance(asked, str) else asked[-1]["text"]
            right = given.split() == wanted.split()
            rows.append({"task": name, "asked": text, "wanted": wanted, "given": given, "right": right})
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
    plot(entries, model.name, results)
    write_environment(results)
    (folder / "README.md").write_text(card(model, rows, entries))


def plot(entries: list[Mapping[str, Any]], name: str, results: Path) -> None:
    """Loss, and held-out accuracy per task, over the training time."""
    mpl.use("Agg")
    figure, (losses, accuracies) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, layout="constrained")
    curve = [entry for entry in entries if "loss" in entry]
    losses.plot([entry["seconds"] / 60 for entry in curve], [entry["loss"] for entry in curve], color="black", lw=1)
    losses.set(yscale="log", ylabel="weighted cross-entropy (nats)", title=f"{name}: training")
    points = [entry for entry in entries if "accuracy" in entry]
    styles = [(marker, dash) for marker in "os^Dv" for dash in ("-", "--", ":")]
    tasks = dict.fromkeys(task for point in points for task in point["accuracy"])
    for task, (marker, dash) in zip(tasks, styles, strict=False):
        known = [point for point in points if task in point["accuracy"]]
        values = [100 * point["accuracy"][task] for point in known]
        accuracies.plot([point["seconds"] / 60 for point in known], values, dash, marker=marker, ms=4, lw=1, label=task)
    accuracies.axhline(100 * WANTED, color="grey", lw=0.8)
    accuracies.set(ylabel="held-out answers exactly right (%)", xlabel="training time (minutes)", ylim=(-2, 102))
    accuracies.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(results / "plot.svg")
    figure.savefig(results / "plot.png", dpi=110)
    plt.close(figure)


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
    )
