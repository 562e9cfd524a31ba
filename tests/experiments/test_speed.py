"""The comparison of measured speeds with their goals, and the measurement of opening a checkpoint."""

import json
from pathlib import Path

import pytest

from experiments import bench_open, speed
from experiments.bench import OURS, THEIRS


def decode_samples(quants, contexts, batches):
    """Two repeats: 10 ms a step, 12 at the longer context, 30 together; llama.cpp 20; 100 MB over 20 GB/s are 5 ms."""
    return [
        {
            "quant": quant,
            "context": context,
            "batch": batch,
            "program": program,
            "repeat": repeat,
            "bandwidth": {"search": 20.0},
            "ms": [20.0 if program == THEIRS else 30.0 if batch > 1 else 12.0 if context > 256 else 10.0],
            "bytes_read": 1e8,
            "resident": 4e8,
            "peak": 5e8,
            "process": 17 * 2**30,
        }
        for quant in quants
        for context in contexts
        for batch in batches
        for program in (OURS, THEIRS)
        for repeat in range(2)
    ]


@pytest.fixture
def samples():
    """Raw samples of every part."""
    prefill = [
        {"quant": "q4", "tokens": 512, "program": program, "repeat": repeat, "ms": ms}
        for program, ms in ((OURS, 2000.0), (THEIRS, 4000.0))
        for repeat in range(2)
    ]
    opening = [{"quant": "q4", "repeat": 0, "open_ms": 800.0, "first_token_ms": 1200.0, "resident": 7e8}]
    return {
        "decode-2b": decode_samples(["q4", "q8"], [256, 2048], [1]),
        "context-2b": decode_samples(["q4"], [256, 2048], [1]),
        "batch-2b": decode_samples(["q4"], [256], [1, 8]),
        "decode-8b": decode_samples(["q4"], [256], [1]),
        "decode-30b-a3b": decode_samples(["q4"], [256], [1]),
        "prefill-2b": prefill,
        "open-2b": opening,
    }


def test_every_goal_is_compared_with_what_was_found(samples):
    rows = [row.strip("| ").split(" | ") for row in speed.table(samples).splitlines() if row.startswith("| ")][1:]
    found = [(float(row[3].split(" ")[0]), row[4]) for row in rows]
    assert found == [
        (2.0, "no"),
        (0.5, "aim"),
        (2.0, "no"),
        (0.5, "aim"),
        (2.0, "aim"),
        (2.0, "no"),
        (0.5, "aim"),
        (17.0, "aim"),
        (2.0, "no"),
        (2.0, "aim"),
        (2.67, "aim"),
        (2.0, "yes"),
        (700.0, "no"),
    ]


def test_parts_that_are_there_are_not_measured_again(samples, tmp_path, monkeypatch, capsys):
    measured = []
    for name in speed.PARTS:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "raw.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples[name]))
        if name != "decode-8b":
            (folder / "table.md").write_text("done\n")
    parts = {name: (measured.append, arguments) for name, (_, arguments) in speed.PARTS.items()}
    monkeypatch.setattr(speed, "PARTS", parts)
    speed.main(["--out", str(tmp_path), "--again", "open-2b"])
    assert [Path(arguments[-1]).resolve() for arguments in measured] == [tmp_path / "decode-8b", tmp_path / "open-2b"]
    assert (tmp_path / "table.md").read_text() == speed.table(samples)
    assert capsys.readouterr().out.count("| aim |\n") == 7


def test_opening_a_converted_checkpoint_is_measured(tmp_path):
    bench_open.main(["--quick", "--repeats", "1", "--out", str(tmp_path)])
    (sample,) = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert sample["quant"] == "q4"
    assert len(sample["token_ms"]) == 4
    assert min(sample["token_ms"]) > 0
    assert sample["process_ms"] > sample["open_ms"] + sample["first_token_ms"] > 0
    assert sample["process"] > sample["resident"] > 0
    assert "| q4 |" in (tmp_path / "table.md").read_text()
