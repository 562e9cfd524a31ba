"""The measuring of decode and prefill: what is counted, how it is shared out and shown, and one quick run of each."""

import json
import math
import os
from argparse import Namespace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from experiments import bandwidth, bench, bench_decode, bench_prefill, llama_cpp
from experiments.bandwidth import ReadBandwidth
from experiments.bench_steps import (
    WARM_STEPS,
    DecodeSteps,
    bytes_read,
    chosen_experts,
    config_of,
    open_inference,
    weight_bytes,
)
from experiments.step_profile import ProfiledSteps, Run, share_out
from experiments.turns import Subject, pinned
from models.config import MoeConfig
from models.errors import ConfigError
from models.model import PRETRAINED


def test_bandwidth_reads_the_whole_array_in_both_ways():
    reader = ReadBandwidth(threads=2, size=1 << 22)
    rates = reader.sample()
    assert set(rates) == {"search", "largest"}
    assert all(rate > 0 for rate in rates.values())
    assert sum(part.nbytes for part in reader.parts) == 1 << 22
    reader.array.view(np.uint8)[-1] = 0xFF
    with pytest.raises(ValueError, match="should not hold the byte"):
        bandwidth.search(reader.array)


def test_a_subject_lives_in_one_process_on_its_cores():
    with Subject(1, list, [3, 1, 2]) as subject:
        subject.call("sort")
        assert subject.call("copy") == [1, 2, 3]
        with pytest.raises(IndexError):
            subject.call("pop", 7)
        assert subject.call("copy") == [1, 2, 3]
    with pinned(1):
        fastest = os.sched_getaffinity(0)
    with Subject(1, os.sched_getaffinity, 0) as cores:
        assert cores.call("copy") == fastest


def test_a_subject_that_cannot_be_made_is_an_error():
    with pytest.raises(ConfigError, match="no-such-model"):
        Subject(1, config_of, "no-such-model")


def test_pinned_gives_the_cores_back():
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("quant", ["float32", "q4"])
def test_a_step_reads_everything_but_the_table_and_the_experts_not_chosen(tmp_path: Path, quant: str):
    values = json.loads((PRETRAINED / "tiny-moe" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    inference = open_inference(str(tmp_path), quant, "int8")
    text, weights = inference.config.text, weight_bytes(inference)
    per_value = {"float32": 4, "q4": 18 / 32}[quant]
    table = text.vocab * text.hidden * per_value
    experts = len(text.moe_layers) * text.moe.experts * 3 * text.hidden * text.moe.intermediate * per_value
    idle = experts * (1 - text.moe.top_k / text.moe.experts)
    expected = sum(weights.values()) - table - idle + text.hidden * per_value
    assert bytes_read(weights, inference.config, batch=1) == pytest.approx(expected)


def test_a_tied_table_is_read_as_the_head_and_the_vision_tower_not_at_all():
    inference = open_inference("tiny-vl", "float32", "float32")
    weights = weight_bytes(inference)
    assert inference.config.tied
    decoder = sum(size for path, size in weights.items() if not path.startswith("visual."))
    assert decoder < sum(weights.values())
    assert bytes_read(weights, inference.config, batch=8) == decoder


def test_chosen_experts_are_those_of_random_choices():
    moe = MoeConfig(experts=16, top_k=3, intermediate=8, normalise=True)
    assert chosen_experts(moe, 1) == pytest.approx(3)
    random = np.random.default_rng(0)
    counts = [len({int(i) for _ in range(4) for i in random.permutation(16)[:3]}) for _ in range(4000)]
    assert chosen_experts(moe, 4) == pytest.approx(fmean(counts), rel=0.01)


def test_decode_turns_begin_at_their_context_and_copy_no_cache():
    steps = DecodeSteps("tiny-moe", "q4", "int8", [(20, 2)], steps=3)
    held = steps.held[20, 2]
    place = held.layers[0].keys.unsafe_buffer_pointer()
    for turn in range(2):
        sample = steps.decode(20, 2, 3)
        assert len(sample["ms"]) == 3
        assert held.sampling.step.tolist() == [(turn + 1) * (WARM_STEPS + 3)] * 2
        assert held.layers[0].keys.unsafe_buffer_pointer() == place
        assert 0 < sample["resident"] <= sample["peak"]
    assert not np.array_equal(*np.asarray(held.layers[0].keys))  # rows differ


@pytest.mark.parametrize("name", ["tiny-vl", "tiny-moe", "qwen3-vl-2b", "qwen3-30b-a3b"])
def test_llama_cpp_gets_every_tensor_of_the_text_model(name: str):
    config = config_of(name)
    text = config.text
    shapes = llama_cpp.tensor_shapes(text, config.tied)
    attention = 2 * text.hidden * text.head_dim * (text.heads + text.kv_heads) + 2 * text.hidden + 2 * text.head_dim
    mlp = 3 * text.hidden * text.intermediate
    if text.moe:
        mlp = text.moe.experts * (3 * text.hidden * text.moe.intermediate + text.hidden)
    vocabulary = text.vocab * text.hidden * (1 if config.tied else 2)
    expected = text.layers * (attention + mlp) + vocabulary + text.hidden
    assert sum(map(math.prod, shapes.values())) == expected


def test_llama_cpp_gets_the_formats_of_ours():
    assert llama_cpp.tensor_format("blk.3.ffn_gate_exps", "q4-head-q8") == "q4"
    assert llama_cpp.tensor_format("token_embd", "q4-head-q8") == "q8"
    assert llama_cpp.tensor_format("output", "q4-head-q8") == "q8"
    assert llama_cpp.tensor_format("blk.3.attn_k_norm", "q8") == "float32"
    assert llama_cpp.tensor_format("blk.3.ffn_gate_inp", "q8") == "float32"
    assert llama_cpp.tensor_format("blk.3.attn_q", "bfloat16") == "bfloat16"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama_cpp, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(ConfigError, match=r"requirements-dev.txt; missing: no_such_package"):
        llama_cpp.check_llama_cpp()


@pytest.mark.parametrize("quant", ["q4", "q4-head-q8", "q8", "float32", "bfloat16"])
def test_the_model_file_holds_as_many_bytes_as_our_weights(tmp_path: Path, quant: str):
    gguf = pytest.importorskip("gguf")
    config = config_of("tiny-moe")
    llama_cpp.write_model(config, quant, tmp_path / "model.gguf")
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    ours = weight_bytes(open_inference("tiny-moe", quant, "int8"))
    assert len(tensors) == len(llama_cpp.tensor_shapes(config.text, config.tied))
    assert sum(tensor.data.nbytes for tensor in tensors) == sum(ours.values())


def test_llama_cpp_runs_rows_of_two_contexts(tmp_path: Path):
    pytest.importorskip("xllamacpp")
    model = llama_cpp.LlamaModel(config_of("tiny-moe"), "q4", tmp_path / "model.gguf")
    program = llama_cpp.LlamaCpp(model, "f16", 1, [16, 40], 2, 60)
    for context in (16, 40):
        for batch in (1, 2):
            sample = program.decode(context, batch, 4)
            assert len(sample["ms"]) == batch
            assert min(sample["ms"]) > 0
    assert program.prefill(33)["ms"] > 0


def test_wall_time_is_shared_by_what_runs_at_once():
    runs = [Run("a", 0, 10, 1), Run("b", 6, 10, 1), Run("a", 12, 20, 1), Run("b", 100, 103, 2)]
    shares, idle = share_out(runs)
    assert shares == {"a": 6 + 4 / 2 + 8, "b": 4 / 2 + 3}
    assert idle == 2


def test_a_profile_finds_the_parts_of_a_step():
    steps = ProfiledSteps("tiny-moe", "q4", "int8", [(20, 1)], steps=3)
    found = steps.profile(20, 1, 3)
    text = steps.inference.config.text
    rows = {
        row["source"].split(" ")[0]: row for row in found["rows"] if row["group"] in ("attention", "matrix products")
    }
    assert rows["kestrel_attention"]["runs"] == text.layers
    assert rows["kestrel_experts"]["runs"] == len(text.moe_layers)
    groups = {row["group"] for row in found["rows"]}
    assert {"matrix products", "attention", "sampling", "embedding", "router", "host"} <= groups
    assert sum(row["ms"] for row in found["rows"]) == pytest.approx(fmean(found["traced_ms"]))
    assert all(row["ms"] >= 0 for row in found["rows"])


def decode_samples() -> list[bench.Sample]:
    """Two repeats in which a step takes 10 ms alone, 12 together, 5 more at the longer context, and llama.cpp twice as
    long; 100 MB over 20 GB/s are 5 ms."""
    return [
        {
            "quant": "q4",
            "context": context,
            "batch": batch,
            "program": program,
            "repeat": repeat,
            "bandwidth": {"search": 20.0, "largest": 15.0},
            "ms": [factor * (10 + (batch > 1) * 2 + (context > 100) * 5 + delta) for delta in (-1, 1)],
            "bytes_read": 1e8,
            "resident": 2e6,
            "peak": 3e6,
        }
        for repeat in range(2)
        for context in (100, 1100)
        for batch in (1, 4)
        for program, factor in ((bench.OURS, 1), (bench.THEIRS, 2))
    ]


def test_decode_tables_show_floor_ratios_context_and_batch():
    samples = decode_samples()
    row = bench_decode.steps_table(samples, [("q4", 1100, 4)]).splitlines()[2].strip("| ").split(" | ")
    assert row[3:5] == ["17.0 (17.0..17.0)", "235.3"]  # ms, tokens/s
    assert row[5:7] == ["0.10", "5.9"]  # GB read, GB/s
    assert row[8:10] == ["5.0", "3.40 (3.40..3.40)"]  # floor
    assert row[10:] == ["34.0 (34.0..34.0)", "0.50 (0.50..0.50)", "2 (3)"]
    options = Namespace(quant=["q4"], context=[100, 1100], batch=[1, 4])
    contexts = bench_decode.contexts_table(samples, options).splitlines()
    assert contexts[2] == "| q4 | 1 | 1100 | 5.0 (5.0..5.0) | 5.0 | 10.0 (10.0..10.0) |"
    batches = bench_decode.batches_table(samples, options).splitlines()
    assert batches[2] == "| q4 | 100 | 4 | 333.3 | 3.33 (3.33..3.33) | 166.7 | 3.33 (3.33..3.33) |"


def test_tables_do_without_llama_cpp():
    samples = bench.select(decode_samples(), program=bench.OURS)
    options = Namespace(quant=["q4"], context=[100, 1100], batch=[1, 4])
    assert "|  |  | 2 (3) |" in bench_decode.steps_table(samples, [("q4", 100, 1)])
    assert bench_decode.contexts_table(samples, options).splitlines()[2].endswith("| 5.0 |  |")
    assert bench_decode.batches_table(samples, options).splitlines()[2].endswith("|  |  |")


def read_samples(folder: Path) -> list[bench.Sample]:
    return [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]


def test_a_quick_decode_run_writes_raw_samples_table_and_environment(tmp_path: Path):
    bench_decode.main(["--quick", "--repeats", "1", "--out", str(tmp_path)])
    samples = read_samples(tmp_path)
    assert [(sample["context"], sample["batch"]) for sample in samples] == [(16, 1), (16, 2), (64, 1), (64, 2)]
    assert all(len(sample["ms"]) == 3 and max(sample["bandwidth"].values()) > 0 for sample in samples)
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("    .venv/bin/python -m experiments.bench_decode --quick --repeats 1 --out ")
    assert text.count("| q4 |") == 4 + 2 + 2
    assert json.loads((tmp_path / "environment.json").read_text())["cores"] >= 1


def test_a_quick_prefill_run_writes_its_table(tmp_path: Path):
    bench_prefill.main(["--quick", "--tokens", "24", "--repeats", "1", "--out", str(tmp_path)])
    (sample,) = read_samples(tmp_path)
    assert sample["tokens"] == 24
    rate = 24e3 / sample["ms"]
    assert f"| q4 | 24 | 16 + 16 | {sample['ms']:.0f} " in (tmp_path / "table.md").read_text()
    assert f"| {rate:.1f} |" in (tmp_path / "table.md").read_text()
