"""Time by context: what is measured how often, and what is told of made-up samples."""

import pytest

from experiments.context_growth import DECODE, EXPERIMENT, PROMPT
from experiments.experiment import of


def samples(options):
    """50 ms per token and 5 more for every 1024 tokens; prompts at 100 tokens/s up to 1024 tokens, at 80 beyond."""
    for cell in EXPERIMENT.cells(options):
        tokens = cell["tokens"]
        rate = 100 if tokens <= 1024 else 80
        yield {"cell": cell, "ms": 50 + 5 * tokens / 1024 if cell["part"] == DECODE else 1e3 * tokens / rate}


def test_long_prompts_are_computed_once():
    cells = [{"cell": cell} for cell in EXPERIMENT.cells(EXPERIMENT.parse([]))]
    assert [len(of(cells, part=PROMPT, tokens=tokens)) for tokens in (256, 1024, 4096, 8192)] == [2, 2, 1, 1]
    assert len(of(cells, part=DECODE, tokens=8192)) == 5


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--context", "1024", "8192", "--prompt", "1024", "8192", "--repeats", "2"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert "| 8192 | 90.0 (90.0..90.0) | 1.64 | 4.88 |" in text
    assert "| 8192 | 1 | 102.40 (102.40..102.40) | 80.0 (80.0..80.0) |" in text
    told = {figure.what: figure.found(found) for figure in EXPERIMENT.figures}
    assert told["time per token at 8K over 1K"]["measured"] == pytest.approx(90 / 55)
    assert told["time per token at 8K over 1K"]["verdict"] == "holds"
    assert told["rate of a prompt of 8K over one of 1K"]["measured"] == pytest.approx(0.8)
    assert EXPERIMENT.plot(found, options).axes
    short = [sample for sample in found if sample["cell"]["tokens"] == 1024]
    assert EXPERIMENT.figures[2].found(short)["why"] == "not measured in this run"
