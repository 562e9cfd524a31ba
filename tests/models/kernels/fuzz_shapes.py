"""Calls the kernels of the library named on the command line with random shapes, in every variant: run by
test_sanitizer.py under AddressSanitizer.

Arguments are numpy arrays of exactly the right size in memory of their own, so that a step outside one is noticed.
"""

import sys
from unittest import mock

import jax
import numpy as np

from models.cache import CACHE_TYPES
from models.kernels import ops
from models.kernels.loader import active_variant, choose_variant, runnable_variants
from models.sampling import SamplingParams, everything, start_sampling
from tests.models.kernels.stored import FORMATS, random_cache, random_rows, random_weight


def main(library: str) -> None:
    """Makes some hundred calls with each variant."""
    with mock.patch("models.kernels.loader.build", return_value=library):
        active_variant()
    calls = 0
    for variant in runnable_variants():
        choose_variant(variant)
        random = np.random.default_rng(0)
        for _ in range(25):
            for call in (call_matmul, call_gated_mlp, call_experts, call_choose_experts, call_attention, call_sample):
                call(random)
                calls += 1
    print(calls, "calls")


def call_matmul(random: np.random.Generator) -> None:
    """A product with one or two weights."""
    inputs, rows = int(random.integers(1, 200)), int(random.integers(1, 10))
    sizes = random.integers(1, 70, int(random.integers(1, 3))).tolist()
    format = str(random.choice(FORMATS))
    weights = [random_weight(random, format, size, inputs) for size in sizes]
    for result in ops.matmul(random_rows(random, rows, inputs), random_norm(random, inputs), weights, sizes):
        np.asarray(result)


def random_norm(random: np.random.Generator, size: int) -> ops.Norm:
    """A norm, or none."""
    return (np.ones(size, np.float32), 1e-6) if random.integers(2) else ops.no_norm()


def call_gated_mlp(random: np.random.Generator) -> None:
    """A gated MLP whose matrices may have different formats."""
    hidden, intermediate, rows = (int(random.integers(1, high)) for high in (200, 200, 10))
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [random_weight(random, str(random.choice(FORMATS)), *shape) for shape in shapes]
    norm = random_norm(random, hidden)
    np.asarray(ops.gated_mlp(random_rows(random, rows, hidden), norm, *weights, intermediate))


def call_experts(random: np.random.Generator) -> None:
    """A mixture of experts."""
    hidden, intermediate, experts, tokens = (int(random.integers(1, high)) for high in (90, 50, 6, 8))
    top_k = int(random.integers(1, experts + 1))
    format = str(random.choice(FORMATS))
    gate_up = random_weight(random, format, 2 * intermediate, hidden, (experts,))
    down = random_weight(random, format, hidden, intermediate, (experts,))
    ids = np.array([random.permutation(experts)[:top_k] for _ in range(tokens)], np.int32)
    shares = random.uniform(size=(tokens, top_k)).astype(np.float32)
    x = random_rows(random, tokens, hidden)
    np.asarray(ops.experts(x, random_norm(random, hidden), ids, shares, gate_up, down, intermediate))


def call_choose_experts(random: np.random.Generator) -> None:
    """The choice of experts by a router's logits."""
    tokens, experts = (int(random.integers(1, high)) for high in (40, 140))
    logits, top_k = random_rows(random, tokens, experts), int(random.integers(1, experts + 1))
    for result in ops.choose_experts(logits, top_k, bool(random.integers(2))):
        np.asarray(result)


def call_attention(random: np.random.Generator) -> None:
    """Attention over caches of every type."""
    batch, length, kv_heads, group, half_dim, held = (int(random.integers(1, high)) for high in (4, 4, 3, 4, 40, 600))
    head_dim = 2 * half_dim
    layer = random_cache(random, str(random.choice(CACHE_TYPES)), (batch + 1, kv_heads, held + length, head_dim))
    slots = (random.permutation(batch + 2)[:batch] - 1).astype(np.int32)  # one of them may be -1, an empty row
    first = random.integers(0, held + 1, batch).astype(np.int32)
    if random.integers(2):  # a row that ends where the whole cache does
        slots[slots == batch], slots[0], first[0] = -1, batch, held
    heads = (kv_heads * group, kv_heads, kv_heads)
    fresh = [random_rows(random, batch, length, count, head_dim) for count in heads]
    norms = (random_norm(random, head_dim), random_norm(random, head_dim))
    rotation = tuple(random_rows(random, batch, length, half_dim) for _ in range(2))
    for array in jax.tree.leaves(ops.cached_attention(*fresh, norms, rotation, slots, first, layer)):
        np.asarray(array)


def call_sample(random: np.random.Generator) -> None:
    """A choice by sequences of every kind, some of them constrained, and a row that belongs to none."""
    vocab, slots, batch = (int(random.integers(1, high)) for high in (3000, 5, 6))
    rows = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.7])),
            top_k=int(random.choice([0, 1, 40, 5000])),
            top_p=float(random.choice([0.3, 1.0])),
            min_p=float(random.choice([0.0, 0.01])),
            repetition_penalty=float(random.choice([1.0, 1.3])),
            top_logprobs=int(random.integers(21)),
        )
        for _ in range(slots)
    ]
    state = start_sampling([(params, random.integers(0, vocab, 9)) for params in rows], vocab)
    allowed = everything(batch, vocab)
    allowed[0] = random.integers(0, 2**32, allowed.shape[1], np.uint32)
    own = random.integers(-1, slots, batch).astype(np.int32)
    for array in jax.tree.leaves(ops.sample(random_rows(random, batch, vocab), state, own, allowed)):
        np.asarray(array)


if __name__ == "__main__":
    main(sys.argv[1])
