"""Formats of weights: what is told of made-up samples, and real differences of a small random checkpoint."""

import pytest

from experiments import quantisation
from experiments.bench_steps import open_inference, weight_bytes
from experiments.experiment import of
from experiments.quantisation import EXPERIMENT, FORMATS, FULL, LOGITS, RANDOM, TIME, WAYS

BYTES = {"float32": 8.5e9, "bfloat16": 4.25e9, "q8": 3.2e9, "q4-head-q8": 1.4e9, "q4": 1.3e9}
BITS = {"float32": 32.0, "bfloat16": 16.0, "q8": 8.502, "q4-head-q8": 4.502, "q4": 4.502}


def samples(options):
    """Per format as many ms as a GB has tenths; a prompt takes 2 s, 2.1 s with q8. Of 10 tokens all agree, 9 with q4;
    every question is answered right, with q4 half of them."""
    for cell in EXPERIMENT.cells(options):
        weights = cell["weights"]
        narrow = weights.startswith("q4")
        if cell["part"] == TIME:
            told = {"ms": [BYTES[weights] / 1e8] * 2, "prompt_ms": 2100.0 if weights == "q8" else 2000.0}
            yield {"cell": cell} | told | {"bytes": BYTES[weights], "layer_bits": BITS[weights]}
        elif cell["part"] in (LOGITS, RANDOM):
            told = {"tokens": 10, "squared_error": 0.4 if narrow else 0.0, "square": 10.0, "divergence": 0.5}
            yield {"cell": cell, "prompt": "one"} | told | {"agreeing": 9 if narrow else 10}
        else:
            yield {"cell": cell, "right": 2 if narrow else 4, "count": 4}


def test_every_way_is_compared_and_only_weights_are_asked():
    cells = EXPERIMENT.cells(EXPERIMENT.parse(["--model", "tiny-moe", "--cases", "dense_tied", "--repeats", "2"]))
    for part in (LOGITS, RANDOM):
        assert [(cell["weights"], cell["kv"]) for cell in cells if cell["part"] == part] == list(WAYS[1:])
    assert [cell["weights"] for cell in cells if cell["part"] == "counting"] == list(FORMATS)
    assert [cell["weights"] for cell in cells if cell["part"] == TIME] == [*FORMATS, *reversed(FORMATS)]


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--cases", "dense_tied", "vl_image", "--conversations", "4"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert "| q4 | 1.30 | 4.50 | 13.0 (13.0..13.0) | 2.00 (2.00..2.00) |" in text
    assert "| tiny-vl | q4 | int8 | 10 | 0.2000 | 5.00e-02 | 90.0% |" in text
    assert "| random parity checkpoints | q8 | float32 | 20 | 0.0000 | 5.00e-02 | 100.0% |" in text
    assert "| tiny-moe | q4 | 50.0% |  |" in text
    assert "| counting | 4 of 4 | 4 of 4 | 4 of 4 | 2 of 4 | 2 of 4 |" in text
    assert EXPERIMENT.plot(found, options).axes
    told = {figure.what: figure.found(found, "") for figure in EXPERIMENT.figures}  # as on no board
    judged = {what: figure["verdict"] for what, figure in told.items() if not figure["verdict"].startswith("cannot")}
    assert set(judged.values()) == {"holds"}
    assert len(judged) == 5
    assert told["time for a prompt with q8 over q4"]["measured"] == pytest.approx(1.05)
    assert told["most likely tokens that q4 keeps of float32's"]["measured"] == 0.9
    assert told["right answers with q4 over those with float32"]["n"] == 3
    assert told["time per token of the 2B model, q8"]["measured"] == 32
    other = [sample for sample in found if sample["cell"]["part"] != TIME]
    assert EXPERIMENT.figures[2].found(other)["verdict"] == "not measured"
    assert "ms per token" not in EXPERIMENT.table(other, options)


def test_of_several_checkpoints_each_counts_by_its_tokens():
    rows = [
        {"cell": {"model": name}, "tokens": tokens, "squared_error": error, "square": 1.0, "divergence": 1.0}
        | {"agreeing": tokens}
        for name, tokens, error in (("a", 1, 0.0), ("b", 3, 1.0))
    ]
    told = quantisation.deviation(rows)
    assert (told.tokens, told.rmse, told.divergence, told.agreement) == (4, 0.75, 0.5, 1.0)


def test_fewer_bits_differ_more():
    options = EXPERIMENT.parse(["--cases", "dense_tied"])
    cells = of([{"cell": cell} for cell in EXPERIMENT.cells(options)], part=RANDOM, kv=FULL)
    with EXPERIMENT.session(options) as measure:
        told = {
            cell["weights"]: quantisation.deviation([{"cell": cell} | sample for sample in measure(cell)])
            for cell in (row["cell"] for row in cells)
            if cell["weights"] in ("q8", "q4")
        }
    assert 0 < 4 * told["q8"].rmse < told["q4"].rmse < 1
    assert 0 < 4 * told["q8"].divergence < told["q4"].divergence
    assert told["q4"].agreement < told["q8"].agreement <= 1


@pytest.mark.parametrize(("weights", "bits"), [("q4", 4.5), ("bfloat16", 16)])
def test_bits_are_counted_over_the_decoders_layers(weights, bits):
    inference = open_inference("tiny-vl", weights, "int8")
    assert bits < quantisation.layer_bits(weight_bytes(inference), inference) < bits + 0.1
