"""Pages dropped layer by layer: what is told of made-up samples, and that a real model says the same without them."""

import mmap

import jax
import numpy as np
import pytest

from experiments import residency
from experiments.mapped_pages import MappedFile, Stretch, joined
from experiments.random_checkpoint import write_random_checkpoint
from experiments.residency import BY_LAYER, DROPPED, EXPERIMENT, FROM_DISK, ONE_CALL, TWO, Residency
from models import convert, presets
from models.checkpoint import Checkpoint
from models.model import PRETRAINED

MS = {ONE_CALL: 50.0, BY_LAYER: 60.0, DROPPED: 81.0, FROM_DISK: 600.0}


def samples(options):
    """1000 MB of a 2B model, of which 200 remain when pages are dropped."""
    for cell in EXPERIMENT.cells(options):
        way = cell["way"]
        kept = way in (ONE_CALL, BY_LAYER)
        told = {"resident": 1_000_000_000 if kept else 200_000_000, "cached": 1_200_000_000, "faults": 10, "reads": 0}
        ids = [3, 4, 5] if way != FROM_DISK else [3, 4]
        yield {"cell": cell, "shape": TWO, "first_ms": 9 * MS[way], "token_ms": MS[way], "ids": ids} | told


@pytest.fixture
def options():
    return EXPERIMENT.parse(["--repeats", "3"])


def test_the_disk_is_read_in_few_repeats_and_ways_alternate(options):
    ways = [cell["way"] for cell in EXPERIMENT.cells(options)]
    assert ways == [ONE_CALL, BY_LAYER, DROPPED, FROM_DISK, FROM_DISK, DROPPED, BY_LAYER, ONE_CALL, *ways[:3]]
    assert len(EXPERIMENT.cells(EXPERIMENT.parse(["--repeats", "3", "--disk-answer", "0"]))) == 9


def test_table_plot_and_figures_of_made_up_samples(options):
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    times = "729.0 (729.0..729.0) | 81.0 (81.0..81.0) | 1.35 (1.35..1.35)"
    assert f"| {TWO} | {DROPPED} | 3 | 200.0 | 1200.0 | {times} | 10 | 0 | 100% |" in text
    told = {figure.what: figure.found(found) for figure in EXPERIMENT.figures}
    memory = told["2B: resident weights, all over dropped"]
    assert (memory["measured"], memory["n"], memory["verdict"]) == (5, 3, "holds")
    token = told["2B: time per token, dropped over resident"]
    assert (token["measured"], token["verdict"]) == (1.35, "does not hold")  # 257 / 221, and a tenth, is less
    assert told["8B: time per token, dropped over resident"]["verdict"] == "not measured"
    assert told["2B: time per prompt, dropped over resident"]["verdict"] == "does not hold"
    assert told["30B-A3B: time per prompt, dropped over resident"]["verdict"] == "not measured"
    assert told["tokens that are the same with pages dropped"]["verdict"] == "holds"
    assert EXPERIMENT.plot(found, options).axes


def test_a_token_that_differs_is_noticed(options):
    found = list(samples(options))
    [sample] = [s for s in found if s["cell"] == {"model": TWO, "way": DROPPED, "repeat": 1}]
    sample["ids"] = [3, 4, 6]
    told = EXPERIMENT.figures[-1].found(found)
    assert (told["lowest"], told["verdict"]) == (pytest.approx(8 / 9), "does not hold")


def test_a_shape_is_known_by_its_sizes():
    assert residency.shape_of(TWO) == TWO
    assert residency.shape_of("tiny-vl") == "tiny-vl"


def test_dropped_pages_are_not_resident_and_change_no_token(tmp_path):
    convert.convert("tiny-vl", tmp_path / "q4", "q4")
    with residency.converted_folder(str(tmp_path / "q4"), "q8") as folder:
        assert folder == tmp_path / "q4"  # as it is
    model = Residency(folder, prompt=16)
    size = sum(stretch.size for stretch in model.pages[0])
    told = {way: model.measure(way, 4) for way in residency.WAYS}
    model.close()
    assert len({tuple(sample["ids"]) for sample in told.values()}) == 1
    assert told[BY_LAYER]["resident"] == told[ONE_CALL]["resident"]
    layers = len(model.pages)
    for way in (DROPPED, FROM_DISK):
        assert told[way]["resident"] < told[BY_LAYER]["resident"] - 0.8 * (layers - 1) * size
        assert told[way]["faults"] > told[BY_LAYER]["faults"]
    assert min(sample["token_ms"] for sample in told.values()) > 0


def test_pages_of_a_file_become_resident_and_are_dropped(tmp_path):
    page = mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(5 * page))
    file = MappedFile(tmp_path / "weights")
    arrays = [jax.device_put(np.memmap(file.file, np.uint8, "r", start, (2 * page,))) for start in (0, 2 * page)]
    first, second = (file.stretches([array]) for array in arrays)
    assert [(stretch.offset, stretch.size) for stretch in first + second] == [(0, 2 * page), (2 * page, 2 * page)]
    assert file.stretches([jax.numpy.zeros(page)]) == []
    assert file.resident() == 0
    assert [int(array.sum()) for array in arrays] == [0, 0]
    assert file.resident() == 4 * page
    file.drop(first)
    assert file.resident() == 2 * page
    assert file.cached() >= 2 * page
    file.forget(first)  # the page cache may keep them
    assert int(arrays[0].sum()) == 0
    file.close()


def test_stretches_that_meet_are_forgotten_in_one_piece():
    stretches = [Stretch(0, offset, size) for offset, size in ((8, 4), (0, 4), (4, 2), (5, 1))]
    assert joined(stretches) == [(0, 6), (8, 12)]


def test_a_random_checkpoint_has_the_tensors_of_a_converted_one(tmp_path, monkeypatch):
    for name in ("tiny-vl", "tiny-moe"):
        source = Checkpoint.open(PRETRAINED / name)
        monkeypatch.setitem(presets.PRESETS, f"{name}-shape", source.config)
        write_random_checkpoint(f"{name}-shape", "q4", tmp_path / f"{name}-random")
        convert.convert(name, tmp_path / name, "q4")
        random, converted = Checkpoint.open(tmp_path / f"{name}-random"), Checkpoint.open(tmp_path / name)
        assert random.config == converted.config
        assert {n: (t.dtype, t.shape, t.start) for n, t in random.tensors.items()} == {
            n: (t.dtype, t.shape, t.start) for n, t in converted.tensors.items()
        }
        weight = next(n for n, t in random.tensors.items() if t.dtype == np.uint8)
        assert len(np.unique(random.read(weight))) > 100
