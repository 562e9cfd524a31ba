"""Tokens per second on paper: bytes by shape against those of a network in memory, and what is told of them."""

import json

import pytest

from experiments import scaling_model
from experiments.bench import OURS, THEIRS
from experiments.bench_steps import open_inference, weight_bytes
from experiments.environment import write_environment
from experiments.scaling_model import BOARD, EXPERIMENT, HERE, MACHINES, POINTS, SHAPE, THIRTY, TWO

GB = {TWO: 1.0, "qwen3-vl-8b": 4.0, THIRTY: 2.0}


@pytest.mark.parametrize("model", ["tiny-vl", "tiny-moe"])
@pytest.mark.parametrize("quant", ["q4", "q8", "bfloat16"])
def test_bytes_by_shape_are_those_in_memory(model, quant):
    kv = "float32" if quant == "bfloat16" else "int8"
    assert scaling_model.stored_bytes(model, quant) == weight_bytes(open_inference(model, quant, kv))


def samples(options):
    """Shapes of 1, 4 and 2 GB, twice that in other formats than q4; this machine reads 20 GB/s and takes 60 ms for
    1 GB."""
    for cell in EXPERIMENT.cells(options):
        if cell["part"] == SHAPE:
            size = GB[cell["model"]] * (1 if cell["quant"] == "q4" else 2)
            yield {"cell": cell, "weights": 1e9 * size, "cache_per_token": 0}
        elif cell["part"] == HERE:
            yield {"cell": cell, "bandwidth": 20.0}
        else:
            yield from ({"cell": cell} | told for told in EXPERIMENT_STEPS)


EXPERIMENT_STEPS = [{"quant": "q4", "context": 256, "ms": 60.0, "floor": 50.0, "bytes_read": 1e9}]


def test_table_plot_and_figures_of_made_up_samples(tmp_path):
    (tmp_path / "decode-2b").mkdir()
    (tmp_path / "decode-2b" / "raw.jsonl").write_text("")
    write_environment(tmp_path / "decode-2b")
    options = EXPERIMENT.parse(["--speed", str(tmp_path), "--repeats", "1"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    rates = [*(machine.bandwidth for machine in MACHINES.values()), 20.0]
    times = " | ".join(f"{1e3 / rate:.1f} ({rate:.1f})" for rate in rates)
    assert f"| {TWO} | q4 | {times} |" in text
    assert "| decode-2b | q4 | 256 | 1.00 | 1.00 | 60.0 (60.0..60.0) | 1.20 (1.20..1.20) |" in text
    assert f"| {BOARD} | {TWO} | q4 | 50 | 1.00 | 20.0 | 59% |" in text
    verdicts = {figure.what: figure.found(found)["verdict"] for figure in EXPERIMENT.figures}
    assert [what for what, verdict in verdicts.items() if verdict == "does not hold"] == [
        "2B on the board in 50 to 55 ms per token, if its weights are q8, is possible: bandwidth that it needs",
    ]
    assert [what for what, verdict in verdicts.items() if verdict == "answered otherwise than expected"] == [
        "30B-A3B over 8B on the board goes by the bytes read",
        "30B-A3B over 8B on 64 N1 cores goes by the bytes read",
    ]
    assert verdicts["bytes that q4 weights add to those of a 2B model in q8"] == "holds"
    assert EXPERIMENT.plot(found, options).axes


def test_steps_of_another_machine_are_not_taken_for_those_of_this(tmp_path):
    (tmp_path / "decode-2b").mkdir()
    (tmp_path / "decode-2b" / "raw.jsonl").write_text("")
    write_environment(tmp_path / "decode-2b", cpu="Cortex-A76")
    cells = EXPERIMENT.cells(EXPERIMENT.parse(["--speed", str(tmp_path)]))
    assert not [cell for cell in cells if cell["part"] not in (SHAPE, HERE)]


def test_measured_steps_are_read_with_their_floors(tmp_path):
    turn = {"quant": "q4", "context": 256, "ms": [10.0, 14.0], "bytes_read": 1e8, "bandwidth": {"search": 20.0}}
    turns = [turn | {"program": program, "batch": batch} for program in (OURS, THEIRS) for batch in (1, 8)]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in turns))
    [told] = scaling_model.measured_steps(file)
    assert told == {"quant": "q4", "context": 256, "ms": 12.0, "floor": 5.0, "bytes_read": 1e8}


def test_every_documented_time_is_of_a_known_machine_and_shape():
    assert {point.machine for point in POINTS} <= set(MACHINES)
    assert {point.model for point in POINTS} == set(scaling_model.SPEED_SHAPES.values())
