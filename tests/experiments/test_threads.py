"""Gains from threads: what is told of made-up samples, the cores that are taken first, and one real measurement."""

import argparse

import pytest

from experiments import threads, turns
from experiments.threads import DECODE, EXPERIMENT, PREFILL, ThreadedSteps


def samples(options):
    """Prompts gain from every thread, decoding from the second one only, as reading does: 10 and 20 GB/s."""
    for cell in EXPERIMENT.cells(options):
        count = cell["threads"]
        bandwidth = {"search": 10.0 * min(count, 2), "largest": 1.0}
        yield {"cell": cell, "part": PREFILL, "ms": 8000 / count, "bytes_read": 2e9, "bandwidth": bandwidth}
        decoded = {"part": DECODE, "ms": 120 / min(count, 2), "bytes_read": 1e9, "tokens": [5, 7]}
        yield {"cell": cell, "bandwidth": bandwidth} | decoded


@pytest.fixture
def options(monkeypatch) -> argparse.Namespace:
    """Those of a machine with 8 cores."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)))
    return EXPERIMENT.parse(["--repeats", "2"])


def test_all_cores_and_the_powers_of_two_below_in_alternating_order(options):
    assert options.threads == [1, 2, 4, 8]
    assert threads.default_threads(6) == [1, 2, 4, 6]
    assert threads.default_threads(1) == [1]
    assert [cell["threads"] for cell in EXPERIMENT.cells(options)] == [1, 2, 4, 8, 8, 4, 2, 1]


@pytest.mark.parametrize("count", ["0", "9", "-1", "two"])
def test_more_threads_than_cores_are_refused(options, count, capsys):
    with pytest.raises(SystemExit):
        EXPERIMENT.parse(["--threads", "1", count])
    assert "should be a number from 1 to 8" in capsys.readouterr().err


def test_table_plot_and_figures_of_made_up_samples(options):
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    same = "{0} ({0}..{0})".format
    row = [same("20.0"), same("2.00"), same("2.00"), same("4.00"), same("20.00"), same("60.0"), same("2.00")]
    assert f"| 4 | {' | '.join(row)} | {same('1.20')} | 3.86 (3.31) | 3.82 (3.78) |" in text
    assert "are the same with every number" in text
    told = {figure.what: figure.found(found) for figure in EXPERIMENT.figures}
    assert told["a prompt with 8 threads, times as fast as with one"]["measured"] == pytest.approx(8)
    verdicts = {what: figure["verdict"] for what, figure in told.items()}
    assert verdicts["a prompt with 8 threads, times as fast as with one"] == "holds"
    assert verdicts["decoding with 2 threads, times as fast as with one"] == "holds"
    assert verdicts["decoding with 8 threads, times as fast as with one"] == "does not hold"
    assert verdicts["answers that the number of threads makes of one text"] == "holds"
    assert told["decoding with 64 threads, times as fast as with 32"]["verdict"] == "not measured"
    assert EXPERIMENT.plot(found, options).axes


def test_other_tokens_are_noticed(options):
    found = list(samples(options))
    found[-1]["tokens"] = [5, 8]
    told = EXPERIMENT.figures[-1].found(found)
    assert (told["measured"], told["verdict"]) == (2, "does not hold")
    assert "are not the same" in EXPERIMENT.table(found, options)


def test_the_fastest_cores_are_taken_first(monkeypatch):
    taken = []
    monkeypatch.setattr(turns.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(turns.os, "sched_setaffinity", lambda _, cores: taken.append(list(cores)))
    monkeypatch.setattr(turns, "capacity", {0: 512, 1: 512, 2: 1024, 3: 1024}.get)
    with turns.pinned(3):
        pass
    assert taken == [[2, 3, 0], [0, 1, 2, 3]]


def test_a_measurement_repeats_its_tokens():
    steps = ThreadedSteps("tiny-vl", "q4", 20, 3, threads=1, array_bytes=1 << 20)
    (prompt, decoded), (_, again) = steps.measure(), steps.measure()
    assert (prompt["part"], decoded["part"]) == (PREFILL, DECODE)
    assert prompt["bytes_read"] == 2 * decoded["bytes_read"]  # two chunks
    assert min(prompt["ms"], decoded["ms"]) > 0
    assert len(decoded["tokens"]) == 5
    assert decoded["tokens"] == again["tokens"]
