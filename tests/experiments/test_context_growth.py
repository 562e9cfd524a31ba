"""Time by context: what is measured how often, and what is told of made-up samples."""

import json

import pytest

from experiments import context_growth
from experiments.bench import OURS, THEIRS
from experiments.context_growth import BESIDE, DECODE, EXPERIMENT, PROMPT
from experiments.experiment import of


def samples(options):
    """50 ms per token and 5 more for every 1024 tokens; prompts at 100 tokens/s up to 1024 tokens, at 80 beyond; 1.4
    times as fast as llama.cpp."""
    for cell in EXPERIMENT.cells(options):
        if cell["part"] == BESIDE:
            yield {"cell": cell, "context": 2048, "times_as_fast": 1.4}
        elif cell["part"] == DECODE:
            yield {"cell": cell, "ms": 50 + 5 * cell["tokens"] / 1024}
        else:
            ends = range(256, cell["tokens"] + 1, 256)
            yield {"cell": cell, "chunks": [(end, 1e3 * end / (100 if end <= 1024 else 80)) for end in ends]}


def test_the_longest_prompt_is_computed_once_and_shorter_ones_are_its_beginning():
    options = EXPERIMENT.parse([])
    cells = [{"cell": cell} for cell in EXPERIMENT.cells(options)]
    assert [told["cell"]["tokens"] for told in of(cells, part=PROMPT)] == [8192, 2048]
    assert len(of(cells, part=DECODE, tokens=8192)) == 5
    found = list(samples(options))
    assert [len(context_growth.rates(found, tokens)) for tokens in options.prompt] == [2, 2, 2, 1, 1]


def test_a_prompt_that_ends_within_a_chunk_is_refused(capsys):
    with pytest.raises(SystemExit):
        EXPERIMENT.parse(["--prompt", "1000"])
    assert "should be a multiple of 256, found 1000" in capsys.readouterr().err


def test_table_plot_and_figures_of_made_up_samples(monkeypatch):
    monkeypatch.setattr(context_growth, "measured_here", lambda folder: True)  # wherever the kept results are from
    options = EXPERIMENT.parse(["--context", "1024", "8192", "--prompt", "1024", "8192", "--repeats", "2"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert "| 8192 | 90.0 (90.0..90.0) | 1.64 (1.64..1.64) | 4.88 (4.88..4.88) |" in text
    assert "| 1024 | 2 | 10.24 (10.24..10.24) | 100.0 (100.0..100.0) |" in text
    assert "| 8192 | 1 | 102.40 (102.40..102.40) | 80.0 (80.0..80.0) |" in text
    assert "| 2048 | 1.40 (1.40..1.40) |" in text
    told = {figure.what: figure.found(found) for figure in EXPERIMENT.figures}
    assert told["time per token at 8K over 1K"]["measured"] == pytest.approx(90 / 55)
    assert told["time per token at 8K over 1K"]["verdict"] == "holds"
    assert told["rate of a prompt of 8K over one of 1K"]["measured"] == pytest.approx(0.8)
    assert told["prompt of 4K"]["measured"] == 80
    assert told["times as fast as llama.cpp per token at 2K"]["verdict"] == "holds"
    assert told["time per token at 4K"]["verdict"] == "not measured"
    assert EXPERIMENT.plot(found, options).axes


def test_ratios_to_llama_cpp_are_taken_within_a_repeat(tmp_path):
    turns = [
        {"quant": "q4", "batch": 1, "context": 2048, "program": program, "repeat": repeat, "ms": [ms, ms]}
        for program, times in ((OURS, (10, 20)), (THEIRS, (15, 40)))
        for repeat, ms in enumerate(times)
    ]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    assert context_growth.beside_llama(file) == [
        {"context": 2048, "times_as_fast": 1.5},
        {"context": 2048, "times_as_fast": 2.0},
    ]


def test_ratios_of_lengths_are_taken_within_a_repeat():
    decoded = [
        {"cell": {"part": DECODE, "tokens": tokens, "repeat": repeat}, "ms": ms}
        for tokens, repeat, ms in ((1024, 0, 10.0), (8192, 0, 15.0), (8192, 1, 40.0), (1024, 1, 20.0))
    ]
    chunks = [(1024, 1000.0), (2048, 3000.0), (8192, 16000.0)]
    prompts = [
        {"cell": {"part": PROMPT, "tokens": tokens, "repeat": repeat}, "chunks": chunks[:count]}
        for repeat, (tokens, count) in enumerate([(8192, 3), (2048, 2)])
    ]
    told = {figure.what: figure for figure in EXPERIMENT.figures}
    assert told["time per token at 8K over 1K"].measured(decoded) == [1.5, 2.0]
    assert told["rate of a prompt of 8K over one of 1K"].measured(prompts) == [0.5]
    assert told["rate of a prompt of 8K over one of 1K"].found(prompts)["verdict"] == "does not hold"
