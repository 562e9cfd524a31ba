"""The report of a training run: its plot shows every loss there is, and its card tells what happened."""

from typing import Any

import matplotlib.pyplot as plt
import pytest

from experiments.tiny_models import TINY_MODELS
from experiments.tiny_report import accuracy_table, card, plot

SEEING = [{"seconds": 30.0 * step, "seeing": 4.0 / step} for step in (1, 2, 3)]
TRAINING = [
    {"step": 50, "seconds": 120.0, "rate": 0.003, "loss": 2.5},
    {"step": 73, "seconds": 150.0, "accuracy": {"counting": 0.25, "greeting": 0.5}},
    {"step": 100, "seconds": 240.0, "rate": 0.001, "loss": 0.123},
]
ROWS = [
    {"task": "counting", "right": True},
    {"task": "counting", "right": False},
    {"task": "greeting", "right": True},
    {"task": "counting", "right": True},
]


def curves(entries: list[dict[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """The labelled lines of a plot with their minutes and values."""
    figure = plot(entries, "tiny")
    lines = [line for axes in figure.axes for line in axes.get_lines() if not line.get_label().startswith("_")]
    plt.close(figure)
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_the_plot_shows_losses_and_accuracies() -> None:
    assert curves(TRAINING) == {
        "answers: weighted cross-entropy": ([2.0, 4.0], [2.5, 0.123]),
        "counting": ([2.5], [25.0]),
        "greeting": ([2.5], [50.0]),
    }


def test_the_plot_shows_the_towers_loss_if_there_is_one() -> None:
    shown = curves(SEEING + TRAINING)
    assert shown.pop("vision tower alone: cell loss") == ([0.5, 1.0, 1.5], [4.0, 2.0, pytest.approx(4 / 3)])
    assert shown == curves(TRAINING)


def test_a_run_without_evaluations_can_be_shown() -> None:
    assert list(curves(TRAINING[:1])) == ["answers: weighted cross-entropy"]


def test_the_table_counts_right_answers() -> None:
    assert "| counting | 2 | 3 | 66.7% |\n| greeting | 1 | 1 | 100.0% |" in accuracy_table(ROWS)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_card_tells_how_the_model_was_trained(name: str) -> None:
    text = card(TINY_MODELS[name], ROWS, SEEING + TRAINING)
    assert f"\n# {name}\n" in text
    assert "100 steps in 4 minutes" in text
    assert "loss 0.1230." in text
    assert "| counting | 2 | 3 | 66.7% |" in text
    assert ("tower learned alone for the first 6% of the time" in text) == (name == "tiny-vl")
    assert ("The next 12% of the time" if name == "tiny-vl" else "The first 12% of the time") in text
    assert "{" not in text
