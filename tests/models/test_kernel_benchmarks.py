"""Times of the kernels at the sizes of the 2B shape, for `make bench`; else each runs once, as a test."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from models.cache import LayerCache
from models.kernels import ops
from tests.models.kernels.stored import random_cache, random_rows, random_weight

HIDDEN, INTERMEDIATE = 2048, 6144
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("format", ["q4", "q8"])
def test_product(benchmark: BenchmarkFixture, format: str, rows: int):
    random = np.random.default_rng(0)
    # JAX's arrays, because those of numpy are copied in every call unless they happen to be aligned.
    weight = jax.device_put(random_weight(random, format, INTERMEDIATE, HIDDEN))
    x = jax.device_put(random_rows(random, rows, HIDDEN))
    step = jax.jit(lambda x, *weight: ops.matmul(x, ops.no_norm(), [weight], [INTERMEDIATE])[0])
    alone = step(x[:1], *weight)
    step(x, *weight)  # compiles
    found = benchmark(lambda: step(x, *weight).block_until_ready())
    np.testing.assert_array_equal(found[:1], alone)


@pytest.mark.parametrize("held", [256, 2048])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_attention(benchmark: BenchmarkFixture, kind: str, held: int):
    random = np.random.default_rng(0)
    layer = random_cache(random, kind, (1, KV_HEADS, held + 16, HEAD_DIM))
    queries = random.standard_normal((1, 1, HEADS, HEAD_DIM), np.float32)
    keys, values = random.standard_normal((2, 1, 1, KV_HEADS, HEAD_DIM), np.float32)
    ones = (np.ones(HEAD_DIM, np.float32), 1e-6)
    angles = (np.ones((1, 1, HEAD_DIM // 2), np.float32), np.zeros((1, 1, HEAD_DIM // 2), np.float32))
    slots, first = np.zeros(1, np.int32), np.array([held], np.int32)
    held_layer = jax.device_put(layer)

    @partial(jax.jit, donate_argnums=0)
    def step(layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        return ops.cached_attention(queries, keys, values, (ones, ones), angles, slots, first, layer)

    def attend() -> jax.Array:
        nonlocal held_layer
        found, held_layer = step(held_layer)
        return found.block_until_ready()

    attend()  # compiles
    found = benchmark(attend)
    assert found.shape == (1, 1, HEADS * HEAD_DIM)
    assert jnp.isfinite(found).all()
