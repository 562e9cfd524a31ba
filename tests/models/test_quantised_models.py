"""Models with quantised weights: quantised while loading or converted before, against each other and against floats."""

import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import models
from experiments.parity import CASES, read_reference
from experiments.tiny_pictures import EXAMPLE
from models.convert import convert
from models.errors import CheckpointError, ConfigError
from models.layers import Embedding, Linear
from models.model import PRETRAINED
from models.moe import Experts

QUESTIONS = (
    "从1数到20",
    "What is 7 + 8?",
    "The code word is KX72B. What is the code word?",
    "Hello!",
    "Write a poem about the sea.",
)


# Whose answers leave no choice, so that coarse weights cannot tip it.
CLEAR_QUESTIONS = ("从1数到20", "Count from 1 to 9", "Hello!")
PICTURE_QUESTION = "What is in this picture?"


def answers(model: models.LoadedModel, questions: tuple[str, ...] = QUESTIONS) -> list[str]:
    """The answers to the questions and, of a model that sees, to one about a picture."""
    told = ["".join(step.text for step in model.generate(question)) for question in questions]
    if model.config.vision is not None:
        told.append("".join(step.text for step in model.generate(PICTURE_QUESTION, images=[EXAMPLE.draw()])))
    return told


@functools.cache
def loaded(name: str, quant: str | None = None) -> models.LoadedModel:
    """A model of this repository, opened and compiled once for all tests."""
    return models.load(name, quant=quant)


@functools.cache
def float_answers(name: str, questions: tuple[str, ...] = QUESTIONS) -> list[str]:
    """What a model answers with the weights that it has."""
    return answers(loaded(name), questions)


@pytest.fixture(scope="module", params=["tiny-vl", "tiny-moe"])
def converted(request, tmp_path_factory) -> tuple[str, Path]:
    """A model of this repository and its q4 folder."""
    folder = tmp_path_factory.mktemp("converted") / request.param
    convert(request.param, folder, "q4")
    return request.param, folder


def test_converting_before_and_quantising_while_loading_give_the_same(converted):
    name, folder = converted
    before, while_loading = models.load(folder), models.load(name, quant="q4")
    parameters = [nnx.to_flat_state(nnx.state(model.inference.network)) for model in (before, while_loading)]
    for (path, one), (same, other) in zip(*parameters, strict=True):
        assert path == same
        np.testing.assert_array_equal(one.get_value(), other.get_value())
    assert before.inference.cache_type == "int8"


@pytest.mark.parametrize("mapped", [True, False])
def test_a_converted_file_is_used_where_it_lies_unless_it_is_to_be_copied(converted, mapped):
    _, folder = converted
    network = models.load(folder, mapped=mapped).inference.network
    places = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder / "model.safetensors") in line
    ]
    blocks = [
        parameter.get_value()
        for _, parameter in nnx.to_flat_state(nnx.state(network))
        if parameter.get_value().dtype in (np.uint8, np.int8)
    ]
    assert blocks
    for array in blocks:
        assert any(begin <= array.unsafe_buffer_pointer() < end for begin, end in places) == mapped


def test_another_scheme_than_the_stored_one_is_refused(converted):
    _, folder = converted
    assert models.load(folder, quant="q4")
    with pytest.raises(ConfigError, match="holds q4 weights; they cannot become q8"):
        models.load(folder, quant="q8")


def test_foreign_quantisation_is_refused(tmp_path):
    shutil.copytree(PRETRAINED / "tiny-moe", tmp_path / "awq")
    file = tmp_path / "awq" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(CheckpointError, match=r"awq.*models\.convert"):
        models.load(tmp_path / "awq")


def test_a_converted_tensor_of_another_type_is_named(converted, tmp_path):
    _, folder = converted
    shutil.copytree(folder, tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    content = file.read_bytes()
    pattern = re.compile(rb'layers\.0\.self_attn\.q_proj\.weight": ?\{"dtype": ?"U8"')
    assert pattern.search(content)
    file.write_bytes(pattern.sub(lambda found: found.group().replace(b'"U8"', b'"I8"'), content))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*int8.*uint8"):
        models.load(tmp_path / "broken")


@pytest.mark.parametrize("name", ["tiny-vl", "tiny-moe"])
@pytest.mark.parametrize("quant", ["q8", "q4-head-q8"])
def test_the_default_models_answer_the_same_quantised(name, quant):
    assert answers(loaded(name, quant)) == float_answers(name)


@pytest.mark.parametrize("name", ["tiny-vl", "tiny-moe"])
def test_the_default_models_answer_clear_questions_the_same_in_four_bits(name):
    quantised = answers(loaded(name, "q4"), CLEAR_QUESTIONS)
    assert quantised == float_answers(name, CLEAR_QUESTIONS)
    assert all(quantised)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_a_narrow_cache_gives_the_same_answers(kv):
    assert answers(models.load("tiny-moe", kv=kv)) == float_answers("tiny-moe")


@pytest.mark.parametrize("quant", ["q4", "q4-head-q8", "q8"])
def test_every_part_has_the_format_of_its_scheme(quant):
    network = loaded("tiny-vl", quant).inference.network
    bytes_of = {"q4": np.uint8, "q8": np.int8}
    for path, module in nnx.iter_modules(network):
        name = ".".join(map(str, path))
        if not isinstance(module, (Linear, Embedding)):
            continue
        dtype = module.weight.get_value().dtype
        if name in ("visual.patch_embed", "visual.pos_embed"):
            assert dtype == np.float32, name
        elif name.startswith("visual."):
            assert dtype == np.int8, name
        elif name == "embed_tokens":
            assert dtype == bytes_of["q8" if quant == "q4-head-q8" else quant[:2]], name
        else:
            assert dtype == bytes_of[quant[:2]], name


def test_routers_stay_floats():
    network = loaded("tiny-moe", "q4").inference.network
    for layer in network.layers:
        assert layer.mlp.gate.weight.get_value().dtype == np.float32
        assert layer.mlp.experts.row_by_row
        assert isinstance(layer.mlp.experts, Experts)


@pytest.mark.parametrize("case", ["dense_untied", "moe_mixed", "vl_images", "vl_moe"])
def test_odd_shapes_work_and_stay_near_the_floats(case):
    """Random checkpoints whose sizes are no multiples of the blocks'. They amplify: keys and values rounded to bfloat16
    alone move their logits by a hundredth."""
    reference = read_reference(case)
    logits = models.load(CASES / case, quant="q8").logits(reference.token_ids, **reference.visual)
    error = np.sqrt(np.mean((logits - reference.logits) ** 2)) / np.std(reference.logits)
    assert 0 < error < 0.2


@pytest.mark.parametrize("preset", ["qwen3-vl-2b"])
def test_random_quantised_weights_have_the_size_of_random_floats(preset, monkeypatch):
    """One layer of the published shape: the numbers that come out are as large."""
    shape = models.model.preset(preset)
    shape = shape | {
        "text_config": shape["text_config"] | {"num_hidden_layers": 1, "vocab_size": 512},
        "vision_config": shape["vision_config"] | {"depth": 1, "deepstack_visual_indexes": [0]},
    }
    monkeypatch.setattr(models.model, "preset", lambda name: shape)
    ids = np.arange(40, dtype=np.int32)
    spread = [np.std(models.load(preset, quant=quant, weights="random").logits(ids)) for quant in (None, "q4", "q8")]
    assert max(spread) / min(spread) < 1.3
    jax.clear_caches()
