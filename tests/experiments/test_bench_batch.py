"""What is measured of requests computed together: in short, on a small model."""

from argparse import Namespace

from experiments.bench import OURS
from experiments.bench_batch import ROWS, Batches, Sizes, table

SIZES = Sizes(prompt=24, answers=(2,), conversation=40, arriving=40, patches=64, budget=16)


def test_every_part_is_measured_on_fresh_prompts():
    batches = Batches("tiny-vl", "q4", "int8", SIZES)
    for rows in (1, ROWS):
        assert batches.answer(24, 2, rows)["seconds"] > 0
    turns = batches.turns(40)
    assert turns["first_ms"] > 0
    assert turns["second_ms"] > 0
    picture = batches.picture(64)
    assert picture["second_ms"] > 0
    stalled = batches.stall(40)
    assert len(stalled["chunk_ms"]) == 3, "a prompt of 40 tokens in chunks of 16"
    assert len(stalled["during_ms"]) == 3, "a token of the stream after each"


def test_the_table_has_a_row_for_every_claim():
    options = Namespace(
        model="a model",
        kv="int8",
        threads=2,
        repeats=1,
        vs=None,
        prompt=24,
        answers=[2],
        arriving=40,
        prefill_budget=16,
    )
    samples = [
        {"part": "answers", "tokens": 2, "rows": rows, "program": OURS, "repeat": 0, "seconds": seconds}
        for rows, seconds in ((1, 10.0), (ROWS, 4.0))
    ]
    samples += [{"part": part, "repeat": 0, "first_ms": 200.0, "second_ms": 10.0} for part in ("turns", "picture")]
    samples.append({"part": "stall", "repeat": 0, "alone_ms": [3.0], "during_ms": [5.0, 8.0], "chunk_ms": [4.0, 2.0]})
    text = table(samples, options)
    assert "| 2 tokens each, s | 4.00 (4.00..4.00) | 10.00 (10.00..10.00) | 0.40 (0.40..0.40) |" in text
    assert text.count("0.050") == 6
    assert "is 8 (8..8) ms; two steps and the longest chunk are 10 (10..10) ms" in text
