"""The cost of pictures: what is told of made-up samples, and that a real picture is encoded only while it is new."""

import pytest

from experiments import image_cost
from experiments.bench_steps import open_inference
from experiments.image_cost import EXPERIMENT, FIRST, NAMES, REUSED, SECOND, TOWER

TIMES = {TOWER: 4000.0, FIRST: 6000.0, SECOND: 2000.0, REUSED: 300.0}


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--repeats", "2"])
    found = [{"cell": cell, "bytes": 8_400_000} | TIMES for cell in EXPERIMENT.cells(options)]
    times = " | ".join(f"{ms:.1f} ({ms:.1f}..{ms:.1f})" for ms in TIMES.values())
    assert f"| 512 x 512 | 1024 | {times} | 21,650 |" in EXPERIMENT.table(found, options)
    told = {figure.what: figure.found(found) for figure in EXPERIMENT.figures}
    assert told["vision tower, 512 x 512"]["measured"] == 4
    ratio = told["first token, picture seen before over new"]
    assert (ratio["measured"], ratio["verdict"]) == (pytest.approx(1 / 3), "cannot be judged on this machine")
    again = told["vision tower, 512 x 512, each time over the median"]
    assert (again["measured"], again["n"], again["verdict"]) == (1, 2, "holds")
    assert told["first token, picture seen before and all before it too"]["measured"] == 0.3
    assert told["memory of an encoded picture, 512 x 512"]["measured"] == 8.4
    assert EXPERIMENT.plot(found, options).axes
    alone = EXPERIMENT.figures[3].found(found[:3])
    assert alone["verdict"] == "not measured"


def test_a_model_without_a_tower_is_told_so():
    opening = image_cost.session(EXPERIMENT.parse(["--model", "tiny-moe"]))
    with pytest.raises(SystemExit, match="tiny-moe takes no pictures"), opening:
        pass


def test_a_picture_is_encoded_while_it_is_new(monkeypatch):
    inference = open_inference("tiny-vl", "q4", "int8")
    encoded = []
    encode = inference.encode
    monkeypatch.setattr(inference, "encode", lambda *picture: encoded.append(picture) or encode(*picture))
    told = image_cost.see(inference, 64, 0)
    assert set(told) == {*NAMES, "bytes"}
    assert min(told.values()) > 0
    assert len(encoded) == 3  # alone, new without reuse, new with it


def test_one_repeat_that_takes_longer_is_noticed():
    options = EXPERIMENT.parse(["--size", "512", "--repeats", "3"])
    found = [
        {"cell": cell, "bytes": 1} | TIMES | {TOWER: 1e3 * (12 if cell["repeat"] == 1 else 10)}
        for cell in EXPERIMENT.cells(options)
    ]
    again = EXPERIMENT.figures[3].found(found)
    assert (again["lowest"], again["highest"], again["verdict"]) == (1, 1.2, "does not hold")
