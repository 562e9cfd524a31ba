"""The results that are kept in the repository tell of the figures as the experiments have them."""

import json

import pytest

from experiments.bench import ROOT
from experiments.report import EXPERIMENTS

TOLD = ("what", "printed", "unit", "source", "configuration", "why", "category")


def told(figure: dict) -> dict:
    """What a figure is, whatever was measured of it."""
    return {name: figure.get(name) for name in TOLD}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_kept_figures_are_worded_as_the_experiment_words_them(name):
    kept = json.loads((ROOT / "results" / name / "figures.json").read_text())["figures"]
    assert [told(figure) for figure in kept] == [told(figure.unmeasured()) for figure in EXPERIMENTS[name].figures], (
        f"render anew: python -m experiments.{name} --render"
    )
