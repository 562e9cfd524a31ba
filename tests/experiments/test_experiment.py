"""The frame of the experiments: what a stopped run keeps, and how documented figures are judged."""

import json
import os
from argparse import Namespace
from contextlib import contextmanager

import matplotlib.pyplot as plt
import pytest

from experiments import experiment
from experiments.environment import cpu_name, environment, model_fingerprint
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
    assert min(told["bandwidth"].values()) > 0


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


def test_rendering_tells_the_run_that_was_measured(tmp_path):
    made([]).run(["--more", "5", "--out", str(tmp_path)])
    made([]).run(["--out", str(tmp_path), "--render"])
    command, _, links = (tmp_path / "table.md").read_text().splitlines()[:3]
    assert "--more 5" in command
    assert "[Raw data](raw.jsonl)" in links


def test_nothing_can_be_rendered_before_it_was_measured(tmp_path):
    with pytest.raises(SystemExit, match="without --render"):
        made([]).run(["--out", str(tmp_path), "--render"])


def test_models_are_told_apart_by_their_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    before = model_fingerprint(str(tmp_path))
    weights.write_bytes(bytes(99) + b"1")
    assert before != model_fingerprint(str(tmp_path)) != model_fingerprint("qwen3-vl-2b")


CORES = ["0xd05"] * 4 + ["0xd0b"] * 4


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n", "A CPU @ 2 GHz"),
        ("".join(f"processor\t: 0\nCPU part\t: {part}\n\n" for part in CORES), "4 x Cortex-A55 + 4 x Cortex-A76"),
        ("CPU part\t: 0xabc\n", "1 x CPU part 0xabc"),
        ("", ""),
    ],
)
def test_a_processor_is_told_by_its_name_or_by_its_parts(cpuinfo, name):
    assert cpu_name(cpuinfo) == name


def test_the_environment_tells_which_cores_may_be_used():
    told = environment()
    assert told["affinity"] == sorted(os.sched_getaffinity(0))
    assert len(told["affinity"]) == told["cores"]
    assert isinstance(told["governors"], dict)


def test_quick_changes_what_is_not_asked_for(tmp_path):
    assert made([]).parse(["--quick"]).more == 2
    assert made([]).parse(["--quick", "--more", "5"]).more == 5


SAMPLES = [{"ms": 90.0}, {"ms": 110.0}, {"ms": 100.0}]


BOARD = "Orange Pi 5 Plus; rockchip,RK3588"


def test_a_time_of_a_board_is_judged_on_that_board_only(monkeypatch):
    monkeypatch.setattr(experiment, "board", lambda: "")
    found = figure(absolute="at most").found(SAMPLES)
    assert (found["measured"], found["lowest"], found["highest"], found["n"]) == (100, 90, 110, 3)
    assert found["ratio"] == 2
    assert found["verdict"] == "cannot be judged on this machine"
    monkeypatch.setattr(experiment, "board", lambda: BOARD)
    assert figure(absolute="at most").found(SAMPLES)["verdict"] == "does not hold"
    assert figure(absolute="at most", value=90).found(SAMPLES)["verdict"] == "holds"
    assert figure(absolute="at most").found(SAMPLES, "another")["verdict"] == "cannot be judged on this machine"


def test_a_faster_time_and_a_higher_rate_hold():
    for absolute, value, verdict in (
        ("at most", 1000, "holds"),
        ("at most", 81, "holds"),
        ("at most", 79, "does not hold"),
        ("at least", 1, "holds"),
        ("at least", 124, "holds"),
        ("at least", 126, "does not hold"),
    ):
        assert figure(absolute=absolute, value=value).found(SAMPLES, BOARD)["verdict"] == verdict, (absolute, value)


def test_what_is_no_absolute_figure_is_no_board_s_to_judge():
    assert figure().found(SAMPLES, BOARD)["verdict"] == "cannot be judged on this machine"
    margin = figure(absolute="at most", value=None)
    assert margin.found(SAMPLES, BOARD)["verdict"] == "cannot be judged on this machine"


def test_a_figure_of_the_network_needs_a_client_elsewhere():
    probe = figure(absolute="at most", value=100, over_network=True)
    assert probe.found(SAMPLES, "rk3588")["verdict"] == "cannot be judged on this machine"
    assert probe.found(SAMPLES, "rk3588", remote=True)["verdict"] == "holds"


@pytest.mark.parametrize(
    ("options", "machine"),
    [
        ({"model": "qwen3-vl-2b", "url": None}, (BOARD, False)),
        ({"model": "tiny-vl", "url": None}, ("", False)),
        ({"model": ["qwen3-vl-2b", "tiny-moe"]}, ("", False)),
        ({"model": "qwen3-vl-2b", "url": "http://10.0.0.1:80", "server_machine": "RK3588"}, ("RK3588", True)),
        ({"model": "qwen3-vl-2b", "url": "http://127.0.0.1:80", "server_machine": "RK3588"}, ("RK3588", False)),
        ({"model": "qwen3-vl-2b", "url": "http://10.0.0.1:80", "server_machine": None}, ("", True)),
    ],
)
def test_judged_is_the_machine_that_was_measured(tmp_path, options, machine):
    (tmp_path / "environment.json").write_text(json.dumps({"board": BOARD}))
    assert experiment.judged_machine(Namespace(**options), tmp_path) == machine


def test_a_rule_judges_anywhere():
    assert figure(holds=lambda values: max(values) < 111).found(SAMPLES)["verdict"] == "holds"
    assert figure(holds=lambda values: max(values) < 110).found(SAMPLES)["verdict"] == "does not hold"


def test_a_verdict_says_whose_statement_it_is():
    for category, verdicts in experiment.VERDICTS.items():
        for bound, verdict in zip((111, 110), verdicts, strict=True):
            judged = figure(category=category, holds=lambda values, bound=bound: max(values) < bound)
            assert judged.found(SAMPLES)["verdict"] == verdict
    for category, verdict in (("question", "answered"), ("beside", "measured")):
        found = figure(category=category).found(SAMPLES)
        assert (found["category"], found["verdict"]) == (category, verdict)


def test_what_was_not_measured_is_said_to_be_so():
    found = figure(holds=lambda values: True).found([])
    assert found["verdict"] == "not measured"
    assert "measured" not in found


def test_samples_are_chosen_by_their_cells():
    samples = [{"cell": {"a": 1, "b": 2}, "x": 1}, {"cell": {"a": 1, "b": 3}, "x": 2}]
    assert of(samples, a=1) == samples
    assert [sample["x"] for sample in of(samples, a=1, b=3)] == [2]
    assert of(samples, c=1) == []
