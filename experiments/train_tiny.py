"""Trains the small default models from scratch, on conversations that it makes up.

Claim: a Qwen3-VL and a Qwen3-MoE of about 4 million parameters learn every task of `tiny_tasks` and `tiny_pictures` to
at least 97 % on held-out conversations. Cost: under 90 minutes on 2 cores each.

    python -m experiments.train_tiny tiny-vl --minutes 80
    python -m experiments.train_tiny tiny-moe --minutes 60

Writes models/pretrained/<name>/ (an ordinary Hugging Face folder) and results/train_<name>/. A run that was stopped
goes on where its last snapshot was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

from experiments.tiny_data import Batch, Encoder, evaluation_batches, training_batches
from experiments.tiny_drills import drills
from experiments.tiny_export import export
from experiments.tiny_models import PREPROCESSOR, TINY_MODELS, WEIGHTS, TinyModel, full_config
from experiments.tiny_pictures import COLOURS, SHAPES
from experiments.tiny_report import write_report
from experiments.tiny_vocabulary import train_vocabulary
from models.compilation import cache_folder, enable_persistent_cache
from models.config import ModelConfig, parse_config
from models.images import ImageProcessor
from models.model import PRETRAINED
from models.moe import MoeBlock
from models.network import Network, VisualTokens
from models.switches import Switches
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
KINDS_OF_CELL = 1 + len(SHAPES) * len(COLOURS)
READ_OUT = 0.3  # size of the directions along which cells are read out
BATCHES_AHEAD = 32
EVALUATED = 300  # held-out conversations per task
ROOT = Path(__file__).parent.parent


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


def _make_batches(name: str, vocabulary: str, seed: str, queue: multiprocessing.Queue) -> None:
    model = TINY_MODELS[name]
    encoder = make_encoder(model, Tokenizer.from_str(vocabulary))
    taught = model.tasks() | drills(model.pictures)
    tasks = {task: (make, WEIGHTS[task]) for task, make in taught.items()}
    for batch in training_batches(encoder, tasks, seed):
        queue.put(batch)


def batches_from_process(model: TinyModel, tokenizer: Tokenizer, seed: str) -> Iterator[Batch]:
    """Training batches, made ahead while the network trains."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(BATCHES_AHEAD)
    arguments = (model.name, tokenizer.to_str(), seed, queue)
    process = context.Process(target=_make_batches, args=arguments, daemon=True)
    process.start()
    try:
        while True:
            yield queue.get()
    finally:
        process.terminate()
        process.join()


# The loss


def forward(network: Network, batch: Mapping[str, Any]) -> tuple[Array, Array | None]:
    """Logits `[rows, length, vocab]` of a batch, and the embeddings `[pictures, tokens, hidden]` of its pictures."""
    if batch["patches"] is None:
        hidden, _ = network(batch["ids"], batch["positions"], None, None)
        return network.logits(hidden), None
    embeddings, deepstack = network.visual(batch["patches"], *batch["layout"])
    visual = _visual_tokens(batch, embeddings, deepstack)
    hidden, _ = network(batch["ids"], batch["positions"], None, visual)
    return network.logits(hidden), embeddings


def _visual_tokens(batch: Mapping[str, Any], embeddings: Array, deepstack: Array) -> VisualTokens:
    index = batch["visual_index"]
    rows = jnp.maximum(index, 0)
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    features = deepstack.reshape(deepstack.shape[0], -1, deepstack.shape[-1])
    return VisualTokens(index >= 0, flat[rows], features[:, rows])


def balance_loss(block: MoeBlock, tokens: Array) -> Array:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021): 1 where experts are used evenly."""
    probabilities = block.probabilities(tokens)
    _, experts = jax.lax.top_k(probabilities, block.config.top_k)
    used = jnp.mean(jax.nn.one_hot(experts, block.config.experts), axis=(0, 1))
    return block.config.experts * jnp.sum(used * jnp.mean(probabilities, axis=0))


def cell_loss(embeddings: Array, batch: Mapping[str, Any]) -> Array:
    """How badly the embeddings tell what lies under each visual token and where it is: cross-entropy of two read-outs
    along fixed random directions, which only the vision tower can adapt to. It teaches the tower to see long before the
    answers' own loss would."""
    directions = jax.random.normal(jax.random.key(0), (embeddings.shape[-1], KINDS_OF_CELL + 9)) * READ_OUT
    read = embeddings @ directions
    total = jnp.zeros(())
    for logits, labels, rare in (
        (read[..., :KINDS_OF_CELL], batch["cells"], 4.0),
        (read[..., KINDS_OF_CELL:], batch["places"], 1.0),
    ):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        weights = jnp.where(labels < 0, 0.0, jnp.where(labels > 0, rare, 1.0))
        total = total + jnp.sum(losses * weights) / jnp.sum(weights)
    return total


class _RoutedTokens:
    """Notes the tokens that reach each router while a loss is traced, for the balance loss."""

    def __init__(self, network: Network) -> None:
        self.losses: list[Array] = []
        for layer in network.layers:
            if isinstance(layer.mlp, MoeBlock):
                layer.mlp.route = partial(self._route, layer.mlp, layer.mlp.route)

    def _route(self, block: MoeBlock, route: Any, tokens: Array) -> tuple[Array, Array]:
        self.losses.append(balance_loss(block, tokens))
        return route(tokens)


def loss_of(parameters: nnx.State, graph: nnx.GraphDef, batch: Mapping[str, Any]) -> tuple[Array, Array]:
    """Weighted cross-entropy plus the balance and cell losses, and the cross-entropy alone."""
    network = nnx.merge(graph, parameters)
    routed = _RoutedTokens(network)
    logits, embeddings = forward(network, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    weights = batch["weights"][:, :-1]
    entropy = jnp.sum(losses * weights) / jnp.sum(weights)
    balance = sum(routed.losses) / len(routed.losses) if routed.losses else 0.0
    seeing = 0.0 if embeddings is None else cell_loss(embeddings, batch)
    return entropy + BALANCE * balance + SEEING * seeing, entropy


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
        self, parameters: nnx.State, state: optax.OptState, batch: Mapping[str, Any], rate: Array
    ) -> tuple[nnx.State, optax.OptState, Array]:
        gradient, entropy = jax.grad(loss_of, has_aux=True)(parameters, self.graph, batch)
        updates, state = self.optimiser.update(gradient, state, parameters)
        updates = jax.tree_util.tree_map_with_path(lambda path, update: rate * _share(path) * update, updates)
        return optax.apply_updates(parameters, updates), state, entropy

    def _answers_right(self, parameters: nnx.State, batch: Mapping[str, Any]) -> Array:
        """Per row, whether the most likely token is right wherever the loss counts: then greedy decoding gives exactly
        the wanted answer."""
        logits, _ = forward(nnx.merge(self.graph, parameters), batch)
        right = jnp.argmax(logits[:, :-1], axis=-1) == batch["ids"][:, 1:]
        return jnp.all(right | (batch["weights"][:, :-1] == 0), axis=1)

    def train_step(self, batch: Batch, rate: float) -> float:
        """One update; the cross-entropy before it."""
        progress = self.progress
        progress.parameters, progress.optimiser, entropy = self._update(
            progress.parameters, progress.optimiser, vars(batch), np.float32(rate)
        )
        progress.step += 1
        return float(entropy)

    def accuracy(self, count: int) -> dict[str, float]:
        """The share of `count` held-out conversations of each task that are answered exactly."""
        shares = {}
        for name, task in self.model.tasks().items():
            right = [
                np.asarray(self._right(self.progress.parameters, vars(batch)))[:rows]
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


def run(trainer: Trainer, minutes: float, seed: int, log: Path, snapshot: Path, evaluate_every: float = 300) -> None:
    """Trains for `minutes` in all, writing a line per 50 steps and per evaluation to `log`."""
    progress = trainer.progress
    batches = batches_from_process(trainer.model, trainer.tokenizer, f"{seed} from step {progress.step}")
    recent: list[float] = []
    next_evaluation = progress.seconds + evaluate_every
    with log.open("a") as lines, tqdm(total=round(minutes * 60), initial=round(progress.seconds), unit="s") as bar:
        while progress.seconds < minutes * 60:
            start = time.monotonic()
            rate = learning_rate(progress.step, progress.seconds / (minutes * 60))
            recent.append(trainer.train_step(next(batches), rate))
            progress = trainer.progress
            progress.seconds += time.monotonic() - start
            bar.update(round(progress.seconds) - bar.n)
            if progress.step % 50 == 0:
                row = {"step": progress.step, "seconds": progress.seconds, "rate": rate, "loss": float(np.mean(recent))}
                bar.set_postfix(step=progress.step, loss=f"{row['loss']:.4f}")
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                recent = []
            if progress.seconds > next_evaluation:
                next_evaluation = progress.seconds + evaluate_every
                trainer.save(snapshot)
                row = {"step": progress.step, "seconds": progress.seconds, "accuracy": trainer.accuracy(64)}
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    batches.close()
    trainer.save(snapshot)


def kept_vocabulary(file: Path) -> Tokenizer:
    """The vocabulary of a run, trained when it begins: a run that goes on must keep its token ids."""
    if not file.is_file():
        train_vocabulary().save(str(file))
    return Tokenizer.from_file(str(file))


def main() -> None:
    """Trains, exports and evaluates one model."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train_tiny", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=TINY_MODELS)
    parser.add_argument("--minutes", type=float, default=80, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=cache_folder() / "training", help="where snapshots are kept")
    options = parser.parse_args()
    enable_persistent_cache()
    work = options.work / options.model
    work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(TINY_MODELS[options.model], kept_vocabulary(work / "tokenizer.json"), options.seed)
    snapshot = work / "snapshot.pickle"
    if snapshot.is_file():
        trainer.resume(snapshot)
    run(trainer, options.minutes, options.seed, work / "raw.jsonl", snapshot)
    folder = PRETRAINED / options.model
    export(trainer.model, trainer.tokenizer, trainer.network(), folder)
    results = ROOT / "results" / f"train_{options.model}"
    write_report(trainer.model, folder, work / "raw.jsonl", results, EVALUATED)


if __name__ == "__main__":
    main()
