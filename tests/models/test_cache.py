"""What the cache keeps of keys and values, in every type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import (
    CACHE_TYPES,
    COPIED_TOKENS,
    LayerCache,
    bytes_per_token,
    copy_prefix,
    layer_shapes,
    read_block,
    write_block,
)
from models.config import parse_config
from models.presets import preset

CONFIG = parse_config(preset("qwen3-vl-2b"), "preset").text
# Largest error of a stored number over the largest magnitude of its token and head: half a step of the type.
HALF_STEP = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127 * (1 + 1e-5)}


def new_tokens(length: int, seed: int) -> jax.Array:
    """Keys or values of three rows, of very different sizes, one of them all zeros."""
    random = np.random.default_rng(seed)
    shape = (3, CONFIG.kv_heads, length, CONFIG.head_dim)
    values = random.standard_normal(shape) * np.exp(3 * random.standard_normal((*shape[:3], 1)))
    values[0, 1, 0] = 0
    return jnp.asarray(values, jnp.float32)


def zeros(slots: int, capacity: int, dtype: str) -> LayerCache:
    shapes = layer_shapes(CONFIG, slots, capacity, dtype)
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)


def filled(slots: int, capacity: int, dtype: str) -> tuple[LayerCache, ...]:
    """Two layers with something in every place."""
    random = np.random.default_rng(0)
    return tuple(
        jax.tree.map(lambda array: jnp.asarray(random.integers(-9, 9, array.shape), array.dtype), shapes)
        for shapes in (layer_shapes(CONFIG, slots, capacity, dtype),) * 2
    )


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_stored_tokens_come_back_within_half_a_step(dtype):
    keys, values = new_tokens(4, 1), new_tokens(4, 2)
    places = {2: (0, 3), 0: (2, 7)}  # slot: row and first position; the row between them is in no slot
    layer = zeros(3, 16, dtype).store(keys, values, jnp.asarray([2, -1, 0]), jnp.asarray([3, 5, 7]))
    assert layer.keys.dtype == layer.values.dtype == jnp.dtype(dtype)
    assert len(layer.scales) == (2 if dtype == "int8" else 0)
    for index, (kept, new) in enumerate(((layer.keys, keys), (layer.values, values))):
        found = np.asarray(kept, np.float32) * (np.asarray(layer.scales[index])[..., None] if layer.scales else 1)
        assert not found[1].any()
        for slot, (row, start) in places.items():
            largest = np.abs(new[row]).max(axis=-1, keepdims=True)
            assert (np.abs(found[slot, :, start : start + 4] - new[row]) <= HALF_STEP[dtype] * largest).all()
            assert not found[slot, :, :start].any()
            assert not found[slot, :, start + 4 :].any()


@pytest.mark.parametrize("dtype", CACHE_TYPES)
@pytest.mark.parametrize("tokens", [1, COPIED_TOKENS, COPIED_TOKENS + 1])
def test_a_prefix_is_copied_from_slot_to_slot_and_nothing_else_changes(dtype, tokens):
    layers = filled(3, 3 * COPIED_TOKENS, dtype)
    before = jax.tree.map(np.asarray, layers)
    copied = copy_prefix(layers, *(jnp.int32(number) for number in (2, 0, tokens)))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(new[0, :, :tokens], old[2, :, :tokens])
        np.testing.assert_array_equal(new[0, :, 2 * COPIED_TOKENS :], old[0, :, 2 * COPIED_TOKENS :])
        np.testing.assert_array_equal(new[1:], old[1:])


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_a_block_goes_out_of_a_slot_and_into_another_and_nothing_else_changes(dtype):
    layers = filled(3, COPIED_TOKENS, dtype)
    before = jax.tree.map(np.asarray, layers)
    block = read_block(layers, jnp.int32(2), jnp.int32(48), 64)
    after = write_block(layers, jnp.int32(0), jnp.int32(16), block)
    for index in range(len(layers)):
        for old, new, cut in zip(*map(jax.tree.leaves, (before[index], after[index], block)), strict=True):
            np.testing.assert_array_equal(cut[index], old[2, :, 48:112])
            np.testing.assert_array_equal(new[0, :, 16:80], cut[index])
            np.testing.assert_array_equal(new[0, :, :16], old[0, :, :16])
            np.testing.assert_array_equal(new[0, :, 80:], old[0, :, 80:])
            np.testing.assert_array_equal(new[1:], old[1:])


def test_memory_of_a_token():
    values = 2 * 28 * 8 * 128
    assert bytes_per_token(CONFIG, "float32") == 4 * values
    assert bytes_per_token(CONFIG, "bfloat16") == 2 * values
    assert bytes_per_token(CONFIG, "int8") == values + 2 * 28 * 8 * 4
