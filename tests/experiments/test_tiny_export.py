"""The trainer and its exports: the loss falls, a run goes on where it stopped, and the folder opens as a model."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import models
from experiments.tiny_data import training_batches
from experiments.tiny_export import export
from experiments.tiny_models import TINY_MODELS, TinyModel, full_config
from experiments.tiny_tasks import greeting
from experiments.train_tiny import PEAK_RATE, Trainer, balance_loss, learning_rate
from models.config import parse_config
from models.layers import Linear
from models.moe import MoeBlock
from models.switches import Switches
from models.weights import random_network

LARGEST_FOLDER = 12_000_000  # bytes


@pytest.fixture
def usual_promotion() -> Iterator[None]:
    """optax mixes types as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("usual_promotion")
def test_training_lowers_the_loss_and_goes_on_after_a_stop(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    trainer = Trainer(small_model, tiny_tokenizer, seed=1)
    (batch,) = islice(training_batches(trainer.encoder, {"": (greeting(False), 1.0)}, "fall"), 1)
    losses = [trainer.train_step(batch, 0.003) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    trainer.save(tmp_path / "snapshot")
    following = trainer.train_step(batch, 0.003)
    trainer.resume(tmp_path / "snapshot")
    assert trainer.progress.step == 40
    assert trainer.train_step(batch, 0.003) == following


def test_an_export_is_the_network_in_bfloat16(small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    config = parse_config(full_config(small_model, tiny_tokenizer))
    network = random_network(config, "bfloat16", Switches(), seed=2)
    export(small_model, tiny_tokenizer, network, folder)
    loaded = models.load(folder)
    ids = np.arange(40, dtype=np.int32)
    positions = jnp.asarray(np.broadcast_to(ids, (3, 1, 40)))
    hidden, _ = network(jnp.asarray(ids[None]), positions, None, None)
    expected = np.asarray(network.logits(hidden))[0]
    assert np.abs(loaded.logits(ids) - expected).max() < 1e-5 * np.ptp(expected)


def test_an_export_answers_in_text(small_model: TinyModel, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    config = parse_config(full_config(small_model, tiny_tokenizer))
    export(small_model, tiny_tokenizer, random_network(config, "bfloat16", Switches()), folder)
    loaded = models.load(folder)
    steps = list(loaded.generate("从1数到20", max_tokens=5))
    assert 1 <= len(steps) <= 5
    end = {tiny_tokenizer.token_to_id("<|im_end|>"), tiny_tokenizer.token_to_id("<|endoftext|>")}
    assert set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == end
    assert (folder / "preprocessor_config.json").is_file() == small_model.pictures


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_models_are_small(name: str, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    model = TINY_MODELS[name]
    network = random_network(parse_config(full_config(model, tiny_tokenizer)), "bfloat16", Switches())
    export(model, tiny_tokenizer, network, folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST_FOLDER


def test_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    assert learning_rate(0, 0.0) < PEAK_RATE / 20
    assert learning_rate(1000, 0.1) == PEAK_RATE
    assert learning_rate(1000, 1.0) == 0.0
    shares = [learning_rate(1000, done) for done in np.linspace(0, 1, 21)]
    assert shares == sorted(shares, reverse=True)


def test_balance_loss_is_one_for_even_use_and_more_otherwise(tiny_tokenizer: Tokenizer) -> None:
    config = parse_config(full_config(TINY_MODELS["tiny-moe"], tiny_tokenizer)).text
    block = MoeBlock(config.moe, config.hidden)
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((512, config.hidden)), jnp.float32)
    even = Linear(config.hidden, config.moe.experts)
    even.weight.set_value(jnp.asarray(np.random.default_rng(1).standard_normal(even.weight.shape) * 0.05, jnp.float32))
    block.gate = even
    assert float(balance_loss(block, tokens)) == pytest.approx(1.0, abs=0.05)
    crowded = even.weight[...].at[0].set(0.0)
    one_sided = jnp.abs(tokens)
    even.weight.set_value(crowded.at[0].add(1.0))
    assert float(balance_loss(block, one_sided)) > 1.5
