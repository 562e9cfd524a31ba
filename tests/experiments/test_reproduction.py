"""The experiments that are clients, against one real server; those of numerics, on real steps; and the report."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from experiments import (
    batch_margin,
    concurrency,
    health_rtt,
    latency,
    prefill_width,
    prefix_reuse,
    report,
    sse_timeline,
)
from experiments.batch_margin import Comparison, Differences
from experiments.bench import ROOT
from experiments.engines import BY_WIDTH, KERNELS, EngineSteps
from experiments.experiment import Experiment, of
from experiments.not_measured import NOT_MEASURED
from experiments.readme_numbers import END
from experiments.served import KEY_VARIABLE, address, named, server_at
from experiments.server_process import Server, running_server


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
    assert f"| {sse_timeline.AS_SERVED} | 30 | 1 |" in capsys.readouterr().out


def test_probes_in_every_state(url, tmp_path, capsys):
    # A fast machine is often between two prompts when it is probed, but not all of these times.
    found = figures(health_rtt.EXPERIMENT, tmp_path, "--url", url, "--probes", "12", "--words", "300")
    assert found["/health of an idle server"]["n"] == 12
    samples = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()[1:]]
    busy = {state: [sample["busy"] for sample in of(samples, state=state)] for state in health_rtt.STATES}
    assert busy[health_rtt.IDLE] == [False] * 12
    assert any(busy[health_rtt.PREFILLING])
    assert all(0 < sample["handshake_ns"] < sample["total_ns"] for sample in samples)
    assert f"| {health_rtt.PREFILLING} | 12 |" in capsys.readouterr().out


def test_the_same_answers_in_every_way_of_asking(url, tmp_path, capsys):
    arguments = ("--url", url, "--url-batched", url, "--answers", "8", "--repeats", "1")
    found = figures(concurrency.EXPERIMENT, tmp_path, *arguments)
    assert found["answers that are the same batched and one after the other"]["verdict"] == "holds"
    assert {row.split("|")[2].strip() for row in capsys.readouterr().out.splitlines() if "8 tokens" in row} == set(
        concurrency.MODES
    )


def test_the_next_turn_goes_on_from_the_one_before(url):
    server, random = server_at(url), Random(0)
    assert server.model == "tiny-vl"
    per_word = prefix_reuse.tokens_per_word(server)
    told = prefix_reuse.exchange(
        prefix_reuse.NEXT,
        random,
        lambda tokens: prefix_reuse.words(random, tokens / per_word),
        prefix_reuse.EXPERIMENT.parse(["--short", "100"]),
    )
    before = prefix_reuse.ask(server, told.before, 4)
    after = {"after": prefix_reuse.ask(server, told.asked(latency.text_of(before)), 4)}
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert prefix_reuse.reused_tokens(after) >= 64  # with float weights whole chunks
    assert prefix_reuse.prompt_tokens(after) > before["usage"]["prompt_tokens"] > 80
    assert prefix_reuse.first_ms(after) > 0


def test_eight_at_once_are_judged_with_short_and_with_long_answers():
    def made(long: float) -> list[dict]:
        times = {(concurrency.SERIAL, 8): 10, (concurrency.CONCURRENT, 8): 10}
        times |= {(concurrency.SERIAL, 80): 100, (concurrency.CONCURRENT, 80): long}
        return [
            {"cell": {"mode": mode, "tokens": tokens, "repeat": 0}, "seconds": seconds, "streams": []}
            for (mode, tokens), seconds in times.items()
        ]

    [judged] = [each for each in concurrency.FIGURES if each.what.startswith("at once over")]
    assert judged.found(made(100))["verdict"] == "holds"
    assert judged.found(made(80))["verdict"] == judged.found(made(120))["verdict"] == "does not hold"


def test_ratios_are_taken_within_a_repeat():
    samples = [
        {"cell": {"mode": mode, "tokens": 8, "repeat": repeat}, "seconds": seconds, "streams": []}
        for repeat, times in enumerate([(10, 9, 5), (20, 22, 12)])
        for mode, seconds in zip(concurrency.MODES, times, strict=True)
    ]
    assert concurrency.over_serial(samples, concurrency.BATCHED, 8) == [0.5, 0.6]
    assert concurrency.over_serial(samples, concurrency.CONCURRENT, 8) == [0.9, 1.1]


@pytest.mark.parametrize("text", ["127.0.0.1:8080", "ftp://127.0.0.1:8080", "http://"])
def test_an_address_that_cannot_be_asked(text, capsys):
    with pytest.raises(SystemExit):
        sse_timeline.EXPERIMENT.parse(["--url", text])
    assert "should look like http://127.0.0.1:8080" in capsys.readouterr().err
    assert address("http://10.0.0.1:99/v1") == "http://10.0.0.1:99"
    assert address("https://host/") == "https://host:443"
    assert address("http://[::1]:8") == "http://[::1]:8"


def test_each_server_has_results_of_its_own():
    results = ROOT / "results"
    assert sse_timeline.EXPERIMENT.parse([]).out == results / "sse_timeline"
    for url, folder in (("http://10.0.0.1:99/v1", "10.0.0.1_99"), ("https://host", "host_443")):
        assert sse_timeline.EXPERIMENT.parse(["--url", url]).out == results / folder / "sse_timeline"
        quick = health_rtt.EXPERIMENT.parse(["--url", url, "--quick"]).out
        assert quick.name == f"kestrel_{folder}_health_rtt"


async def test_a_request_names_the_model_and_carries_the_key(monkeypatch):
    heard = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = b'{"data": [{"id": "first"}, {"id": "second"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        monkeypatch.setenv(KEY_VARIABLE, "a key")
        server = await asyncio.to_thread(server_at, f"http://127.0.0.1:{port}")
    assert "\r\nAuthorization: Bearer a key\r\n" in heard[0]
    assert f"\r\nHost: 127.0.0.1:{port}\r\n" in heard[0]
    assert "a key" not in str(server)
    assert named(server, {"max_tokens": 1}) == {"max_tokens": 1, "model": "first"}
    assert named(server_at("https://host", "other"), {}) == {"model": "other"}
    assert server_at("https://host", "other").tls
    assert named(Server("127.0.0.1", 1, 0), {}) == {}


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
            | {"why": "another rule", "verdict": "not measured"},
        ],
    }
}


def test_the_report_tells_every_figure_with_its_rule_and_data():
    text = report.markdown(FOUND)
    assert "In all: documented figures: 1 holds, 1 not measured." in text
    assert "| a < b | 50 ms | 50 ms (48..512; n 5) | 0.999 | **holds** |" in text
    assert "- a < b: a rule. Source: article; board." in text
    assert "[raw data](sse_timeline/raw.jsonl)" in text
    assert "A CPU, x86_64, 2 cores, 16 GiB, kernels avx2, commit 0123456789ab" in text


def test_the_page_tells_the_same_and_is_never_markup():
    text = report.page(FOUND)
    assert (
        "<td>a &lt; b<p>a rule. Source: article; board.</p><td>50 ms<td>50 ms (48..512; n 5)<td>0.999<td>holds" in text
    )
    assert '<tr class="not-measured">' in text


def figures_of(*kinds: tuple[str, str]) -> dict:
    return {"environment": {}, "figures": [{"category": category, "verdict": verdict} for category, verdict in kinds]}


def test_figures_are_counted_by_whose_they_are():
    found = {
        "one": figures_of(("documented", "holds"), ("documented", "does not hold"), ("question", "answered")),
        "two": figures_of(("documented", "does not hold"), ("guarantee", "kept"), ("beside", "measured")),
    }
    assert report.counts(found) == (
        "documented figures: 1 holds, 2 do not hold; questions that the articles ask their readers: 1 answered; "
        "guarantees of this project where the documents give none: 1 kept; beside them: 1 measured"
    )


def test_the_report_tells_of_another_training_than_the_one_here(monkeypatch):
    monkeypatch.setattr(report, "fingerprint_here", {"tiny-vl": "old", "tiny-moe": "new"}.get)
    models = {"tiny-vl": "old", "tiny-moe": "old", "qwen3-vl-2b": "no files: random weights"}
    assert report.trainings({"models": models}) == "Measured with another training of tiny-moe than the one here."
    assert report.trainings({"models": {"tiny-vl": "old"}}) == ""
    unknown = {"settings_of_run": {"model": ["tiny-vl", "tiny-moe"], "url": None}}
    expected = "Which training of tiny-vl and of tiny-moe was measured is not recorded."
    assert report.trainings(unknown) == expected
    assert report.trainings({"settings_of_run": {"model": "tiny-vl", "url": "http://127.0.0.1:1"}}) == ""
    told = {"sse_timeline": FOUND["sse_timeline"] | {"environment": FOUND["sse_timeline"]["environment"] | unknown}}
    assert expected in report.markdown(told)
    assert expected in report.page(told)


def test_figures_of_experiments_that_were_not_run_are_said_to_be_so(tmp_path):
    found = report.found_in(tmp_path)
    assert set(found) == set(report.EXPERIMENTS)
    text, page = report.markdown(found), report.page(found)
    for name, experiment in report.EXPERIMENTS.items():
        assert f"Not run. Command:\n\n    .venv/bin/python -m experiments.{name}\n" in text
        assert f"- {experiment.figures[0].what}: {experiment.figures[0].why}. Source: " in text
        assert f"<pre>.venv/bin/python -m experiments.{name}</pre>" in page
    assert f"| {NOT_MEASURED[0].what} | {NOT_MEASURED[0].printed} |" in text
    assert f"<tr><td>{NOT_MEASURED[0].what}<td>{NOT_MEASURED[0].printed}<td>" in page
    count = sum(len(experiment.figures) for experiment in report.EXPERIMENTS.values())
    assert report.counts(found) == f"{count} of experiments that were not run"
    assert not [row for row in report.readme_table(found).splitlines() if row.startswith("| [")]


def test_what_does_not_fit_a_server_or_a_model_is_left_out():
    assert not report.fits("ablation", report.options_of(["--url", "http://127.0.0.1:8080"]))
    text = report.options_of(["--model", "tiny-moe"])
    assert (report.fits("image_cost", text), report.fits("ablation", text)) == (False, True)
    assert report.fits("image_cost", report.options_of(["--model", "tiny-vl"]))


def test_another_model_and_another_server_leave_the_results_alone():
    results = report.ROOT / "results"
    assert report.options_of([]).out == results
    assert report.options_of(["--quick"]).out == results / "quick"
    assert report.options_of(["--model", "/models/Qwen3-VL-2B/"]).out == results / "Qwen3-VL-2B"
    there = ["--url", "http://127.0.0.1:1", "--server-machine", "RK3588"]
    assert report.options_of([*there, "--quick"]).out == results / "127.0.0.1_1" / "quick"
    assert report.server_arguments(report.options_of(there)) == there


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
    assert report.with_table(f"a\n{report.BEGIN}old\n{END}b\n", "new\n") == f"a\n{report.BEGIN}new\n{END}b\n"
