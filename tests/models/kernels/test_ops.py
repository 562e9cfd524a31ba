"""The compiled kernels against plain JAX, in every variant, and the independence of their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import ops, reference
from tests.models.kernels.stored import FORMATS, random_cache, random_rows, random_weight

SHAPES = ((8, 32), (1, 1), (24, 96), (7, 33), (40, 2048), (130, 70))


def close(found, wanted, tolerance: float = 2e-6) -> None:
    """Equal to float32 rounding of sums as large as the largest result."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * float(np.max(np.abs(wanted))) + 1e-30)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_matmul_equals_the_reference(variant, format, outputs, inputs, rows):
    random = np.random.default_rng([outputs, inputs, rows])
    weight = random_weight(random, format, outputs, inputs)
    x = jnp.asarray(random_rows(random, rows, inputs))
    [found] = ops.matmul(x, [weight], [outputs])
    close(found, reference.matmul(x, *weight, outputs))


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_with_several_weights(variant, format):
    random = np.random.default_rng(1)
    sizes = (50, 8, 200)
    weights = [random_weight(random, format, size, 64) for size in sizes]
    x = jnp.asarray(random_rows(random, 5, 64))
    for found, weight, size in zip(ops.matmul(x, weights, sizes), weights, sizes, strict=True):
        np.testing.assert_array_equal(found, ops.matmul(x, [weight], [size])[0])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_matmul_do_not_depend_on_each_other(variant, format):
    random = np.random.default_rng(2)
    weight = random_weight(random, format, 72, 160)
    x = jnp.asarray(random_rows(random, 32, 160))
    alone = np.concatenate([ops.matmul(x[row : row + 1], [weight], [72])[0] for row in range(32)])
    for rows in range(1, 33):
        np.testing.assert_array_equal(ops.matmul(x[:rows], [weight], [72])[0], alone[:rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_value_that_is_not_finite_shows_in_its_own_row_alone(variant, format, bad):
    random = np.random.default_rng(3)
    weight = random_weight(random, format, 16, 64)
    x = random_rows(random, 2, 64)
    [clean] = ops.matmul(jnp.asarray(x), [weight], [16])
    x[1, 40] = bad
    [found] = ops.matmul(jnp.asarray(x), [weight], [16])
    np.testing.assert_array_equal(found[0], clean[0])
    assert not np.isfinite(np.asarray(found[1])).any()


@pytest.mark.parametrize("amount", [0.0, 1e-38, 1e-30, 1e30])
def test_activations_of_any_size(variant, amount):
    random = np.random.default_rng(4)
    weight = random_weight(random, "q8", 16, 64)
    x = jnp.asarray(random.uniform(-1, 1, (2, 64)).astype(np.float32) * np.float32(amount))
    [found] = ops.matmul(x, [weight], [16])
    close(found, reference.matmul(x, *weight, 16))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (40, 20), (96, 128)])
def test_experts_equal_the_reference(variant, format, hidden, intermediate):
    random = np.random.default_rng(5)
    gate_up = random_weight(random, format, 2 * intermediate, hidden, (6,))
    down = random_weight(random, format, hidden, intermediate, (6,))
    x = jnp.asarray(random_rows(random, 7, hidden) / 8)
    ids = jnp.asarray([random.permutation(6)[:3] for _ in range(7)], jnp.int32)
    shares = jnp.asarray(random.uniform(size=(7, 3)), jnp.float32)
    found = ops.experts(x, ids, shares, gate_up, down, intermediate)
    wanted = reference.experts(x, ids, shares, gate_up, down, intermediate)
    # The inner activations are rounded to whole numbers once more: one of them may fall to the other side.
    close(found, wanted, 1e-2 if format in ("q4", "q8") else 1e-5)
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.max(np.abs(wanted))
    for token in range(7):
        one = slice(token, token + 1)
        alone = ops.experts(x[one], ids[one], shares[one], gate_up, down, intermediate)
        np.testing.assert_array_equal(alone[0], found[token])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 20), (2, 2, 128), (6, 2, 70)])
@pytest.mark.parametrize("length", [1, 3])
def test_attention_equals_the_reference(variant, dtype, heads, kv_heads, head_dim, length):
    random = np.random.default_rng(6)
    keys, key_scales = random_cache(random, dtype, (3, kv_heads, 700, head_dim))
    values, value_scales = random_cache(random, dtype, (3, kv_heads, 700, head_dim))
    queries = jnp.asarray(random_rows(random, 3, length, heads, head_dim))
    first = jnp.asarray([0, 255, 700 - length], jnp.int32)
    scales = (*key_scales, *value_scales)
    found = ops.attention(queries, keys, values, first, scales)
    close(found, reference.attention(queries, keys, values, first, scales), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_attention_of_a_row_depends_on_neither_batch_nor_capacity(variant, dtype):
    random = np.random.default_rng(7)
    keys, key_scales = random_cache(random, dtype, (4, 2, 1024, 64))
    values, value_scales = random_cache(random, dtype, (4, 2, 1024, 64))
    queries = jnp.asarray(random_rows(random, 4, 1, 6, 64))
    first = jnp.asarray([3, 256, 511, 600], jnp.int32)
    together = ops.attention(queries, keys, values, first, (*key_scales, *value_scales))
    for row in range(4):
        one = slice(row, row + 1)
        for capacity in (602, 1024):
            cut = [scale[one, :, :capacity] for scale in (*key_scales, *value_scales)]
            alone = ops.attention(queries[one], keys[one, :, :capacity], values[one, :, :capacity], first[one], cut)
            np.testing.assert_array_equal(alone[0], together[row])


def test_attention_reads_nothing_that_is_not_visible(variant):
    random = np.random.default_rng(8)
    keys, _ = random_cache(random, "float32", (1, 1, 300, 32))
    queries = jnp.asarray(random_rows(random, 1, 1, 2, 32))
    first = jnp.asarray([270], jnp.int32)
    clean = ops.attention(queries, keys, keys, first)
    spoilt = keys.at[:, :, 271:].set(jnp.nan)
    np.testing.assert_array_equal(ops.attention(queries, spoilt, spoilt, first), clean)


def test_large_scores_do_not_overflow(variant):
    keys = jnp.full((1, 1, 300, 32), 50.0).at[0, 0, 7].set(100.0)
    queries = jnp.full((1, 1, 1, 32), 100.0)
    found = ops.attention(queries, keys, keys, jnp.asarray([299], jnp.int32))
    np.testing.assert_array_equal(found, np.full((1, 1, 32), 100.0, np.float32))


def matmul_fault(**changed):
    arguments = {
        "x": jnp.zeros((2, 64)),
        "weight": jnp.zeros((2, 2, 128), jnp.uint8),
        "scale": jnp.zeros((2, 2, 8), jnp.float16),
        "outputs": 16,
    } | changed
    return ops.matmul(arguments["x"], [(arguments["weight"], arguments["scale"])], [arguments["outputs"]])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"x": jnp.zeros((2, 2, 64))}, "x has shape"),
        ({"x": jnp.zeros((2, 96))}, r"weight 0 has shape \[2, 2, 128\], wanted is \[2, 3, 128\]"),
        ({"outputs": 17}, "weight 0 has shape"),
        ({"weight": jnp.zeros((2, 2, 128), jnp.uint16)}, "weight 0 should be uint8"),
        ({"weight": jnp.zeros((2, 2, 128), jnp.int8)}, "weight 0 has shape"),
        ({"weight": jnp.zeros((16, 64))}, "the scale of weight 0 has shape"),
        ({"scale": jnp.zeros((2, 2, 8), jnp.float32)}, "the scale of weight 0 should be float16"),
        ({"scale": jnp.zeros((2, 2, 4), jnp.float16)}, "the scale of weight 0 has shape"),
    ],
)
def test_a_wrong_argument_of_matmul_is_named(changed, named):
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        jax.block_until_ready(matmul_fault(**changed))


def test_an_expert_that_does_not_exist_is_named():
    random = np.random.default_rng(9)
    gate_up, down = random_weight(random, "q4", 64, 32, (4,)), random_weight(random, "q4", 32, 32, (4,))
    ids = jnp.asarray([[0, 1], [2, 4]], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="token 1 wants expert 4 of 4"):
        jax.block_until_ready(ops.experts(jnp.zeros((2, 32)), ids, jnp.zeros((2, 2)), gate_up, down, 32))


@pytest.mark.parametrize(
    ("first", "keys", "values", "named"),
    [
        (8, (1, 1, 8, 32), (1, 1, 8, 32), "row 0 holds 8 tokens and gets 1, capacity is 8"),
        (-1, (1, 1, 8, 32), (1, 1, 8, 32), "row 0 holds -1"),
        (0, (1, 1, 8, 16), (1, 1, 8, 16), "keys has shape"),
        (0, (1, 1, 8, 32), (1, 1, 9, 32), "values has shape"),
        (0, (1, 3, 8, 32), (1, 3, 8, 32), "multiple of kv_heads"),
    ],
)
def test_a_wrong_argument_of_attention_is_named(first, keys, values, named):
    queries = jnp.zeros((1, 1, 2, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        jax.block_until_ready(
            ops.attention(queries, jnp.zeros(keys), jnp.zeros(values), jnp.asarray([first], jnp.int32))
        )
