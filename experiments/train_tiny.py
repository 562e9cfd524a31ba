"""Trains the small default models from scratch, on conversations that it makes up.

Claim: a Qwen3-VL and a Qwen3-MoE of about 4 million parameters learn the tasks of `tiny_tasks` and `tiny_pictures`; of
every task's held-out conversations they answer at least 97 % rightly. Cost: under 90 minutes on 2 cores each.

    python -m experiments.train_tiny tiny-vl --minutes 88
    python -m experiments.train_tiny tiny-moe --minutes 85

Writes models/pretrained/<name>/ (an ordinary Hugging Face folder) and results/train_<name>/, here or in another folder
(--out). A run that was stopped goes on where its last snapshot was. Before a long run, `--quick` checks in about two
minutes that every part of it works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jaxtyping import Array
from tokenizers import Tokenizer
from tqdm import tqdm

from experiments.tiny_data import Batch, Encoder, Pictures, evaluation_batches, picture_batches, training_batches
from experiments.tiny_drills import drills
from experiments.tiny_export import export
from experiments.tiny_models import (
    PREPROCESSOR,
    SEEING_UNTIL,
    TINY_MODELS,
    TinyModel,
    full_config,
)
from experiments.tiny_pictures import cell_words
from experiments.tiny_report import write_report
from experiments.tiny_vocabulary import train_vocabulary
from models.compilation import cache_folder, enable_persistent_cache
from models.config import ModelConfig, parse_config
from models.freed_memory import keep_freed_memory
from models.images import ImageProcessor
from models.layers import RMSNorm
from models.moe import MoeBlock
from models.network import Network, VisualTokens
from models.switches import Switches
from models.vision import VisionTower
from models.weights import random_network

PEAK_RATE = 3e-3
WARM_UP_STEPS = 60
DECAY_FROM = 0.3  # share of the time from which on the learning rate falls to zero, linearly
ADAM_SHARE = 0.4  # of the learning rate, for what Muon does not train
# Most pixels are white, all 1: a step of the patch embedding adds up over 1,536 of them.
PATCH_SHARE = 0.03
TABLE_SCALE = 40.0  # makes the learned positions as large as the patches they are added to
WEIGHT_DECAY = 0.05
CLIP = 1.0
BALANCE = 0.01  # weight of the experts' load-balancing loss
SEEING = 0.3  # weight of the cell loss
READ_OUT = 4.0  # length of the directions along which cells are read out
RARE = 8.0  # weight of a cell with a shape in the cell loss
BATCHES_AHEAD = 32
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Budget:
    """What a run may cost: `minutes` of training, a line in the log per `logged_steps` of it, an evaluation after every
    `evaluate_every` seconds of it on `checked` held-out conversations per task, and `reported` of them for the report.
    """

    minutes: float
    logged_steps: int
    evaluate_every: float
    checked: int
    reported: int

    @property
    def seconds(self) -> float:
        """The training time in seconds."""
        return self.minutes * 60


FULL = Budget(minutes=80, logged_steps=50, evaluate_every=300, checked=64, reported=300)
QUICK = Budget(minutes=0.4, logged_steps=1, evaluate_every=10, checked=2, reported=2)


def make_encoder(model: TinyModel, tokenizer: Tokenizer) -> Encoder:
    """What turns the model's conversations into batches."""
    size = PREPROCESSOR["size"]
    processor = ImageProcessor(
        PREPROCESSOR["patch_size"],
        PREPROCESSOR["temporal_patch_size"],
        PREPROCESSOR["merge_size"],
        size["shortest_edge"],
        size["longest_edge"],
        tuple(PREPROCESSOR["image_mean"]),
        tuple(PREPROCESSOR["image_std"]),
    )
    config = parse_config(full_config(model, tokenizer))
    return Encoder(tokenizer, config, processor if model.pictures else None)


# Batches come from a process of their own.


def text_batches(name: str, vocabulary: str, weights: Mapping[str, float], seed: str) -> Iterator[Batch]:
    """Training batches of tasks drawn by `weights`."""
    model = TINY_MODELS[name]
    taught = model.tasks() | drills(model.pictures)
    tasks = {task: (make, weights[task]) for task, make in taught.items()}
    return training_batches(make_encoder(model, Tokenizer.from_str(vocabulary)), tasks, seed)


def tower_batches(name: str, vocabulary: str, seed: str) -> Iterator[Pictures]:
    """Training batches of pictures alone."""
    return picture_batches(make_encoder(TINY_MODELS[name], Tokenizer.from_str(vocabulary)), seed)


def _fill(made: multiprocessing.Queue, make: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> None:
    for batch in make(*arguments):
        made.put(batch)


def _taken(made: multiprocessing.Queue, process: multiprocessing.process.BaseProcess) -> Iterator[Any]:
    while True:
        try:
            yield made.get(timeout=1.0)
        except queue.Empty:
            if not process.is_alive():
                raise RuntimeError(f"the process that makes batches ended, exit code {process.exitcode}") from None


@contextmanager
def made_ahead(make: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Iterator[Any]]:
    """What `make(*arguments)` yields, without end, made by another process while this one trains. `make` is a function
    of a module. The iterator raises RuntimeError when that process has ended."""
    context = multiprocessing.get_context("spawn")
    made = context.Queue(BATCHES_AHEAD)
    process = context.Process(target=_fill, args=(made, make, arguments), daemon=True)
    process.start()
    try:
        yield _taken(made, process)
    finally:
        process.terminate()
        process.join()


# The loss


def forward(network: Network, batch: Batch) -> tuple[Array, Array | None]:
    """Logits `[rows, length, vocab]` of a batch, and the features of its vision tower (see `tower_features`)."""
    if batch.pictures is None:
        hidden, _ = network(batch.ids, batch.positions, None, None)
        return network.logits(hidden), None
    features = tower_features(network.visual, batch.pictures)
    visual = _visual_tokens(batch.visual_index, features)
    hidden, _ = network(batch.ids, batch.positions, None, visual)
    return network.logits(hidden), features


def tower_features(tower: VisionTower, pictures: Pictures) -> Array:
    """`[features, pictures, tokens, hidden]`: the embeddings, then the DeepStack features."""
    embeddings, deepstack = tower(pictures.patches, *pictures.layout)
    return jnp.concatenate([embeddings[None], deepstack])


def _visual_tokens(index: Array, features: Array) -> VisualTokens:
    rows = jnp.maximum(index, 0)
    flat = features.reshape(len(features), -1, features.shape[-1])[:, rows]
    return VisualTokens(index >= 0, flat[0], flat[1:])


def balance_loss(block: MoeBlock, tokens: Array, norm: RMSNorm) -> Array:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021): 1 where experts are used evenly."""
    probabilities = jax.nn.softmax(block.gate(tokens, norm))
    _, experts = jax.lax.top_k(probabilities, block.config.top_k)
    used = jnp.mean(jax.nn.one_hot(experts, block.config.experts), axis=(0, 1))
    return block.config.experts * jnp.sum(used * jnp.mean(probabilities, axis=0))


class Words:
    """The token ids of the words for kinds, colours and places of shapes, as `tiny_pictures.cells` numbers them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoded = [[tokenizer.encode(word).ids for word in words] for words in cell_words()]
        self.kinds, self.colours, self.places = encoded

    def directions(self, table: Array) -> list[Array]:
        """Per attribute `[values, hidden]`: the mean embedding of each value's words, all of length `READ_OUT`. The
        first value of each is "nothing", a random direction."""
        nothing = jax.random.normal(jax.random.key(0), (3, 1, table.shape[-1]))
        attributes = (self.kinds, self.colours, self.places)
        named = [jnp.stack([_unit(table[jnp.array(ids)]).mean(0) for ids in words]) for words in attributes]
        found = [jnp.concatenate(pair) for pair in zip(nothing, named, strict=True)]
        return [READ_OUT * _unit(jax.lax.stop_gradient(values)) for values in found]


def _unit(vectors: Array) -> Array:
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def cell_loss(features: Array, cells: Array, directions: list[Array]) -> Array:
    """How badly the visual tokens tell what they show: cross-entropy of reading kind, colour and place out of each
    along the words' own embeddings.

    It teaches the tower to see long before the answers' own loss would, and to say what it sees in the words that
    the decoder already knows how to find and to copy. `features` is `[features, pictures, tokens, hidden]`, `cells`
    `[pictures, tokens, 3]`.
    """
    total = jnp.zeros(())
    weights = jnp.where(cells[..., 0] > 0, RARE, 1.0) * (cells[..., 0] >= 0)
    for attribute, values in enumerate(directions):
        labels = jnp.broadcast_to(jnp.maximum(cells[..., attribute], 0), features.shape[:-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(features @ values.T, labels)
        total = total + jnp.sum(jnp.mean(losses, axis=0) * weights) / jnp.sum(weights)
    return total


class _RoutedTokens:
    """Notes the tokens that reach each router while a loss is traced, for the balance loss."""

    def __init__(self, network: Network) -> None:
        self.losses: list[Array] = []
        for layer in network.layers:
            if isinstance(layer.mlp, MoeBlock):
                layer.mlp.route = partial(self._route, layer.mlp, layer.mlp.route)

    def _route(self, block: MoeBlock, route: Any, tokens: Array, norm: RMSNorm) -> tuple[Array, Array]:
        self.losses.append(balance_loss(block, tokens, norm))
        return route(tokens, norm)


def loss_of(parameters: nnx.State, graph: nnx.GraphDef, batch: Batch, words: Words) -> tuple[Array, Array]:
    """Weighted cross-entropy plus the balance and cell losses, and the cross-entropy alone."""
    network = nnx.merge(graph, parameters)
    routed = _RoutedTokens(network)
    logits, features = forward(network, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch.ids[:, 1:])
    weights = batch.weights[:, :-1]
    entropy = jnp.sum(losses * weights) / jnp.sum(weights)
    total = entropy
    if routed.losses:
        total = total + BALANCE * sum(routed.losses) / len(routed.losses)
    if features is not None:
        total = total + SEEING * cell_loss(features, batch.pictures.cells, words.directions(_table(network)))
    return total, entropy


def tower_loss(parameters: nnx.State, graph: nnx.GraphDef, pictures: Pictures, directions: list[Array]) -> Array:
    """The cell loss of a vision tower alone."""
    return cell_loss(tower_features(nnx.merge(graph, parameters), pictures), pictures.cells, directions)


def _table(network: Network) -> Array:
    """The token embeddings `[vocab, hidden]`."""
    return network.embed_tokens.weight.get_value()


# Training


def make_optimiser() -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for most matrices, AdamW for the rest; both at rate 1, to be scaled.

    Updates are brought to the size that AdamW's have (Liu et al. 2025), so that one learning rate nearly serves both.
    """
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.contrib.muon(
            1.0,
            adam_learning_rate=ADAM_SHARE,
            adam_b2=0.98,
            weight_decay=WEIGHT_DECAY,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, _matrix_axes),
        ),
    )


def _share(path: tuple[Any, ...]) -> float:
    """The share of the learning rate that a parameter gets."""
    return PATCH_SHARE if "patch_embed" in jax.tree_util.keystr(path) else 1.0


def _matrix_axes(path: tuple[Any, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
    """A weight is `[out, in]`. None leaves it to AdamW: embeddings, and for the cost experts and mergers."""
    if leaf.ndim != 2 or any(part in jax.tree_util.keystr(path) for part in ("embed", "experts", "merger")):
        return None
    return optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)


def stepped(
    optimiser: optax.GradientTransformation,
    gradient: nnx.State,
    state: optax.OptState,
    parameters: nnx.State,
    rate: Array,
) -> tuple[nnx.State, optax.OptState]:
    """Parameters and optimiser state after one update."""
    updates, state = optimiser.update(gradient, state, parameters)
    updates = jax.tree_util.tree_map_with_path(lambda path, update: rate * _share(path) * update, updates)
    return optax.apply_updates(parameters, updates), state


@dataclass
class Progress:
    """A run's state: what a snapshot holds. `seconds` is the training time so far."""

    parameters: nnx.State
    optimiser: optax.OptState
    step: int
    seconds: float


class Trainer:
    """One model's network, optimiser and compiled steps."""

    def __init__(self, model: TinyModel, tokenizer: Tokenizer, seed: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.words = Words(tokenizer)
        self.encoder = make_encoder(model, tokenizer)
        self.config: ModelConfig = self.encoder.config
        network = random_network(self.config, "float32", Switches(), seed)
        if network.visual is not None:
            positions = network.visual.pos_embed.weight
            positions.set_value(TABLE_SCALE * positions.get_value())
        self.graph, parameters = nnx.split(network)
        self.optimiser = make_optimiser()
        self.progress = Progress(parameters, self.optimiser.init(parameters), 0, 0.0)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))
        self._right = jax.jit(self._answers_right)

    def _updated(
        self, parameters: nnx.State, state: optax.OptState, batch: Batch, rate: Array
    ) -> tuple[nnx.State, optax.OptState, Array]:
        gradient, entropy = jax.grad(loss_of, has_aux=True)(parameters, self.graph, batch, self.words)
        return *stepped(self.optimiser, gradient, state, parameters, rate), entropy

    def _answers_right(self, parameters: nnx.State, batch: Batch) -> Array:
        """Per row, whether the most likely token is right wherever the loss counts: then greedy decoding gives exactly
        the wanted answer."""
        logits, _ = forward(nnx.merge(self.graph, parameters), batch)
        right = jnp.argmax(logits[:, :-1], axis=-1) == batch.ids[:, 1:]
        return jnp.all(right | (batch.weights[:, :-1] == 0), axis=1)

    def train_step(self, batch: Batch, rate: float) -> float:
        """One update; the cross-entropy before it."""
        progress = self.progress
        progress.parameters, progress.optimiser, entropy = self._update(
            progress.parameters, progress.optimiser, batch, np.float32(rate)
        )
        progress.step += 1
        return float(entropy)

    def teach_tower(self, batches: Iterator[Pictures], seconds: float) -> Iterator[tuple[float, float]]:
        """Trains the vision tower alone for `seconds`, with an optimiser of its own, on the cell loss. Yields the
        seconds so far and the loss after each step."""
        network = self.network()
        directions = self.words.directions(_table(network))
        graph, tower = nnx.split(network.visual)
        state = self.optimiser.init(tower)

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(
            tower: nnx.State, state: optax.OptState, pictures: Pictures, rate: Array
        ) -> tuple[nnx.State, optax.OptState, Array]:
            loss, gradient = jax.value_and_grad(tower_loss)(tower, graph, pictures, directions)
            return *stepped(self.optimiser, gradient, state, tower, rate), loss

        step, begun = 0, time.monotonic()
        while (taken := time.monotonic() - begun) < seconds:
            rate = learning_rate(step, taken / seconds)
            tower, state, loss = update(tower, state, next(batches), np.float32(rate))
            step += 1
            yield time.monotonic() - begun, float(loss)
        nnx.update(network.visual, tower)
        self.progress.parameters = nnx.split(network)[1]

    def accuracy(self, count: int) -> dict[str, float]:
        """The share of `count` held-out conversations of each task that are answered exactly."""
        shares = {}
        for name, task in self.model.tasks().items():
            right = [
                np.asarray(self._right(self.progress.parameters, batch))[:rows]
                for batch, rows in evaluation_batches(self.encoder, task, count, f"evaluation {name}")
            ]
            shares[name] = float(np.mean(np.concatenate(right)))
        return shares

    def save(self, file: Path) -> None:
        """Writes a snapshot, whole or not at all."""
        state = jax.tree.map(np.asarray, (self.progress.parameters, self.progress.optimiser))
        leaves = jax.tree.leaves(state)
        partial_file = file.with_suffix(".part")
        partial_file.write_bytes(pickle.dumps((leaves, self.progress.step, self.progress.seconds)))
        partial_file.replace(file)

    def resume(self, file: Path) -> None:
        """Goes on from a snapshot."""
        leaves, step, seconds = pickle.loads(file.read_bytes())
        structure = jax.tree.structure((self.progress.parameters, self.progress.optimiser))
        parameters, optimiser = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
        self.progress = Progress(parameters, optimiser, step, seconds)

    def network(self) -> Network:
        """The network as trained so far."""
        return nnx.merge(self.graph, self.progress.parameters)


def learning_rate(step: int, done: float) -> float:
    """Linear warm-up, a plateau, and a linear fall to zero from `DECAY_FROM` of the time on (`done` in 0..1)."""
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, max(0.0, (1 - done) / (1 - DECAY_FROM)))


class Log:
    """The run's raw data: a line of JSON per entry."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, **row: Any) -> None:
        """Adds an entry."""
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def run(trainer: Trainer, budget: Budget, seed: int, log: Log, snapshot: Path) -> None:
    """Trains as long as the budget says, in all: first a vision tower to see, then the model's phases. A run from the
    beginning takes at least one step of each, however long that is."""
    progress, begins = trainer.progress, trainer.progress.seconds == 0
    name, vocabulary = trainer.model.name, trainer.tokenizer.to_str()
    if trainer.model.pictures and begins:
        with made_ahead(tower_batches, name, vocabulary, str(seed)) as batches:
            see(trainer, batches, budget, log)
        trainer.save(snapshot)
    for share, weights in trainer.model.phases():
        until = share * budget.seconds
        if begins or progress.seconds < until:
            source = f"{seed} from step {progress.step}"
            with made_ahead(text_batches, name, vocabulary, weights, source) as batches:
                train(trainer, batches, until, budget, log, snapshot)
            trainer.save(snapshot)


def see(trainer: Trainer, batches: Iterator[Pictures], budget: Budget, log: Log) -> None:
    """Trains the vision tower alone for its share of the budget."""
    seconds = SEEING_UNTIL * budget.seconds
    recent: list[float] = []
    with tqdm(total=round(seconds), unit="s", desc="vision tower") as bar:
        for taken, loss in trainer.teach_tower(batches, seconds):
            trainer.progress.seconds = taken
            bar.update(round(taken) - bar.n)
            recent.append(loss)
            if len(recent) == budget.logged_steps:
                bar.set_postfix(loss=f"{np.mean(recent):.4f}")
                log.write(seconds=taken, seeing=float(np.mean(recent)))
                recent = []


def train(trainer: Trainer, batches: Iterator[Batch], until: float, budget: Budget, log: Log, snapshot: Path) -> None:
    """Trains until the second `until` of the budget and at least one step, with evaluations on the way."""
    progress = trainer.progress
    recent: list[float] = []
    next_evaluation = progress.seconds + budget.evaluate_every
    with tqdm(total=round(until), initial=round(progress.seconds), unit="s") as bar:
        while True:
            start = time.monotonic()
            rate = learning_rate(progress.step, progress.seconds / budget.seconds)
            recent.append(trainer.train_step(next(batches), rate))
            progress.seconds += time.monotonic() - start
            bar.update(round(progress.seconds) - bar.n)
            if progress.step % budget.logged_steps == 0:
                loss = float(np.mean(recent))
                bar.set_postfix(step=progress.step, loss=f"{loss:.4f}")
                log.write(step=progress.step, seconds=progress.seconds, rate=rate, loss=loss)
                recent = []
            if progress.seconds > next_evaluation:
                next_evaluation = progress.seconds + budget.evaluate_every
                trainer.save(snapshot)
                log.write(step=progress.step, seconds=progress.seconds, accuracy=trainer.accuracy(budget.checked))
            if progress.seconds >= until:
                return


def kept_vocabulary(file: Path) -> Tokenizer:
    """The vocabulary of a run, trained when it begins: a run that goes on must keep its token ids."""
    if not file.is_file():
        train_vocabulary().save(str(file))
    return Tokenizer.from_file(str(file))


def make_model(model: TinyModel, budget: Budget, seed: int, work: Path, out: Path) -> None:
    """Trains, exports and evaluates one model. `work` holds its vocabulary, snapshot and log; in `out` it goes to
    models/pretrained/<name> and its report to results/train_<name>. Goes on where a snapshot in `work` is."""
    work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(model, kept_vocabulary(work / "tokenizer.json"), seed)
    log, snapshot = Log(work / "raw.jsonl"), work / "snapshot.pickle"
    if snapshot.is_file():
        trainer.resume(snapshot)
    run(trainer, budget, seed, log, snapshot)
    folder, results = out / "models" / "pretrained" / model.name, out / "results" / f"train_{model.name}"
    export(model, trainer.tokenizer, trainer.network(), folder)
    write_report(model, folder, log.file, results, budget.reported)
    print(f"wrote {folder} and {results}")


def main() -> None:
    """Trains, exports and evaluates one model, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train_tiny", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=TINY_MODELS)
    parser.add_argument("--minutes", type=float, help=f"training time (default {FULL.minutes})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help=f"where snapshots are kept (default {cache_folder() / 'training'})")
    parser.add_argument(
        "--out",
        type=Path,
        help="where models/pretrained/<model>/ and results/train_<model>/ are written (default: this repository)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check in about two minutes that every phase of training, the evaluation, the export and the report "
        "work; writes to a new temporary folder, and its model has learned nothing",
    )
    options = parser.parse_args()
    enable_persistent_cache()
    keep_freed_memory()
    model = TINY_MODELS[options.model]
    if not options.quick:
        budget = FULL if options.minutes is None else replace(FULL, minutes=options.minutes)
        work = options.work or cache_folder() / "training"
        make_model(model, budget, options.seed, work / model.name, options.out or ROOT)
        return
    for name in ("minutes", "work", "out"):
        if getattr(options, name) is not None:
            parser.error(f"--quick sets --{name} itself")
    folder = Path(tempfile.mkdtemp(prefix="train_tiny_"))
    make_model(model, QUICK, options.seed, folder / "work", folder)


if __name__ == "__main__":
    main()
