"""The converter on real checkpoints of every family: what it writes, how it fails, and what it leaves behind."""

import fcntl
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from experiments.parity import CASES
from models.checkpoint import DTYPES, Checkpoint
from models.config import parse_config
from models.convert import convert, lay_out, main, plan, reserve, slices
from models.errors import CheckpointError, ConfigError
from models.model import PRETRAINED
from models.network import Network
from models.presets import PRESETS
from models.quantisation import QuantisedMatrix, dequantise, find_scheme, quantise, scale_name
from models.switches import Switches
from models.weights import _published_tensors, load_network, published_name

# The variants: tied and not, a stored copy of a tied head, biases, shards, types, single and fused experts, vision.
FAMILIES = [
    ("dense_attention_bias", "q4"),
    ("dense_bfloat16_sharded", "q8"),
    ("dense_float16", "q4-head-q8"),
    ("dense_tied_with_head", "q4"),
    ("dense_untied", "q4-head-q8"),
    ("moe_mixed", "q4"),
    ("moe_renormalised", "q8"),
    ("vl_image", "q8"),
    ("vl_moe", "q4"),
]


def header_of(file: Path) -> tuple[dict, int]:
    """The header of a safetensors file and where its data begins."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(length)), 8 + length


def parameters_of(folder: Path) -> dict[str, np.ndarray]:
    """The network's float32 parameters, under their paths."""
    checkpoint = Checkpoint.open(folder)
    network = load_network(checkpoint, parse_config(checkpoint.config), "float32", Switches())
    state = nnx.to_flat_state(nnx.state(network))
    return {".".join(map(str, path)): np.asarray(parameter.get_value()) for path, parameter in state}


def assert_converted(source: Path, found: Path, quant: str) -> None:
    """Every tensor, and no other, is there: quantised as its path says, or the source's value in float32."""
    config = parse_config(Checkpoint.open(source).config)
    tensors = safetensors.numpy.load_file(found / "model.safetensors")
    for path, expected in parameters_of(source).items():
        name, format = published_name(path, config), find_scheme(quant).format_of(path)
        if format is None:
            tensor = tensors.pop(name)
            assert tensor.dtype == np.float32, name
            np.testing.assert_array_equal(tensor.reshape(expected.shape), expected, err_msg=name)
            continue
        stored = QuantisedMatrix(tensors.pop(name), tensors.pop(scale_name(name)))
        assert stored.format == format, name
        values = dequantise(stored, *expected.shape[-2:])
        np.testing.assert_array_equal(values, dequantise(quantise(expected, format), *expected.shape[-2:]), name)
        step = np.abs(stored.scale.astype(np.float32)).max()
        assert np.abs(values - expected).max() <= (1.01 if format == "q4" else 0.501) * step, name
    assert tensors == {}


def assert_aligned(file: Path) -> None:
    header, data = header_of(file)
    assert data % 64 == 0
    header.pop("__metadata__")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        alignment = 64 if (end - begin) % 64 == 0 else DTYPES[entry["dtype"]].itemsize
        assert begin % alignment == 0, name


@pytest.mark.parametrize(("case", "quant"), FAMILIES)
def test_families(case, quant, tmp_path):
    result = convert(CASES / case, tmp_path / "converted", quant)
    assert_converted(CASES / case, tmp_path / "converted", quant)
    assert_aligned(tmp_path / "converted" / "model.safetensors")
    assert os.listdir(tmp_path) == ["converted"]
    assert result.parameters == sum(value.size for value in parameters_of(CASES / case).values())
    assert result.bytes == (tmp_path / "converted" / "model.safetensors").stat().st_size
    assert result.source_bytes == sum(file.stat().st_size for file in (CASES / case).glob("*.safetensors"))


def test_the_small_model_by_name(tmp_path, capsys):
    assert main(["tiny-vl", str(tmp_path / "converted"), "--quant", "q4-head-q8"]) == 0
    source, found = PRETRAINED / "tiny-vl", tmp_path / "converted"
    assert_converted(source, found, "q4-head-q8")
    assert_aligned(found / "model.safetensors")
    expected = {file.name for file in source.iterdir()} - {"README.md"}
    assert {file.name for file in found.iterdir()} == expected
    for name in expected - {"model.safetensors", "config.json"}:
        assert (found / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((found / "config.json").read_text())
    assert config.pop("quantization_config") == find_scheme("q4-head-q8").config_entry()
    assert config == json.loads((source / "config.json").read_text())
    bits = 8 * (found / "model.safetensors").stat().st_size / sum(map(np.size, parameters_of(source).values()))
    summary = capsys.readouterr().out
    assert f"{bits:.2f} bits per weight" in summary
    assert f"{(found / 'model.safetensors').stat().st_size / 1e6:.2f} MB" in summary
    assert summary.count("\n") == 1


def test_experts_as_transformers_5_saves_them(tmp_path):
    """Fused experts `[experts, out, in]` come out as those that are stored the other way round."""
    turned = Path(shutil.copytree(CASES / "vl_moe", tmp_path / "turned"))
    tensors = safetensors.numpy.load_file(turned / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    safetensors.numpy.save_file(tensors, turned / "model.safetensors")
    convert(turned, tmp_path / "a", "q4")
    convert(CASES / "vl_moe", tmp_path / "b", "q4")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_matrices_of_many_slices(tmp_path, monkeypatch):
    """Where slices meet makes no difference."""
    convert(CASES / "vl_moe", tmp_path / "whole", "q4")
    monkeypatch.setattr("models.convert.SLICE_VALUES", 700)
    checkpoint = Checkpoint.open(CASES / "vl_moe")
    parameters = plan(checkpoint, parse_config(checkpoint.config), find_scheme("q4"))
    embeddings = next(parameter for parameter in parameters if parameter.name.endswith("embed_tokens.weight"))
    assert len(list(slices(embeddings))) == math.ceil(203 / 16)
    convert(CASES / "vl_moe", tmp_path / "sliced", "q4")
    whole, sliced = (tmp_path / name / "model.safetensors" for name in ("whole", "sliced"))
    assert whole.read_bytes() == sliced.read_bytes()


def test_into_an_empty_folder(tmp_path):
    (tmp_path / "converted").mkdir()
    convert(CASES / "dense_tied", tmp_path / "converted", "q8")
    assert_converted(CASES / "dense_tied", tmp_path / "converted", "q8")


def hollow_checkpoint(folder: Path, values: dict, dtype: np.dtype) -> Path:
    """A checkpoint of zeros with the published tensors of a configuration, which takes no room on disk."""
    config = parse_config(values)
    state = nnx.split(Network(config, Switches()))[1]
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parameter in nnx.to_flat_state(state):
        zeros = np.broadcast_to(np.zeros((), np.int8), parameter.get_value().shape)
        tensors = _published_tensors(".".join(map(str, path)), zeros, config)
        shapes |= {name: tensor.shape for name, tensor in tensors.items()}
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * dtype.itemsize
        spelling = next(text for text, known in DTYPES.items() if known == dtype)
        header[name] = {"dtype": spelling, "shape": shape, "data_offsets": [position, end]}
        position = end
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + position)
    return folder


def wide_vocabulary(rows: int) -> dict:
    """A small decoder with large embeddings of width 1024."""
    config = Checkpoint.open(CASES / "dense_tied").config
    return config | {"vocab_size": rows, "hidden_size": 1024, "num_hidden_layers": 1, "tie_word_embeddings": True}


@pytest.mark.parametrize("name", ["qwen3-vl-2b", "qwen3-vl-30b-a3b"])
def test_published_shapes_are_wholly_aligned(name, tmp_path):
    folder = hollow_checkpoint(tmp_path / name, PRESETS[name], np.dtype(ml_dtypes.bfloat16))
    checkpoint = Checkpoint.open(folder)
    parameters = plan(checkpoint, parse_config(checkpoint.config), find_scheme("q4"))
    header, tensors, size = lay_out(Path("model.safetensors"), parameters)
    assert len(header) % 64 == 0
    assert all(stored.start % 64 == 0 for stored in tensors.values())
    assert {tensor for parameter in parameters for tensor in parameter.tensors()} == tensors.keys()
    assert size == len(header) + sum(stored.dtype.itemsize * math.prod(stored.shape) for stored in tensors.values())


MEASURE = """
import os, sys
from models.convert import convert
from tests.models.peak_memory import forget_peak, peak_bytes
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
forget_peak()
before = peak_bytes()
convert(sys.argv[1], sys.argv[2], "q4")
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_a_matrix(tmp_path):
    """A float32 matrix of 256 MiB, with two threads: neither it nor its pages are ever held whole."""
    folder = hollow_checkpoint(tmp_path / "source", wide_vocabulary(1 << 16), np.dtype(np.float32))
    command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "converted")]
    grown = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert 0 < grown < 128 << 20
    assert Checkpoint.open(tmp_path / "converted").shape("model.embed_tokens.weight") == (1 << 13, 32, 128)


# A test run in the background of a shell ignores interrupts, and what it starts would too.
CONVERT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from models.convert import main
sys.exit(main())
"""


def stop_in_the_middle(destination: Path, with_signal: signal.Signals) -> tuple[int, str]:
    """Starts a conversion of a gigabyte and stops it as soon as it shows progress: exit status and last line of output.

    Not before: Python drops an interrupt that comes at the end of an import, and the bar has some to do.
    """
    folder = hollow_checkpoint(destination.parent / "source", wide_vocabulary(1 << 20), np.dtype(np.float32))
    command = [sys.executable, "-c", CONVERT, str(folder), str(destination)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        shown = ""
        while "quantising" not in shown:
            shown += (read := running.stderr.read(1))
            assert read, shown
        running.send_signal(with_signal)
        _, output = running.communicate()
    return running.returncode, (output.splitlines() or [""])[-1]


def test_killed_in_the_middle(tmp_path):
    """What a killed run leaves does not load, and the next run clears it away."""
    converted, unfinished = tmp_path / "converted", tmp_path / "converted.unfinished"
    assert stop_in_the_middle(converted, signal.SIGKILL)[0] == -signal.SIGKILL
    assert not converted.exists()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(unfinished)
    (unfinished / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(unfinished)

    convert(CASES / "dense_tied", converted, "q4")
    assert_converted(CASES / "dense_tied", converted, "q4")
    assert not unfinished.exists()


def test_interrupted_from_the_keyboard(tmp_path):
    status, line = stop_in_the_middle(tmp_path / "converted", signal.SIGINT)
    assert status == 130
    assert line.endswith("error: interrupted; nothing is left of the conversion")
    assert os.listdir(tmp_path) == ["source"]


@pytest.fixture
def damaged(tmp_path):
    """A copy of a parity case with changed tensors."""

    def copy(case: str, change) -> Path:
        folder = Path(shutil.copytree(CASES / case, tmp_path / case))
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


def refusal(source: Path | str, destination: Path, quant: str = "q4") -> str:
    """The error's text; nothing may be left of the attempt."""
    before = sorted(destination.parent.iterdir()) if destination.parent.is_dir() else None
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        convert(source, destination, quant)
    assert before is None or sorted(destination.parent.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("dense_tied", "model.layers.2.mlp.down_proj.weight"),
        ("dense_tied", "model.norm.weight"),
        ("moe_renormalised", "model.layers.2.mlp.experts.5.down_proj.weight"),
        ("vl_moe", "model.language_model.layers.1.mlp.experts.gate_up_proj"),
        ("vl_image", "model.visual.pos_embed.weight"),
    ],
)
def test_weights_that_are_not_finite(case, name, damaged, tmp_path):
    folder = damaged(case, lambda tensors: tensors[name].reshape(-1).__setitem__(7, np.nan))
    message = refusal(folder, tmp_path / "converted")
    stored_as = name.replace("experts.5.down_proj.weight", "experts.down_proj")
    assert message.startswith(f"{folder}: tensor '{stored_as}' holds values that are infinite or not a number")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"]
)
def test_missing_and_misshapen_tensors(name, damaged, tmp_path):
    case = "moe_renormalised" if ".experts." in name else "dense_untied"
    folder = damaged(case, lambda tensors: tensors.pop(name))
    message = refusal(folder, tmp_path / "converted")
    assert f"'{name}'" in message
    assert "missing" in message
    shutil.rmtree(folder)
    folder = damaged(case, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    message = refusal(folder, tmp_path / "converted")
    assert f"'{name}'" in message
    assert "shape" in message


def test_a_tensor_of_no_part(damaged, tmp_path):
    folder = damaged("dense_tied", lambda tensors: tensors.update({"model.extra": np.zeros(3, np.float32)}))
    assert "'model.extra' (1 such) belongs to no part" in refusal(folder, tmp_path / "converted")


def test_integer_weights(damaged, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = damaged("dense_tied", lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    assert f"'{name}' is int8" in refusal(folder, tmp_path / "converted")


def test_quantised_already(tmp_path):
    convert(CASES / "dense_tied", tmp_path / "once", "q4")
    message = refusal(tmp_path / "once", tmp_path / "twice")
    assert str(tmp_path / "once" / "config.json") in message
    assert "already quantised (quantization_config: kestrel)" in message


def test_unknown_scheme_and_sources(tmp_path):
    assert "q4, q4-head-q8, q8, found 'q3'" in refusal(CASES / "dense_tied", tmp_path / "converted", "q3")
    assert "'qwen3-vl-2b' is a shape without weights" in refusal("qwen3-vl-2b", tmp_path / "converted")
    assert "neither a folder" in refusal(tmp_path / "absent", tmp_path / "converted")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty", tmp_path / "converted")


def test_destinations_that_exist(tmp_path):
    (tmp_path / "file").write_text("kept")
    assert f"{tmp_path / 'file'}: is a file" in refusal(CASES / "dense_tied", tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    assert f"{tmp_path / 'full'}: is not empty" in refusal(CASES / "dense_tied", tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "kept"


def is_empty_folder(path: Path) -> bool:
    try:
        return not os.listdir(path)
    except OSError:  # a file, or a file system that is another user's
        return False


def test_destination_that_is_a_mounted_file_system(tmp_path):
    """It could not be replaced by the finished folder."""
    mounts = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    # Below /proc, the folders beside a mount are processes, which come and go.
    empty = [mount for mount in mounts if "proc" not in mount.parts and is_empty_folder(mount)]
    if not empty:
        pytest.skip("no empty file system is mounted here")
    assert f"{empty[0]}: is the root of a file system" in refusal(CASES / "dense_tied", empty[0])


@pytest.mark.parametrize("suffix", ["", ".unfinished"])
def test_source_and_destination_are_the_same(suffix, tmp_path):
    """Also where the source lies in the folder that a run works in: it would be cleared."""
    source = Path(shutil.copytree(CASES / "dense_tied", tmp_path / f"model{suffix}"))
    content = (source / "model.safetensors").read_bytes()
    assert "the same folder" in refusal(source, tmp_path / "model")
    assert (source / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("parent", ["absent", "file"])
def test_destination_that_cannot_be_written(parent, tmp_path):
    (tmp_path / "file").write_text("kept")
    message = refusal(CASES / "dense_tied", tmp_path / parent / "converted")
    assert message.startswith(f"{tmp_path / parent / 'converted'}.unfinished: cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_destination_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in refusal(CASES / "dense_tied", tmp_path / "converted")
    finally:
        tmp_path.chmod(0o700)


def test_no_room_on_disk(tmp_path, monkeypatch):
    """A checkpoint of zeros that becomes larger than what is free, of which a gigabyte counts: a large disk has room
    for more than a file may hold."""
    usage = shutil.disk_usage(tmp_path)
    free = min(usage.free, 10**9)
    monkeypatch.setattr("models.convert.shutil.disk_usage", lambda folder: usage._replace(free=free))
    rows = 2 * free // 1088  # a row of 1024 values is stored in 1088 bytes
    folder = hollow_checkpoint(tmp_path / "source", wide_vocabulary(rows), np.dtype(ml_dtypes.bfloat16))
    message = refusal(folder, tmp_path / "converted", "q8")
    assert "converted.unfinished/model.safetensors: needs" in message
    assert "of disk space" in message


def test_room_that_the_system_refuses(tmp_path):
    """There may be a limit that the free space does not tell of."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("wb") as stream:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(CheckpointError, match=r"file: 2\.10 MB cannot be reserved \(File too large\)"):
                reserve(stream.fileno(), tmp_path / "file", 1 << 21)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_two_runs_at_once(tmp_path):
    unfinished = tmp_path / "converted.unfinished"
    unfinished.mkdir()
    with (unfinished / "model.safetensors").open("w+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(b"weights of the other run")
        stream.flush()
        message = refusal(CASES / "dense_tied", tmp_path / "converted")
        stream.seek(0)
        assert stream.read() == b"weights of the other run"
    assert message == f"{unfinished}: another conversion is writing to it"


def test_foreign_files_in_the_unfinished_folder(tmp_path):
    """Only what a run writes is cleared away."""
    unfinished = tmp_path / "converted.unfinished"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{}")
    (unfinished / "thesis.txt").write_text("kept")
    assert "holds thesis.txt" in refusal(CASES / "dense_tied", tmp_path / "converted")
    assert (unfinished / "config.json").exists()
    (unfinished / "thesis.txt").unlink()
    convert(CASES / "dense_tied", tmp_path / "converted", "q4")
    assert not unfinished.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["{case}", "{new}", "--quant", "q3"],
        ["{case}", "{case}"],
        ["{absent}", "{new}"],
        ["{case}", "{absent}/new"],
    ],
)
def test_command_reports_errors_in_one_line(arguments, tmp_path, capsys):
    names = {"case": CASES / "dense_tied", "new": tmp_path / "new", "absent": tmp_path / "absent"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


def test_help_names_the_schemes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("SRC", "DST", "q4-head-q8", "unfinished", "bits per weight"):
        assert word in text
