"""Every tensor of a checkpoint lands in its place, in the right type; a checkpoint that does not fit is refused."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from experiments.parity import CASES
from models.checkpoint import Checkpoint
from models.config import parse_config
from models.errors import CheckpointError, ConfigError
from models.network import Network
from models.switches import Switches
from models.weights import load_network, published_name, random_network, save_weights
from tests.models.test_convert import hollow_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.2.mlp.experts.5.down_proj.weight"


@pytest.fixture
def folder_of(tmp_path):
    """Copies a parity case, to be damaged."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(CASES / case, tmp_path / case))

    return copy


def edit(folder: Path, change) -> None:
    """Rewrites model.safetensors with what `change` does to its tensors."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def load(folder: Path, dtype: str = "float32") -> Network:
    checkpoint = Checkpoint.open(folder)
    return load_network(checkpoint, parse_config(checkpoint.config), dtype, Switches())


def parameters(network: Network) -> dict[str, np.ndarray]:
    """Dotted path -> value."""
    state = nnx.to_flat_state(nnx.state(network))
    return {".".join(map(str, path)): np.asarray(parameter.get_value()) for path, parameter in state}


def assert_same(found: Network, expected: Network) -> None:
    found, expected = parameters(found), parameters(expected)
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["dense_tied", "dense_float16", "dense_bfloat16_sharded"])
def test_stored_types_become_the_asked_one(case, dtype):
    """Matrices are kept in the asked type, rounded to nearest; norms in float32."""
    checkpoint = Checkpoint.open(CASES / case)
    config = parse_config(checkpoint.config)
    found = parameters(load(CASES / case, dtype))
    assert len(found) == len(checkpoint.names())
    for path, value in found.items():
        stored = checkpoint.read(published_name(path, config))
        kept = jnp.dtype(dtype) if value.ndim > 1 else np.float32
        assert value.dtype == kept, path
        np.testing.assert_array_equal(value, stored.astype(kept), err_msg=path)


def test_stored_types_of_the_cases():
    """What the test above relies on."""
    stored = [
        {Checkpoint.open(CASES / case).dtype(name) for name in Checkpoint.open(CASES / case).names()}
        for case in ("dense_tied", "dense_float16", "dense_bfloat16_sharded")
    ]
    assert stored == [{np.dtype(np.float32)}, {np.dtype(np.float16)}, {np.dtype(ml_dtypes.bfloat16)}]


def test_fused_experts_are_turned_round():
    stored = Checkpoint.open(CASES / "vl_moe").read("model.language_model.layers.1.mlp.experts.gate_up_proj")
    found = parameters(load(CASES / "vl_moe"))["layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(found, stored.astype(np.float32).swapaxes(1, 2))


def test_single_experts_are_stacked_gate_first():
    checkpoint = Checkpoint.open(CASES / "moe_renormalised")
    found = parameters(load(CASES / "moe_renormalised"))["layers.2.mlp.experts.gate_up_proj"]
    for expert in range(7):
        gate, up = np.split(found[expert], 2)
        stem = f"model.layers.2.mlp.experts.{expert}"
        np.testing.assert_array_equal(gate, checkpoint.read(f"{stem}.gate_proj.weight").astype(np.float32))
        np.testing.assert_array_equal(up, checkpoint.read(f"{stem}.up_proj.weight").astype(np.float32))


def test_mixture_as_transformers_5_saves_it(folder_of):
    """Experts `[experts, out, in]`; the count under another name; a tie flag of no meaning inside text_config."""
    folder = folder_of("vl_moe")

    def turn(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].swapaxes(1, 2)

    edit(folder, turn)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text["num_local_experts"] = text.pop("num_experts")
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    edit_config(folder, text_config=text | {"tie_word_embeddings": True})
    assert_same(load(folder), load(CASES / "vl_moe"))


def test_tied_with_and_without_a_stored_head(folder_of):
    folder = folder_of("dense_tied_with_head")
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    network = load(folder)
    assert network.lm_head is None
    assert_same(network, load(CASES / "dense_tied_with_head"))


def test_untied_with_the_head_missing(folder_of):
    folder = folder_of("dense_untied")
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing.*tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("dense_tied", UP),
        ("dense_tied", "model.norm.weight"),
        ("moe_renormalised", EXPERT),
        ("moe_renormalised", "model.layers.0.mlp.gate.weight"),
        ("vl_image", "model.visual.deepstack_merger_list.2.linear_fc2.bias"),
        ("vl_image", "model.visual.patch_embed.proj.weight"),
        ("vl_moe", "model.language_model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_missing_and_misshapen_tensors(case, name, folder_of):
    folder = folder_of(case)
    expected = Checkpoint.open(folder).shape(name)
    edit(folder, lambda tensors: tensors.update({name: tensors[name][..., :-1]}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    wrong = (*expected[:-1], expected[-1] - 1)
    for part in (str(folder / "model.safetensors"), f"'{name}'", str(wrong), str(expected)):
        assert part in str(caught.value)

    edit(folder, lambda tensors: tensors.pop(name))
    # Without the fused tensor, single experts are looked for.
    missing = name.removesuffix("down_proj") if ".experts.down_proj" in name else name
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(folder))}.*'{re.escape(missing)}.*missing"):
        load(folder)


def test_shape_is_checked_where_the_size_is_equal(folder_of):
    """A transposed matrix has as many bytes as the right one."""
    folder = folder_of("dense_tied")
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].T}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(UP)}' has shape \(36, 52\).*\(52, 36\)"):
        load(folder)


def test_a_config_of_another_size_is_refused(folder_of):
    folder = folder_of("dense_tied")
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..*missing"):
        load(folder)
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'model\.layers\.2\..*belongs to no part"):
        load(folder)


def test_a_tensor_of_no_part(folder_of):
    folder = folder_of("dense_tied")
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": np.zeros(52, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'model\.layers\.0\.mlp\.up_proj\.bias'"):
        load(folder)


def test_integer_weights(folder_of):
    folder = folder_of("dense_tied")
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].astype(np.int8)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{re.escape(UP)}' is int8"):
        load(folder)


def test_unknown_dtype():
    with pytest.raises(ConfigError, match=r"float32, bfloat16.*'float64'"):
        load(CASES / "dense_tied", "float64")


@pytest.mark.parametrize("case", ["dense_tied", "moe_mixed", "vl_moe"])
def test_saved_weights_read_back(case, tmp_path):
    network = random_network(parse_config(Checkpoint.open(CASES / case).config), "float32", Switches(), seed=3)
    save_weights(network, parse_config(Checkpoint.open(CASES / case).config), tmp_path, "float32")
    shutil.copy(CASES / case / "config.json", tmp_path)
    assert_same(load(tmp_path), network)
    saved, published = Checkpoint.open(tmp_path), Checkpoint.open(CASES / case)
    assert {name: saved.shape(name) for name in saved.names()} == {
        name: published.shape(name) for name in published.names()
    }


# Loads a small model first, so that what every load takes is there already.
MEASURE = """
import sys
import models
from tests.models.peak_memory import forget_peak, peak_bytes
small, folder, quant = sys.argv[1:]
models.load(small, quant=quant or None)
forget_peak()
before = peak_bytes()
model = models.load(folder, quant=quant or None)
print(peak_bytes() - before)
"""


@pytest.mark.parametrize(("quant", "bits"), [("", 32), ("q8", 8.5)])
def test_loading_holds_little_more_than_the_weights(tmp_path, quant, bits):
    """Twenty-four matrices of 2 Mi values, stored in bfloat16 and kept in another form: what loading needs beside those
    that stay is what becomes of a few tensors on their way, as float32 and as stored, and not that of all."""
    config = Checkpoint.open(CASES / "dense_tied").config
    width = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 512}
    folder = hollow_checkpoint(tmp_path / "wide", config | width, np.dtype(ml_dtypes.bfloat16))
    values = sum(np.prod(stored.shape) for stored in Checkpoint.open(folder).tensors.values())
    command = [sys.executable, "-c", MEASURE, str(CASES / "dense_tied"), str(folder), quant]
    grown = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    kept, stored = int(values * bits / 8), 2 * int(values)
    assert kept / 2 < grown < kept + 3 * stored / 4
