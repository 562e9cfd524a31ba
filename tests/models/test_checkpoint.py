"""Every refusal of the checkpoint reader, on real files, and the intact cases that must not be refused."""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from models.checkpoint import Checkpoint
from models.errors import CheckpointError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.standard_normal((7, 5)).astype(ml_dtypes.bfloat16),
        "norm.weight": rng.standard_normal(5).astype(np.float32),
        "head.weight": rng.standard_normal((3, 5)).astype(np.float16),
    }


def header_of(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(path: Path, header: dict | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    safetensors.numpy.save_file(weights(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    tensors = weights()
    for shard, names in zip(SHARDS, (["embed.weight"], ["norm.weight", "head.weight"]), strict=True):
        safetensors.numpy.save_file({name: tensors[name] for name in names}, tmp_path / shard)
    write_index(tmp_path, {"embed.weight": SHARDS[0], "norm.weight": SHARDS[1], "head.weight": SHARDS[1]})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_intact_checkpoint_reads_back_exactly(layout, request):
    checkpoint = Checkpoint.open(request.getfixturevalue(layout))
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.names() == weights().keys()
    for name, expected in weights().items():
        tensor = checkpoint.read(name)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (expected.shape, expected.dtype)
        assert tensor.dtype == expected.dtype
        np.testing.assert_array_equal(tensor, expected)


def test_read_maps_the_file_without_a_copy(sharded):
    tensor = Checkpoint.open(sharded).read("embed.weight")
    assert isinstance(tensor, np.memmap)
    assert tensor.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(tensor, tensor.view(np.uint16))
    assert not tensor.flags.writeable
    with (sharded / SHARDS[0]).open("r+b") as stream:  # a shared map shows what is written to the file later
        stream.seek(-2, 2)
        stream.write(np.array(42, ml_dtypes.bfloat16).tobytes())
    assert tensor[-1, -1] == 42


def test_opening_allocates_nothing_of_the_weights_size(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    big = np.zeros((4, 1 << 20), np.float32)
    safetensors.numpy.save_file({f"layer.{index}": big for index in range(4)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    checkpoint = Checkpoint.open(tmp_path)
    total = sum(float(checkpoint.read(name)[0, 0]) for name in checkpoint.names())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 0
    assert peak < big.nbytes // 16


def test_scalar_and_empty_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    stored = {"scale": np.array(1.5, np.float32), "empty": np.zeros((0, 3), np.float32), "ids": np.arange(3)}
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("scale").shape == ()
    assert checkpoint.read("scale") == 1.5
    assert checkpoint.read("empty").shape == (0, 3)
    assert checkpoint.read("ids").tolist() == [0, 1, 2]


def test_stray_files_beside_the_index_are_not_read(sharded):
    (sharded / "consolidated.safetensors").write_bytes(b"anything")
    assert Checkpoint.open(sharded).names() == weights().keys()


def test_single_file_counts_before_the_index(single):
    write_index(single, {"other": "missing.safetensors"})
    assert Checkpoint.open(single).names() == weights().keys()


def test_symbolic_links_as_in_the_hub_cache(single, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    for name in ("config.json", "model.safetensors"):
        (cache / name).symlink_to(single / name)
    assert Checkpoint.open(cache).names() == weights().keys()


def test_missing_folder(tmp_path):
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")


def test_file_instead_of_folder(single):
    assert "no such folder" in refusal(single / "model.safetensors")


def test_missing_config(single):
    (single / "config.json").unlink()
    assert str(single / "config.json") in refusal(single)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    message = refusal(single)
    assert str(single) in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "{'a': 1}", '{"a": 1, "a": 2}', "[" * 100_000, "\x00"])
def test_broken_config(single, text):
    (single / "config.json").write_text(text)
    assert "config.json" in refusal(single)


def test_config_that_is_not_utf8(single):
    (single / "config.json").write_bytes(b'{"name": "\xff"}')
    assert "config.json: broken JSON" in refusal(single)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"norm.weight": 3}, {"norm.weight": None}])
def test_index_without_a_usable_weight_map(sharded, weight_map):
    write_index(sharded, weight_map)
    assert "model.safetensors.index.json" in refusal(sharded)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a\0b", "\ud800.safetensors"]
)
def test_index_that_leaves_the_folder(sharded, shard):
    write_index(sharded, {"norm.weight": shard})
    message = refusal(sharded)
    assert "model.safetensors.index.json" in message
    assert "'norm.weight'" in message


def assert_names_shard_and_tensor(folder: Path) -> None:
    """The refusal of the second shard names it, and the first tensor that the index expects in it."""
    message = refusal(folder)
    assert str(folder / SHARDS[1]) in message
    assert "'norm.weight'" in message


def test_missing_shard(sharded):
    (sharded / SHARDS[1]).unlink()
    assert_names_shard_and_tensor(sharded)


def test_shard_that_is_a_folder(sharded):
    (sharded / SHARDS[1]).unlink()
    (sharded / SHARDS[1]).mkdir()
    assert_names_shard_and_tensor(sharded)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"GGUF" + b"\xff" * 100, b"\x07" + b"\0" * 7 + b"{"]
)
def test_shard_that_is_no_safetensors_file(sharded, content):
    (sharded / SHARDS[1]).write_bytes(content)
    assert_names_shard_and_tensor(sharded)


@pytest.mark.parametrize("removed", [1, 12, 22])
def test_data_cut_off(sharded, removed):
    path = sharded / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-removed])
    message = refusal(sharded)
    assert f"{path}: cut off: tensor" in message
    assert "weight" in message


@pytest.mark.parametrize("kept", [0, 7, 8, 40])
def test_header_cut_off(sharded, kept):
    path = sharded / SHARDS[1]
    path.write_bytes(path.read_bytes()[:kept])
    assert_names_shard_and_tensor(sharded)


def test_trailing_bytes(single):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 1024)
    assert f"{path}: 1024 bytes after the last tensor" in refusal(single)


def test_file_of_another_format(single):
    (single / "model.safetensors").write_bytes(b"GGUF" + b"\xff" * 100)
    assert "not a safetensors file" in refusal(single)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_lfs_pointer(single, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4255140312\n"
    (single / name).write_text(pointer)
    message = refusal(single)
    assert str(single / name) in message
    assert "git lfs pull" in message


def test_index_naming_an_absent_tensor(sharded):
    write_index(
        sharded, {"embed.weight": SHARDS[0], "norm.weight": SHARDS[1], "head.weight": SHARDS[1], "x": SHARDS[0]}
    )
    message = refusal(sharded)
    assert "'x'" in message
    assert SHARDS[0] in message


def test_index_naming_the_wrong_shard(sharded):
    write_index(sharded, {"embed.weight": SHARDS[0], "norm.weight": SHARDS[0], "head.weight": SHARDS[1]})
    message = refusal(sharded)
    assert "'norm.weight'" in message
    assert SHARDS[0] in message


def test_tensor_that_the_index_does_not_name(sharded):
    write_index(sharded, {"embed.weight": SHARDS[0], "norm.weight": SHARDS[1]})
    message = refusal(sharded)
    assert "'head.weight'" in message
    assert SHARDS[1] in message


def test_tensor_in_two_shards(sharded):
    tensors = weights()
    safetensors.numpy.save_file(tensors, sharded / SHARDS[1])
    message = refusal(sharded)
    assert "'embed.weight'" in message
    assert all(shard in message for shard in SHARDS)


def edit_entry(single: Path, **changes: object) -> str:
    path = single / "model.safetensors"
    header, data = header_of(path)
    header["norm.weight"] |= changes
    write_raw(path, header, data)
    return refusal(single)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"dtype": "F8_E4M3"}, "dequantised"),
        ({"dtype": "F4"}, "cannot be read"),
        ({"dtype": 3}, "cannot be read"),
        ({"shape": [6]}, "not shape [6]"),
        ({"shape": [5, 0]}, "not shape [5, 0]"),
        ({"shape": [-5]}, "list of sizes"),
        ({"shape": [5.0]}, "list of sizes"),
        ({"shape": [True, 5]}, "list of sizes"),
        ({"shape": None}, "list of sizes"),
        ({"shape": [10**4000, 10**4000]}, "not shape"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"data_offsets": [20, 0]}, "data_offsets"),
        ({"data_offsets": [-20, 0]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
    ],
)
def test_bad_tensor_entry(single, changes, fault):
    message = edit_entry(single, **changes)
    assert str(single / "model.safetensors") in message
    assert "tensor 'norm.weight'" in message
    assert fault in message


def test_entry_that_is_no_object(single):
    write_raw(single / "model.safetensors", {"norm.weight": [1, 2]}, b"")
    assert "tensor 'norm.weight'" in refusal(single)


@pytest.mark.parametrize(
    ("second", "fault"), [([2, 6], "overlaps"), ([6, 10], "hole"), ([4, 9], "cut off"), ([0, 4], "overlaps")]
)
def test_ranges_that_do_not_tile_the_data(single, second, fault):
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": second},
    }
    write_raw(single / "model.safetensors", header, b"\0" * 8)
    message = refusal(single)
    assert fault in message
    assert "tensor 'b'" in message


def test_broken_header(single):
    write_raw(single / "model.safetensors", b'{"a": ', b"")
    assert "broken JSON" in refusal(single)


def test_name_twice_in_one_header(single):
    entry = b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_raw(single / "model.safetensors", b'{"a": ' + entry + b', "a": ' + entry + b"}", b"\0" * 4)
    assert "'a' appears twice" in refusal(single)


def test_unknown_tensor_name(single):
    checkpoint = Checkpoint.open(single)
    for access in (checkpoint.read, checkpoint.shape, checkpoint.dtype, checkpoint.file):
        with pytest.raises(CheckpointError, match=r"tensor 'absent\.weight'"):
            access("absent.weight")
