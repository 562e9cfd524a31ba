"""Exports: the folder holds what transformers reads, opens as a model, and the committed ones answer as there."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer

import models
from experiments.parity import TOLERANCE
from experiments.tiny_export import export
from experiments.tiny_models import PREPROCESSOR, TINY_MODELS, TinyModel, full_config
from models.chat_template import DEFAULT_TEMPLATE
from models.config import parse_config
from models.model import PRETRAINED
from models.prompt import Prompt
from models.switches import Switches
from models.weights import random_network

LARGEST_FOLDER = 12_000_000  # bytes
ANSWERS = Path(__file__).parents[1] / "references" / "tiny_answers"
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def export_random(model: TinyModel, tokenizer: Tokenizer, folder: Path) -> None:
    """An export of random weights."""
    config = parse_config(full_config(model, tokenizer))
    export(model, tokenizer, random_network(config, "bfloat16", Switches()), folder)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_an_export_is_the_network_in_bfloat16(small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    config = parse_config(full_config(small_model, tiny_tokenizer))
    network = random_network(config, "bfloat16", Switches(), seed=2)
    export(small_model, tiny_tokenizer, network, folder)
    loaded = models.load(folder)
    ids = np.arange(40, dtype=np.int32)
    positions = jnp.asarray(np.broadcast_to(ids, (3, 1, 40)))
    forward = nnx.jit(lambda network, *text: network.logits(network(*text, None, None)[0]))
    expected = np.asarray(forward(network, jnp.asarray(ids[None]), positions))[0]
    assert np.abs(loaded.logits(ids) - expected).max() < 1e-5 * np.ptp(expected)


def test_an_export_answers_in_text(small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    export_random(small_model, tiny_tokenizer, folder)
    steps = list(models.load(folder).generate("从1数到20", max_tokens=5))
    assert 1 <= len(steps) <= 5
    assert "".join(step.text for step in steps) != "" or steps[0].finish_reason == "stop"


def test_an_export_has_every_file_that_transformers_reads(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path
) -> None:
    export_random(small_model, tiny_tokenizer, folder)
    seeing = {"preprocessor_config.json"} if small_model.pictures else set()
    assert {file.name for file in folder.iterdir()} == FILES | seeing
    assert read(folder / "config.json") == full_config(small_model, tiny_tokenizer)
    assert (folder / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE.read_text()
    if small_model.pictures:
        assert read(folder / "preprocessor_config.json") == PREPROCESSOR


def test_exported_weights_have_their_published_names_and_type(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path
) -> None:
    export_random(small_model, tiny_tokenizer, folder)
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118 - no mapping
        names = set(weights.keys())
    text = "model.language_model." if small_model.pictures else "model."
    experts = [f"mlp.experts.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "up", "down")]
    dense = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts = [*(dense if small_model.pictures else ["mlp.gate", *experts]), "input_layernorm"]
    parts += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    decoder = {f"{text}layers.{layer}.{part}.weight" for layer in range(2) for part in parts}
    decoder |= {f"{text}layers.{layer}.post_attention_layernorm.weight" for layer in range(2)}
    decoder |= {f"{text}embed_tokens.weight", f"{text}norm.weight"}
    assert {name for name in names if not name.startswith("model.visual.")} == decoder
    assert any(name.startswith("model.visual.") for name in names) == small_model.pictures


def test_the_exported_vocabulary_is_described_to_transformers(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path
) -> None:
    export_random(small_model, tiny_tokenizer, folder)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert vocabulary.to_str() == tiny_tokenizer.to_str()
    settings, generation = read(folder / "tokenizer_config.json"), read(folder / "generation_config.json")
    assert (settings["tokenizer_class"], settings["eos_token"]) == ("Qwen2Tokenizer", "<|im_end|>")
    assert generation["eos_token_id"] == [vocabulary.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert generation["pad_token_id"] == vocabulary.token_to_id(settings["pad_token"])
    assert generation["do_sample"] is False
    special = [token.content for token in vocabulary.get_added_tokens_decoder().values() if token.special]
    assert {settings["eos_token"], settings["pad_token"], "<|im_start|>"} <= set(special)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_models_are_small(name: str, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    export_random(TINY_MODELS[name], tiny_tokenizer, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST_FOLDER


# The committed folders


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_committed_folder_is_an_export(name: str) -> None:
    model, folder = TINY_MODELS[name], PRETRAINED / name
    seeing = {"preprocessor_config.json"} if model.pictures else set()
    assert {file.name for file in folder.iterdir()} == FILES | seeing | {"README.md"}
    assert read(folder / "config.json") == full_config(model, Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert (folder / "chat_template.jinja").read_text() == DEFAULT_TEMPLATE.read_text()


def with_pictures(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with pictures in the place of their files' names."""

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        return part | {"image": Image.open(ANSWERS / part["image"])} if part["type"] == "image" else part

    return [
        message | {"content": [opened(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def visual_arguments(prompt: Prompt) -> dict[str, np.ndarray]:
    """The prompt's pictures as `LoadedModel.logits` takes them."""
    if not prompt.visuals:
        return {}
    return {
        "pixel_values": np.concatenate([visual.patches for visual in prompt.visuals]),
        "image_grid_thw": np.array([visual.grid for visual in prompt.visuals]),
    }


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a_committed_model_answers_as_in_transformers(name: str) -> None:
    again = f"run tests/references/make_tiny_answers.py {name} again"
    file = ANSWERS / f"{name}.json"
    assert file.is_file(), f"{file} is missing: {again}"
    reference, loaded = read(file), models.load(name)
    weights = hashlib.sha256((PRETRAINED / name / "model.safetensors").read_bytes()).hexdigest()
    assert reference["weights"] == weights, f"{file} is of other weights: {again}"
    assert len(reference["answers"]) == 6
    for answer in reference["answers"]:
        prompt, greedy = loaded.prompt(with_pictures(answer["messages"])), answer["greedy"]
        assert prompt.token_ids.tolist() == answer["token_ids"]
        steps = loaded.generate(prompt, max_tokens=reference["most_tokens"])
        assert [step.token_id for step in steps] == greedy
        ids = np.concatenate([prompt.token_ids, greedy[:-1]])
        logits = loaded.logits(ids, **visual_arguments(prompt))[len(prompt.token_ids) - 1 :]
        found = np.take_along_axis(logits, np.array(answer["top_ids"]), axis=1)
        assert np.abs(found - answer["top_logits"]).max() < TOLERANCE * np.ptp(logits)
