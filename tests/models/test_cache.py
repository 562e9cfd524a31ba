"""What the cache keeps of keys and values, in every type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import CACHE_TYPES, KVCache, empty_cache, grow_cache
from models.config import parse_config
from models.presets import preset

CONFIG = parse_config(preset("qwen3-vl-2b"), "preset").text
# Largest error of a stored number over the largest magnitude of its token and head: half a step of the type.
HALF_STEP = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127 * (1 + 1e-5)}


def new_tokens(length: int, seed: int) -> jax.Array:
    """Keys or values of very different sizes, one of them all zeros."""
    random = np.random.default_rng(seed)
    shape = (2, CONFIG.kv_heads, length, CONFIG.head_dim)
    values = random.standard_normal(shape) * np.exp(3 * random.standard_normal((*shape[:3], 1)))
    values[0, 1, 0] = 0
    return jnp.asarray(values, jnp.float32)


def stored(cache: KVCache, layer: int, keys: jax.Array, values: jax.Array) -> KVCache:
    """The cache with new tokens in one layer."""
    return cache.with_layer(layer, cache.layers[layer].store(keys, values, cache.length))


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_stored_tokens_come_back_within_half_a_step(dtype):
    cache = empty_cache(CONFIG, 2, 16, dtype).advance(jnp.asarray([3, 7], jnp.int32))
    keys, values = new_tokens(4, 1), new_tokens(4, 2)
    cache = stored(cache, 5, keys, values).advance(jnp.asarray([4, 4], jnp.int32))
    stored_keys, stored_values, scales = cache.layers[5]
    assert stored_keys.dtype == stored_values.dtype == jnp.dtype(dtype)
    assert len(scales) == (2 if dtype == "int8" else 0)
    np.testing.assert_array_equal(cache.length, [7, 11])
    for index, (kept, new) in enumerate(((stored_keys, keys), (stored_values, values))):
        found = np.asarray(kept, np.float32) * (np.asarray(scales[index])[..., None] if scales else 1)
        for row, start in enumerate((3, 7)):
            largest = np.abs(new[row]).max(axis=-1, keepdims=True)
            assert (np.abs(found[row, :, start : start + 4] - new[row]) <= HALF_STEP[dtype] * largest).all()
            assert not found[row, :, :start].any()
            assert not found[row, :, start + 4 :].any()


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_growing_keeps_everything(dtype):
    cache = stored(empty_cache(CONFIG, 2, 8, dtype), 0, new_tokens(4, 1), new_tokens(4, 2))
    cache = cache.advance(jnp.asarray([4, 2], jnp.int32))
    grown = grow_cache(cache, 24)
    assert grown.capacity == 24
    np.testing.assert_array_equal(grown.length, cache.length)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(grown), strict=True):
        if before.ndim > 1:
            np.testing.assert_array_equal(after[:, :, :8], before)
            assert not np.asarray(after[:, :, 8:], np.float32).any()


def test_storing_into_one_layer_leaves_the_others():
    cache = empty_cache(CONFIG, 2, 8, "int8")
    changed = stored(cache, 1, new_tokens(2, 1), new_tokens(2, 2))
    for layer in range(CONFIG.layers):
        same = all(
            np.array_equal(before, after)
            for before, after in zip(
                jax.tree.leaves(cache.layers[layer]), jax.tree.leaves(changed.layers[layer]), strict=True
            )
        )
        assert same == (layer != 1)
