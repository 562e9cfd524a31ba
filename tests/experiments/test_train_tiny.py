"""The trainer: each loss falls, a run goes through all its phases and goes on where it stopped, and it ends in a model
with its report."""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import models
from experiments import tiny_data, train_tiny
from experiments.tiny_data import Batch, picture_batches, training_batches
from experiments.tiny_models import TINY_MODELS, WEIGHTS, TinyModel, full_config
from experiments.train_tiny import (
    DECAY_FROM,
    PEAK_RATE,
    QUICK,
    RARE,
    READ_OUT,
    ROOT,
    WARM_UP_STEPS,
    Budget,
    Log,
    Trainer,
    Words,
    balance_loss,
    cell_loss,
    learning_rate,
    made_ahead,
    make_model,
    run,
    text_batches,
    tower_batches,
)
from models.compilation import enable_persistent_cache
from models.config import parse_config
from models.layers import RMSNorm
from models.moe import MoeBlock, Router
from tests.experiments.conftest import TaughtLittle, smaller

ONE_STEP = Budget(minutes=1e-3, logged_steps=1, evaluate_every=0, checked=1, reported=1)
TASKS = {"tiny-vl": "picture: yes or no", "tiny-moe": "arithmetic"}
SEED = 9  # with it the first batch of every phase has the same shape, and one step is compiled for all


@pytest.fixture(autouse=True)
def steps_are_compiled_once(unoptimised: None) -> None:
    """Tests train in the same few shapes, so that the later ones find their steps in the cache on disk."""
    enable_persistent_cache()


def one_layer(model: TinyModel) -> TinyModel:
    """A smaller model of one layer and, if it sees, one block: XLA takes long over a step's derivatives."""
    config = smaller(model).config
    text = config["text_config"] if model.pictures else config
    text["num_hidden_layers"] = 1
    if model.pictures:
        config["vision_config"]["depth"] = 1
    return replace(model, config=config)


@pytest.fixture(params=sorted(TINY_MODELS))
def small_model(request: pytest.FixtureRequest) -> TinyModel:
    """Each of the two models in turn."""
    return one_layer(TINY_MODELS[request.param])


@pytest.fixture
def small_vl() -> TinyModel:
    return one_layer(TINY_MODELS["tiny-vl"])


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are a quarter as large, made and learned in a quarter of the time."""
    monkeypatch.setattr(tiny_data, "TOKENS_PER_BATCH", tiny_data.TOKENS_PER_BATCH // 4)
    monkeypatch.setattr(tiny_data, "PICTURES_PER_BATCH", tiny_data.PICTURES_PER_BATCH // 4)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's clock moves on by a second whenever it is read, so that seconds are steps."""
    monkeypatch.setattr(train_tiny, "time", SimpleNamespace(monotonic=map(float, count()).__next__))


def some_batch(trainer: Trainer) -> Batch:
    """A batch of the model's task in `TASKS`."""
    task = trainer.model.tasks()[TASKS[trainer.model.name]]
    return next(training_batches(trainer.encoder, {"": (task, 1.0)}, "fall"))


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure and the same values."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(*leaves) for leaves in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


# The losses


def test_balance_loss_is_one_for_even_use_and_more_otherwise(tiny_tokenizer: Tokenizer) -> None:
    config = parse_config(full_config(TINY_MODELS["tiny-moe"], tiny_tokenizer)).text
    block = MoeBlock(config.moe, config.hidden)
    tokens = jnp.asarray(np.random.default_rng(0).standard_normal((512, config.hidden)), jnp.float32)
    even = Router(config.hidden, config.moe.experts)
    even.weight.set_value(jnp.asarray(np.random.default_rng(1).standard_normal(even.weight.shape) * 0.05, jnp.float32))
    block.gate = even
    norm = RMSNorm(config.hidden, config.norm_eps)
    norm.weight.set_value(jnp.ones(config.hidden))
    assert float(balance_loss(block, tokens, norm)) == pytest.approx(1.0, abs=0.05)
    crowded = even.weight[...].at[0].set(0.0)
    one_sided = jnp.abs(tokens)
    even.weight.set_value(crowded.at[0].add(1.0))
    assert float(balance_loss(block, one_sided, norm)) > 1.5


DIRECTIONS = [READ_OUT * np.eye(20, dtype=np.float32)[start:end] for start, end in ((0, 4), (4, 11), (11, 20))]
CELLS = np.array([[[1, 3, 4], [0, 0, 0], [3, 6, 8]], [[0, 0, 5], [2, 1, 1], [-1, -1, -1]]])


def told(cells: np.ndarray) -> np.ndarray:
    """Features `[2, pictures, tokens, 20]` that tell their cells along `DIRECTIONS`, all at right angles."""
    return np.stack([sum(values[cells[..., attribute]] for attribute, values in enumerate(DIRECTIONS))] * 2)


@pytest.fixture(scope="module")
def loss_of_cells() -> Callable[[np.ndarray, np.ndarray], float]:
    """`cell_loss` along `DIRECTIONS`, compiled."""
    compiled = jax.jit(cell_loss)

    def loss(features: np.ndarray, cells: np.ndarray) -> float:
        with jax.numpy_dtype_promotion("standard"):
            return float(compiled(features.astype(np.float32), cells.astype(np.int32), DIRECTIONS))

    return loss


def test_cell_loss_vanishes_where_features_tell_what_they_show(loss_of_cells: Callable) -> None:
    assert loss_of_cells(0 * told(CELLS), CELLS) == pytest.approx(np.log(4 * 7 * 9))
    assert loss_of_cells(told(CELLS), CELLS) < 1e-4
    assert loss_of_cells(3 * told(CELLS), CELLS) == pytest.approx(0, abs=1e-6)
    assert loss_of_cells(told(CELLS[::-1]), CELLS) > 5


def test_cell_loss_ignores_padding(loss_of_cells: Callable) -> None:
    features = np.random.default_rng(1).standard_normal((2, 2, 3, 20))
    expected = loss_of_cells(features, CELLS)
    features[:, CELLS[..., 0] < 0] *= 100
    assert loss_of_cells(features, CELLS) == pytest.approx(expected, rel=1e-6)
    features[:, CELLS[..., 0] == 0] *= 100
    assert loss_of_cells(features, CELLS) != pytest.approx(expected, rel=0.1)


def test_a_cell_with_a_shape_counts_more_than_the_ground(loss_of_cells: Callable) -> None:
    shape_missed, ground_missed = (told(CELLS) for _ in range(2))
    shape_missed[:, 0, 0] = 0
    ground_missed[:, 0, 1] = 0
    ratio = loss_of_cells(shape_missed, CELLS) / loss_of_cells(ground_missed, CELLS)
    assert ratio == pytest.approx(RARE, rel=1e-3)


def test_words_give_a_direction_to_every_value(tiny_tokenizer: Tokenizer) -> None:
    table = np.random.default_rng(2).standard_normal((tiny_tokenizer.get_vocab_size(), 32)).astype(np.float32)
    words = Words(tiny_tokenizer)

    def total(table: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        directions = words.directions(table)
        return sum(values.sum() for values in directions), directions

    gradient, directions = jax.jit(jax.grad(total, has_aux=True))(table)
    assert not gradient.any()  # the words stay where the answers put them
    assert [values.shape for values in directions] == [(4, 32), (7, 32), (10, 32)]
    for values in map(np.asarray, directions):
        assert np.linalg.norm(values, axis=1) == pytest.approx(READ_OUT, rel=1e-5)
        assert (values @ values.T / READ_OUT**2 - np.eye(len(values))).max() < 0.95
    rows = table[tiny_tokenizer.encode(" circle圆形").ids]
    circle = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).sum(axis=0)
    assert directions[0][1] == pytest.approx(READ_OUT * circle / np.linalg.norm(circle), rel=1e-4, abs=1e-5)


# Steps


def test_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    rising = [learning_rate(step, 0.0) for step in range(WARM_UP_STEPS)]
    assert rising == pytest.approx(np.linspace(PEAK_RATE / WARM_UP_STEPS, PEAK_RATE, WARM_UP_STEPS))
    assert {learning_rate(1000, done) for done in np.linspace(0, DECAY_FROM, 5)} == {PEAK_RATE}
    assert learning_rate(1000, (1 + DECAY_FROM) / 2) == pytest.approx(PEAK_RATE / 2)
    assert learning_rate(1000, 1.0) == learning_rate(1000, 1.2) == 0.0


@pytest.mark.usefixtures("usual_promotion", "small_batches")
def test_training_lowers_the_loss_and_goes_on_after_a_stop(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    trainer = Trainer(small_model, tiny_tokenizer, SEED)
    batch = some_batch(trainer)
    losses = [trainer.train_step(batch, 0.003) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    trainer.progress.seconds = 12.5
    trainer.save(tmp_path / "snapshot")
    other = Trainer(small_model, tiny_tokenizer, SEED + 1)
    assert not same(other.progress.parameters, trainer.progress.parameters)
    other.resume(tmp_path / "snapshot")
    assert (other.progress.step, other.progress.seconds) == (40, 12.5)
    assert same(other.progress.parameters, trainer.progress.parameters)
    assert same(other.progress.optimiser, trainer.progress.optimiser)
    following = trainer.train_step(batch, 0.003)
    trainer.progress = other.progress
    assert trainer.train_step(batch, 0.003) == following


@pytest.mark.usefixtures("usual_promotion", "small_batches", "ticks")
def test_the_tower_learns_alone(
    small_vl: TinyModel, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tiny, "WARM_UP_STEPS", 1)
    trainer = Trainer(small_vl, tiny_tokenizer, SEED)
    before = jax.tree.map(np.array, trainer.progress.parameters)
    pictures = next(picture_batches(trainer.encoder, "tower"))
    taught = list(trainer.teach_tower(repeat(pictures), seconds=60))
    seconds, losses = zip(*taught, strict=True)
    assert len(taught) > 20
    assert list(seconds) == sorted(seconds)
    assert losses[-1] < 0.8 * losses[0]
    after = trainer.progress.parameters
    assert trainer.progress.step == 0
    assert same({**after, "visual": None}, {**before, "visual": None})
    moved = jax.tree.map(lambda one, other: not np.array_equal(one, other), after["visual"], before["visual"])
    assert all(jax.tree.leaves(moved))


# Batches from another process


@pytest.mark.parametrize(
    ("make", "name", "weights"), [(text_batches, "tiny-moe", [WEIGHTS]), (tower_batches, "tiny-vl", [])]
)
def test_batches_made_ahead_are_the_same_and_their_process_ends(
    make: Callable[..., Iterator[Any]],
    name: str,
    weights: list[Mapping[str, float]],
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_tiny, "BATCHES_AHEAD", 1)  # no more than are looked at
    arguments = (name, tiny_tokenizer.to_str(), *weights, "ahead")
    with made_ahead(make, *arguments) as batches:
        (process,) = multiprocessing.active_children()
        made = next(batches)
    assert not process.is_alive()
    assert same(made, next(make(*arguments)))


def test_a_process_that_fails_to_make_batches_is_noticed(tiny_tokenizer: Tokenizer) -> None:
    with (
        made_ahead(text_batches, "tiny-moe", tiny_tokenizer.to_str(), {}, "0") as batches,
        pytest.raises(RuntimeError, match="ended, exit code 1"),
    ):
        next(batches)


# Whole runs


@pytest.fixture
def taught_little(tiny_tokenizer: Tokenizer, tmp_path: Path) -> Callable:
    """Makes a small model that is taught a single task, in all phases."""

    def make(name: str, task: str) -> TinyModel:
        (tmp_path / "work").mkdir()
        tiny_tokenizer.save(str(tmp_path / "work" / "tokenizer.json"))
        small = one_layer(TINY_MODELS[name])
        return TaughtLittle(small.name, small.config, small.pictures, task)

    return make


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What batches a run has asked for, and their seeds, in order. They are made here: `made_ahead` gives
    the same, from a process for each phase, which takes its time to start."""
    asked = []

    def noting(make: Callable[..., Iterator[Any]], *arguments: Any) -> AbstractContextManager[Iterator[Any]]:
        asked.append((make.__name__, arguments[-1]))
        return nullcontext(make(*arguments))

    monkeypatch.setattr(train_tiny, "made_ahead", noting)
    return asked


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.usefixtures("usual_promotion", "small_batches")
@pytest.mark.parametrize(("name", "task"), TASKS.items())
def test_a_run_goes_through_all_phases_and_ends_in_a_model(
    name: str, task: str, taught_little: Callable, sources: list[tuple[str, str]], tmp_path: Path
) -> None:
    model = taught_little(name, task)
    make_model(model, ONE_STEP, SEED, tmp_path / "work", tmp_path)
    phases = ["text_batches"] * len(model.phases())
    assert [kind for kind, _ in sources] == ["tower_batches"] * model.pictures + phases
    begun = [int(seed.removeprefix(f"{SEED} from step ")) for kind, seed in sources if kind == "text_batches"]
    assert begun[0] == 0
    assert begun == sorted(set(begun))

    log = entries(tmp_path / "work" / "raw.jsonl")
    kinds = [next(kind for kind in ("seeing", "loss", "accuracy") if kind in entry) for entry in log]
    assert kinds[: kinds.index("loss")] == ["seeing"] * kinds.count("seeing")
    assert ("seeing" in kinds) == model.pictures
    assert kinds.count("accuracy") >= 2
    assert [entry["seconds"] for entry in log] == sorted(entry["seconds"] for entry in log)
    assert all(0 <= entry["accuracy"][task] <= 1 for entry in log if "accuracy" in entry)

    folder, results = tmp_path / "models" / "pretrained" / name, tmp_path / "results" / f"train_{name}"
    assert f"# {name}" in (folder / "README.md").read_text()
    assert models.load(folder).logits([1, 2]).shape == (2, 2048)
    assert {file.name for file in results.iterdir()} == {
        *("answers.jsonl", "environment.json", "plot.png", "plot.svg", "raw.jsonl", "table.md")
    }
    assert {row["task"] for row in entries(results / "answers.jsonl")} == {task, "outside, new wordings"}
    assert entries(results / "raw.jsonl") == log


@pytest.mark.usefixtures("usual_promotion")
def test_a_finished_run_trains_no_more(
    small_model: TinyModel, tiny_tokenizer: Tokenizer, sources: list[tuple[str, str]], tmp_path: Path
) -> None:
    trainer = Trainer(small_model, tiny_tokenizer, SEED)
    trainer.progress.seconds = ONE_STEP.seconds
    run(trainer, ONE_STEP, 0, Log(tmp_path / "log"), tmp_path / "snapshot")
    assert sources == []
    assert not (tmp_path / "log").exists()


# The command


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TinyModel, Budget, int, Path, Path]]:
    """What the command has set out to make."""
    asked = []
    monkeypatch.setattr(train_tiny, "make_model", lambda *arguments: asked.append(arguments))
    return asked


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_tiny", *arguments])
    train_tiny.main()


def test_a_quick_run_writes_to_a_new_folder(made: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_tiny.tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        command(monkeypatch, "tiny-vl", "--quick")
    assert {budget for _, budget, *_ in made} == {QUICK}
    assert len({out for *_, out in made}) == 2
    for *_, work, out in made:
        assert out.parent == tmp_path
        assert work.parent == out


@pytest.mark.parametrize("option", ["--minutes=3", "--work=x", "--out=models/pretrained"])
def test_a_quick_run_takes_no_other_place_or_time(
    option: str, made: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "tiny-moe", "--quick", option)
    assert f"--quick sets {option.split('=')[0]} itself" in capsys.readouterr().err
    assert made == []


def test_a_long_run_writes_to_the_repository_unless_told_otherwise(
    made: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(monkeypatch, "tiny-vl", "--seed", "3")
    command(monkeypatch, "tiny-moe", "--minutes", "7.5", "--work", str(tmp_path), "--out", str(tmp_path / "out"))
    (first, budget, seed, _, out), (second, shorter, _, work, elsewhere) = made
    assert (first.name, budget.minutes, seed, out) == ("tiny-vl", 80, 3, ROOT)
    assert (second.name, shorter.minutes, work, elsewhere) == (
        *("tiny-moe", 7.5),
        *(tmp_path / "tiny-moe", tmp_path / "out"),
    )
    assert budget.reported == shorter.reported == 300
