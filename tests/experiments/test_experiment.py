"""The frame of the experiments: what a stopped run keeps, and how documented figures are judged."""

import json
from contextlib import contextmanager

import matplotlib.pyplot as plt
import pytest

from experiments import experiment
from experiments.experiment import Documented, Experiment, Raw, of


def figure(**fields) -> Documented:
    told = {
        "what": "time",
        "printed": "50 ms",
        "value": 50,
        "unit": "ms",
        "source": "article",
        "configuration": "board",
    }
    return Documented(**told | {"measured": lambda samples: [sample["ms"] for sample in samples]} | fields)


def made(measured: list, *, fail_at: int | None = None) -> Experiment:
    """An experiment of four cells that notes which it measures."""

    @contextmanager
    def session(options):
        def measure(cell):
            if len(measured) == fail_at:
                raise KeyboardInterrupt
            measured.append(cell["number"])
            return [{"ms": 10.0 * cell["number"]}, {"ms": 10.0 * cell["number"] + options.more}]

        yield measure

    def add_options(parser):
        parser.add_argument("--more", type=int, default=1)

    return Experiment(
        "made",
        "An experiment.",
        add_options,
        {"more": 2},
        lambda options: [{"number": number} for number in range(4)],
        session,
        lambda samples, options: f"{len(samples)} samples\n",
        lambda samples, options: plt.figure(figsize=(1, 1)),
        (figure(),),
    )


def test_a_run_writes_samples_table_plot_figures_and_environment(tmp_path):
    folder = made([]).run(["--out", str(tmp_path / "new")])
    head, *rows = (json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines())
    assert head["settings"] == {"more": 1, "quick": False, "seed": 0}
    assert rows[:3] == [
        {"cell": {"number": 0}, "ms": 0.0},
        {"cell": {"number": 0}, "ms": 1.0},
        {"cell": {"number": 1}, "ms": 10.0},
    ]
    assert len(rows) == 8
    assert (folder / "table.md").read_text().startswith("    .venv/bin/python -m experiments.made --out ")
    assert (folder / "table.md").read_text().endswith("\n\n8 samples\n")
    assert all((folder / name).stat().st_size for name in ("plot.svg", "plot.png"))
    [found] = json.loads((folder / "figures.json").read_text())["figures"]
    assert (found["measured"], found["n"], found["ratio"]) == (15.5, 8, 0.31)
    told = json.loads((folder / "environment.json").read_text())
    assert told["settings_of_run"]["more"] == 1
    assert len(told["load_average_before"]) == 3


def test_a_stopped_run_goes_on_and_a_complete_one_begins_anew(tmp_path):
    measured, out = [], ["--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        made(measured, fail_at=2).run(out)
    made(measured).run(out)
    assert measured == [0, 1, 2, 3]
    made(measured).run(out)
    assert measured == [0, 1, 2, 3] * 2
    assert len(Raw(tmp_path / "raw.jsonl").samples) == 8


def test_other_settings_begin_anew(tmp_path):
    measured, out = [], ["--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        made(measured, fail_at=2).run(out)
    made(measured).run([*out, "--more", "3"])
    assert measured == [0, 1, 0, 1, 2, 3]


def test_rendering_measures_nothing(tmp_path):
    measured, out = [], ["--out", str(tmp_path)]
    made(measured).run(out)
    (tmp_path / "table.md").unlink()
    made(measured).run([*out, "--render"])
    assert measured == [0, 1, 2, 3]
    assert "--render" not in (tmp_path / "table.md").read_text()


def test_quick_changes_what_is_not_asked_for(tmp_path):
    assert made([]).parse(["--quick"]).more == 2
    assert made([]).parse(["--quick", "--more", "5"]).more == 5


SAMPLES = [{"ms": 90.0}, {"ms": 110.0}, {"ms": 100.0}]


def test_a_time_of_a_board_is_judged_on_that_board_only(monkeypatch):
    found = figure().found(SAMPLES)
    assert (found["measured"], found["lowest"], found["highest"], found["n"]) == (100, 90, 110, 3)
    assert found["ratio"] == 2
    assert found["verdict"] == "cannot be judged on this machine"
    monkeypatch.setattr(experiment, "board", lambda: "Orange Pi 5 Plus; rockchip,RK3588")
    assert figure().found(SAMPLES)["verdict"] == "does not hold"
    assert figure(value=90).found(SAMPLES)["verdict"] == "holds"


def test_a_rule_judges_anywhere():
    assert figure(holds=lambda values: max(values) < 111).found(SAMPLES)["verdict"] == "holds"
    assert figure(holds=lambda values: max(values) < 110).found(SAMPLES)["verdict"] == "does not hold"


def test_what_was_not_measured_is_said_to_be_so():
    found = figure(holds=lambda values: True).found([])
    assert found["verdict"] == "cannot be judged on this machine"
    assert found["why"] == "not measured in this run"
    assert "measured" not in found


def test_samples_are_chosen_by_their_cells():
    samples = [{"cell": {"a": 1, "b": 2}, "x": 1}, {"cell": {"a": 1, "b": 3}, "x": 2}]
    assert of(samples, a=1) == samples
    assert [sample["x"] for sample in of(samples, a=1, b=3)] == [2]
    assert of(samples, c=1) == []
