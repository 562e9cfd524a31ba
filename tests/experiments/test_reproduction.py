"""The experiments that are clients, against one real server; those of numerics, on real steps; and the report."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experiments import batch_margin, concurrency, health_rtt, prefill_width, report, sse_timeline
from experiments.batch_margin import Comparison, Differences
from experiments.bench import ROOT
from experiments.engines import BY_WIDTH, KERNELS, EngineSteps
from experiments.experiment import Experiment, of
from experiments.served import address
from experiments.server_process import running_server


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ["--model", "tiny-vl", "--max-context", "512", "--batch-max", "8", "--kestrel-events"]
    with running_server(arguments, log) as server:
        yield f"http://{server.host}:{server.port}"


def figures(experiment: Experiment, folder: Path, *arguments: str) -> dict[str, dict]:
    """What a run found, by the name of the figure."""
    experiment.run(["--quick", "--out", str(folder), *arguments])
    assert (folder / "plot.svg").stat().st_size > 1000
    return {figure["what"]: figure for figure in json.loads((folder / "figures.json").read_text())["figures"]}


def test_the_timeline_of_a_stream(url, tmp_path, capsys):
    found = figures(sse_timeline.EXPERIMENT, tmp_path, "--url", url, "--repeats", "1")
    assert found["events of a stream of 30 tokens"]["measured"] == 35
    assert found["first event (role frame)"]["measured"] < found["first token"]["measured"]
    assert found["first token"]["measured"] < found["whole stream"]["measured"]
    assert "| q4 | 30 | 1 |" in capsys.readouterr().out


def test_probes_in_every_state(url, tmp_path, capsys):
    found = figures(health_rtt.EXPERIMENT, tmp_path, "--url", url, "--probes", "5")
    assert found["/health of an idle server"]["n"] == 5
    samples = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()[1:]]
    busy = {state: [sample["busy"] for sample in of(samples, state=state)] for state in health_rtt.STATES}
    assert busy[health_rtt.IDLE] == [False] * 5
    assert any(busy[health_rtt.PREFILLING])
    assert all(0 < sample["handshake_ns"] < sample["total_ns"] for sample in samples)
    assert f"| {health_rtt.PREFILLING} | 5 |" in capsys.readouterr().out


def test_the_same_answers_in_every_way_of_asking(url, tmp_path, capsys):
    arguments = ("--url", url, "--url-batched", url, "--answers", "8", "--repeats", "1")
    found = figures(concurrency.EXPERIMENT, tmp_path, *arguments)
    assert found["answers that are the same batched and one after the other"]["verdict"] == "holds"
    assert {row.split("|")[2].strip() for row in capsys.readouterr().out.splitlines() if "8 tokens" in row} == set(
        concurrency.MODES
    )


def test_ratios_are_taken_within_a_repeat():
    samples = [
        {"cell": {"mode": mode, "tokens": 8, "repeat": repeat}, "seconds": seconds, "streams": []}
        for repeat, times in enumerate([(10, 9, 5), (20, 22, 12)])
        for mode, seconds in zip(concurrency.MODES, times, strict=True)
    ]
    assert concurrency.over_serial(samples, concurrency.BATCHED, 8) == [0.5, 0.6]
    assert concurrency.over_serial(samples, concurrency.CONCURRENT, 8) == [0.9, 1.1]


@pytest.mark.parametrize("text", ["127.0.0.1:8080", "https://127.0.0.1:8080", "http://"])
def test_an_address_that_cannot_be_asked(text, capsys):
    with pytest.raises(SystemExit):
        sse_timeline.EXPERIMENT.parse(["--url", text])
    assert "should look like http://127.0.0.1:8080" in capsys.readouterr().err
    assert address("http://10.0.0.1:99/v1") == "10.0.0.1:99"


@pytest.fixture(scope="module")
def steps() -> dict[str, EngineSteps]:
    return {engine.name: EngineSteps("tiny-vl", engine, batch_margin.ROWS, 128) for engine in (KERNELS, BY_WIDTH)}


def test_neighbours_change_nothing_but_where_kernels_are_picked_by_width(steps, monkeypatch):
    monkeypatch.setattr(batch_margin, "LONGEST", 4)
    kernels, by_width = (
        Comparison(steps[engine.name]).compare(
            batch_margin.prompts_of(steps[engine.name].model, batch_margin.NOISE, "seed")
        )
        for engine in (KERNELS, BY_WIDTH)
    )
    assert len(kernels["margins"]) > 8
    assert set(kernels["differences"]) == {0.0}
    assert not kernels["flipped"]
    assert min(by_width["differences"]) > 1e-4


def test_chunks_change_nothing_but_where_kernels_are_picked_by_width(steps, monkeypatch):
    monkeypatch.setattr(prefill_width, "LENGTH", 12)
    kernels, by_width = (
        prefill_width.compare(steps[engine.name], np.random.default_rng(0), [1, 6]) for engine in (KERNELS, BY_WIDTH)
    )
    assert [(sample["rows_differ"], sample["logits_differ"]) for sample in kernels] == [(0, 0.0)] * 2
    one, six = by_width
    assert one["rows_differ"] == 12
    assert one["logits_differ"] > 1e-4
    assert six["rows_differ"] == 0


def test_a_flip_beyond_twice_the_difference_is_an_exception():
    noted = Differences()
    none = np.zeros((0, 0))
    noted.add(np.array([1.0, 0.9, 0]), np.array([1.0, 1.05, 0]), np.zeros(0), none, none)
    noted.add(np.array([1.0, 0.5, 0]), np.array([1.0, 0.5, 0.1]), np.zeros(0), none, none)
    sample = {"cell": {"engine": "any"}} | noted.sample()
    assert sample["margins"] == [0.1, 0.5]
    assert sample["differences"] == [0.15, 0.1]
    assert sample["flipped"] == [0]
    assert batch_margin.exceptions(batch_margin.flips([sample])) == 0
    assert batch_margin.exceptions(np.array([[0.4, 0.15], [0.3, 0.15], [0.2, 0.15]])) == 2


def test_experts_chosen_otherwise_are_noted():
    noted = Differences()
    chosen, others = np.array([[0, 2], [1, 3]]), np.array([[0, 2], [1, 2]])
    noted.add(np.array([1.0, 0]), np.array([1.0, 0]), np.array([0.2, 0.1]), chosen, chosen)
    noted.add(np.array([1.0, 0]), np.array([1.0, 0]), np.array([0.3, 0.4]), chosen, others)
    assert noted.sample()["routes"] == [0.1, 0.3]
    assert noted.sample()["rerouted"] == [1]


FOUND = {
    "sse_timeline": {
        "command": ".venv/bin/python -m experiments.sse_timeline",
        "environment": {
            "board": "",
            "cpu": "A CPU",
            "architecture": "x86_64",
            "cores": 2,
            "memory_bytes": 2**34,
            "kernels": "avx2",
            "governor": "",
            "commit": "0123456789abcdef",
        },
        "figures": [
            {"what": "a < b", "printed": "50 ms", "unit": "ms", "source": "article", "configuration": "board"}
            | {"why": "a rule", "measured": 49.96, "lowest": 48.0, "highest": 512.4, "n": 5, "ratio": 0.9992}
            | {"verdict": "holds"},
            {"what": "other", "printed": "stated", "unit": "", "source": "article", "configuration": "board"}
            | {"why": "not measured in this run", "verdict": "cannot be judged on this machine"},
        ],
    }
}


def test_the_report_tells_every_figure_with_its_rule_and_data():
    text = report.markdown(FOUND)
    assert "In all: 1 cannot be judged on this machine, 1 holds." in text
    assert "| a < b | 50 ms | 50 ms (48..512) | 0.999 | **holds** |" in text
    assert "- a < b: a rule. Source: article; board." in text
    assert "[raw data](sse_timeline/raw.jsonl)" in text
    assert "A CPU, x86_64, 2 cores, 16 GiB, kernels avx2, commit 0123456789ab" in text


def test_the_page_tells_the_same_and_is_never_markup():
    text = report.page(FOUND)
    assert "<td>a &lt; b<p>a rule. Source: article; board.</p><td>50 ms<td>50 ms (48..512)<td>0.999<td>holds" in text
    assert '<tr class="cannot-be-judged">' in text


def test_every_experiment_can_be_run_quickly():
    assert set(report.QUICK) == set(report.EXPERIMENTS)
    for name, experiment in report.EXPERIMENTS.items():
        options = experiment.parse(report.QUICK[name])
        assert experiment.cells(options), name
        assert len({figure.what for figure in experiment.figures}) == len(experiment.figures)


class Told:
    """An experiment that notes how it is run, and stops the first time it is asked for the second."""

    def __init__(self, name: str, runs: list) -> None:
        self.name = name
        self.runs = runs

    def run(self, arguments: list[str]) -> None:
        self.runs.append((self.name, arguments))
        if self.name == "second" and len(self.runs) == 2:
            raise KeyboardInterrupt


def test_a_report_that_was_stopped_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(report, "EXPERIMENTS", {name: Told(name, runs) for name in ("first", "second", "third")})
    options = report.options_of(["--out", str(tmp_path), "--model", "folder"])
    with pytest.raises(KeyboardInterrupt):
        report.measure(options)
    report.measure(options)
    assert [name for name, _ in runs] == ["first", "second", "second", "third"]
    assert runs[0][1][:2] == ["--model", "folder"]
    assert not list(tmp_path.iterdir())
    report.measure(options)
    assert [name for name, _ in runs[4:]] == ["first", "second", "third"]


def test_the_table_of_the_readme_is_that_of_the_results():
    readme = (ROOT / "README.md").read_text()
    assert report.with_table(readme, report.readme_table(report.found_in(ROOT / "results"))) == readme
    assert (
        report.with_table(f"a\n{report.BEGIN}old\n{report.END}b\n", "new\n") == f"a\n{report.BEGIN}new\n{report.END}b\n"
    )
