"""Decoding several sequences together gives each of them, bit for bit, the logits it has alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.cache import KVCache, LayerCache, layer_shapes
from models.config import ModelConfig, TextConfig, parse_config
from models.model import PRETRAINED, read_config
from models.network import Network
from models.presets import preset
from models.switches import Switches
from models.weights import random_network

CAPACITY = 256
STEPS = 4
LENGTHS = (1, 3, 9, 17, 40, 64, 100, 130)


def empty(text: TextConfig, kv: str) -> KVCache:
    """A cache of one slot."""
    layer = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), layer_shapes(text, 1, CAPACITY, kv))
    return KVCache((layer,) * text.layers, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))


def stacked(caches: list[KVCache], order: np.ndarray) -> KVCache:
    """One cache with a row per sequence, whose slots are in another order."""
    layers = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(cache.layers for cache in caches))
    length = jnp.concatenate([caches[row].length for row in order])
    return KVCache(layers, jnp.asarray(order, jnp.int32), length)


def more(cache: KVCache, layers: tuple[LayerCache, ...], tokens: int) -> KVCache:
    return KVCache(layers, cache.slots, cache.length + tokens)


def jitted(network: Network, function: Callable) -> Callable:
    """`function` of the network and further arguments, compiled. Weights are arguments, as they are when a model runs:
    XLA would take long over constants of their size."""
    graph, weights = nnx.split(network)
    compiled = jax.jit(lambda weights, *arguments: function(nnx.merge(graph, weights), *arguments))
    return lambda *arguments: compiled(weights, *arguments)


def decode(network: Network, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache]:
    """Logits `[batch, vocab]` after one more token per row."""
    positions = jnp.broadcast_to(cache.length[None, :, None], (3, len(tokens), 1))
    hidden, after = network(tokens[:, None], positions, cache, None)
    return network.logits(hidden[:, 0]), more(cache, after.layers, 1)


def prefill(network: Network, cache: KVCache, prompts: list[np.ndarray]) -> list[KVCache]:
    """For every prompt the cache with it. What follows a shorter prompt there will be written before it is seen."""
    longest = max(map(len, prompts))
    positions = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), (3, 1, longest))
    take = jitted(network, lambda network, tokens, cache: network(tokens[None], positions, cache, None)[1].layers)
    padded = (np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts)
    return [more(cache, take(tokens, cache), len(prompt)) for tokens, prompt in zip(padded, prompts, strict=True)]


@pytest.mark.parametrize("name", ["tiny-vl", "tiny-moe"])
@pytest.mark.parametrize("quant", [None, "q8", "q4"])
def test_rows_decoded_together_equal_rows_decoded_alone(name, quant):
    model = models.load(name, quant=quant)
    network = model.inference.network
    text = read_config(PRETRAINED / name).text
    random = np.random.default_rng(0)
    kv = "float32" if quant is None else "int8"
    prompts = [random.integers(0, text.vocab, length, np.int32) for length in LENGTHS]
    step = jitted(network, decode)
    alone = prefill(network, empty(text, kv), prompts)
    order = random.permutation(len(prompts))
    together = stacked(alone, order)
    for _ in range(STEPS):
        tokens = random.integers(0, text.vocab, len(prompts), np.int32)
        again, _ = step(together, tokens[order])
        logits, together = step(together, tokens[order])
        np.testing.assert_array_equal(again, logits)
        for place, row in enumerate(order):
            own, alone[row] = step(alone[row], tokens[row : row + 1])
            np.testing.assert_array_equal(own[0], logits[place], err_msg=f"row of length {LENGTHS[row]}")
            for kept, shared in zip(jax.tree.leaves(alone[row].layers), jax.tree.leaves(together.layers), strict=True):
                np.testing.assert_array_equal(kept[0], shared[row])


def narrow(config: ModelConfig) -> ModelConfig:
    """A published model whose matrices have few outputs: what is added up over has its real length."""
    text = config.text
    moe = text.moe and replace(text.moe, intermediate=4)
    text = replace(text, layers=2, vocab=500, heads=2, kv_heads=1, intermediate=64, moe=moe)
    return replace(config, text=text, vision=None)


@pytest.mark.parametrize("name", ["qwen3-vl-2b", "qwen3-30b-a3b"])
def test_rows_as_wide_as_in_the_published_models_do_not_depend_on_their_number(name):
    """XLA adds up in another order, and rounds otherwise, from some width on and for some numbers of rows."""
    config = narrow(parse_config(preset(name)))
    network = random_network(config, "float32", Switches())
    random = np.random.default_rng(1)
    tokens, held = random.integers(0, 500, 32, np.int32), random.integers(0, 200, 32).astype(np.int32)
    shapes = layer_shapes(config.text, 32, CAPACITY, "float32")
    layer = jax.tree.map(lambda array: jnp.asarray(random.standard_normal(array.shape), array.dtype), shapes)
    step = jitted(network, lambda network, cache, tokens: decode(network, cache, tokens)[0])

    def logits(rows: slice) -> np.ndarray:
        slots = jnp.arange(32, dtype=jnp.int32)[rows]
        return np.asarray(step(KVCache((layer,) * config.text.layers, slots, jnp.asarray(held[rows])), tokens[rows]))

    alone = np.concatenate([logits(slice(row, row + 1)) for row in range(32)])
    for rows in (2, 3, 5, 8, 16, 31, 32):
        np.testing.assert_array_equal(logits(slice(rows)), alone[:rows], err_msg=f"{rows} rows")


DIGESTS = """
import hashlib, json, os, sys
os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[: int(sys.argv[1])]))
import models
digests = {}
for quant in (None, "q4"):
    steps = models.load("tiny-vl", quant=quant, kv="int8").generate(
        list(range(300, 400)), max_tokens=30, ignore_eos=True, sampling=models.SamplingParams(top_logprobs=20)
    )
    told = [(step.token_id, step.logprob.hex(), step.margin.hex()) for step in steps]
    digests[str(quant)] = hashlib.sha256(repr(told).encode()).hexdigest()
print(json.dumps(digests))
"""


@pytest.fixture(scope="module")
def digests() -> list[dict[str, str]]:
    """Of what a model says on one core and on two: a digest for each kind of weights."""
    commands = [[sys.executable, "-c", DIGESTS, threads] for threads in ("1", "2")]
    return [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for command in commands]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("quant", ["None", "q4"])
def test_the_number_of_threads_changes_nothing(quant, digests):
    assert digests[0][quant] == digests[1][quant]
