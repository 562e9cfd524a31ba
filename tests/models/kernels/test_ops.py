"""The compiled kernels against plain JAX, in every variant, and the independence of their rows."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import CACHE_TYPES, LayerCache
from models.kernels import ops, reference
from tests.models.kernels.results import expected_from, in_numpy
from tests.models.kernels.stored import FORMATS, new_tokens, random_cache, random_rows, random_weight

products, gated_mlp, experts = (in_numpy(function) for function in (ops.matmul, ops.gated_mlp, ops.experts))
cached_attention, choose_experts = in_numpy(ops.cached_attention), in_numpy(ops.choose_experts)
expected_norm = expected_from(reference.rms_norm)
expected_product = expected_from(reference.matmul, static=(3,))
expected_gated_mlp = expected_from(reference.gated_mlp, static=(5,))
expected_experts = expected_from(reference.experts, static=(6,))
expected_attention = expected_from(reference.cached_attention)
expected_choice = expected_from(reference.choose_experts, static=(1, 2))
SHAPES = ((8, 32), (1, 1), (24, 96), (7, 33), (40, 2048), (130, 70))


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ones(*shape):
    return np.ones(shape, np.float32)


def as_they_are(queries, keys, values):
    """New tokens that are neither normalised nor rotated."""
    half = queries.shape[-1] // 2
    return queries, keys, values, (ops.no_norm(), ops.no_norm()), (ones(1, 1, half), zeros(1, 1, half))


def assert_rows_stand_alone(function):
    """`function` of a slice of 32 rows gives each row, bit for bit, what it gives for that row alone."""
    alone = np.concatenate([function(slice(row, row + 1)) for row in range(32)])
    for rows in range(1, 33):
        np.testing.assert_array_equal(function(slice(rows)), alone[:rows])


def matmul(x, weights, outputs, norm=None):
    """The product without a norm, where a test does not care for one."""
    return products(x, ops.no_norm() if norm is None else norm, weights, outputs)


def close(found, wanted, tolerance: float = 2e-6) -> None:
    """Equal to float32 rounding of sums as large as the largest result."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * float(np.max(np.abs(wanted))) + 1e-30)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_matmul_equals_the_reference(variant, format, outputs, inputs, rows):
    random = np.random.default_rng([outputs, inputs])
    weight = random_weight(random, format, outputs, inputs)
    x = random_rows(random, 9, inputs)  # the reference is compiled for all of them alone
    [found] = matmul(x[:rows], [weight], [outputs])
    close(found, expected_product(x, *weight, outputs)[:rows])


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_with_several_weights(variant, format):
    random = np.random.default_rng(1)
    sizes = (50, 8, 200)
    weights = [random_weight(random, format, size, 64) for size in sizes]
    x = random_rows(random, 5, 64)
    for found, weight, size in zip(matmul(x, weights, sizes), weights, sizes, strict=True):
        np.testing.assert_array_equal(found, matmul(x, [weight], [size])[0])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_matmul_do_not_depend_on_each_other(variant, format):
    random = np.random.default_rng(2)
    weight = random_weight(random, format, 72, 160)
    x = random_rows(random, 32, 160)
    assert_rows_stand_alone(lambda rows: matmul(x[rows], [weight], [72])[0])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_gated_mlp_do_not_depend_on_each_other(variant, format):
    random = np.random.default_rng(20)
    gate, up = (random_weight(random, format, 72, 96) for _ in range(2))
    down = random_weight(random, format, 96, 72)
    norm = (random.uniform(0.5, 2, 96).astype(np.float32), 1e-6)
    x = random_rows(random, 32, 96)
    assert_rows_stand_alone(lambda rows: gated_mlp(x[rows], norm, gate, up, down, 72))


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_of_the_experts_do_not_depend_on_each_other(variant, format):
    random = np.random.default_rng(21)
    gate_up, down = random_weight(random, format, 80, 64, (6,)), random_weight(random, format, 64, 40, (6,))
    norm, x = (random.uniform(0.05, 0.2, 64).astype(np.float32), 1e-6), random_rows(random, 32, 64)
    ids = np.array([random.permutation(6)[:3] for _ in range(32)], np.int32)
    shares = random.uniform(size=(32, 3)).astype(np.float32)
    assert_rows_stand_alone(lambda rows: experts(x[rows], norm, ids[rows], shares[rows], gate_up, down, 40))


@pytest.mark.parametrize(("experts", "top_k"), [(5, 2), (128, 8)])
def test_the_choice_of_experts_does_not_depend_on_other_tokens(variant, experts, top_k):
    logits = random_rows(np.random.default_rng(23), 32, experts)
    for result in range(2):
        assert_rows_stand_alone(lambda rows, result=result: choose_experts(logits[rows], top_k, True)[result])


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_rows_of_attention_do_not_depend_on_each_other(variant, dtype):
    random = np.random.default_rng(22)
    layer = random_cache(random, dtype, (32, 2, 300, 32))
    queries, keys, values, norms, rotation = new_tokens(random, 32, 1, 6, 2, 32)
    first, slots = random.integers(0, 300, 32, np.int32), random.permutation(32)

    def attended(rows):
        fresh = (queries[rows], keys[rows], values[rows], norms, [part[rows] for part in rotation])
        return attend(fresh, first[rows], layer, slots[rows])[0]

    assert_rows_stand_alone(attended)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_value_that_is_not_finite_shows_in_its_own_row_alone(variant, format, bad):
    random = np.random.default_rng(3)
    weight = random_weight(random, format, 16, 64)
    x = random_rows(random, 2, 64)
    [clean] = matmul(x, [weight], [16])
    x[1, 40] = bad
    [found] = matmul(x, [weight], [16])
    np.testing.assert_array_equal(found[0], clean[0])
    assert not np.isfinite(found[1]).any()


@pytest.mark.parametrize("amount", [0.0, 1e-38, 1e-30, 1e30])
def test_activations_of_any_size(variant, amount):
    random = np.random.default_rng(4)
    weight = random_weight(random, "q8", 16, 64)
    x = random.uniform(-1, 1, (2, 64)).astype(np.float32) * np.float32(amount)
    [found] = matmul(x, [weight], [16])
    close(found, expected_product(x, *weight, 16))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (40, 20), (96, 128)])
def test_experts_equal_the_reference(variant, format, hidden, intermediate):
    random = np.random.default_rng(5)
    gate_up = random_weight(random, format, 2 * intermediate, hidden, (6,))
    down = random_weight(random, format, hidden, intermediate, (6,))
    norm, x = (random.uniform(0.05, 0.2, hidden).astype(np.float32), 1e-6), random_rows(random, 7, hidden)
    ids = np.array([random.permutation(6)[:3] for _ in range(7)], np.int32)
    shares = random.uniform(size=(7, 3)).astype(np.float32)
    found = experts(x, norm, ids, shares, gate_up, down, intermediate)
    wanted = expected_experts(x, norm, ids, shares, gate_up, down, intermediate)
    # The inner activations are rounded to whole numbers once more: one of them may fall to the other side.
    close(found, wanted, 1e-2 if format in ("q4", "q8") else 1e-5)
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.max(np.abs(wanted))
    for token in range(7):
        one = slice(token, token + 1)
        alone = experts(x[one], norm, ids[one], shares[one], gate_up, down, intermediate)
        np.testing.assert_array_equal(alone[0], found[token])


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (60, 4), (128, 8)])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("digits", [9, 0])
def test_the_choice_of_experts_equals_the_reference(variant, experts, top_k, normalise, digits):
    """Also among ties, which go to the lower id."""
    logits = np.round(3 * np.random.default_rng(22).standard_normal((40, experts)), digits).astype(np.float32)
    shares, ids = choose_experts(logits, top_k, normalise)
    wanted, wanted_ids = expected_choice(logits, top_k, normalise)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(shares, wanted, rtol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_router_that_gives_no_numbers_shows_it_in_that_token(variant, bad):
    logits = random_rows(np.random.default_rng(24), 3, 20)
    clean, clean_ids = choose_experts(logits, 4, True)
    logits[1, 7] = bad
    shares, ids = choose_experts(logits, 4, True)
    assert np.isnan(shares[1]).any()
    assert ((ids >= 0) & (ids < 20)).all()
    np.testing.assert_array_equal(shares[::2], clean[::2])
    np.testing.assert_array_equal(ids[::2], clean_ids[::2])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [64, 70, 8, 3])
def test_a_norm_comes_before_the_product(variant, format, size):
    random = np.random.default_rng(10)
    weight = random_weight(random, format, 24, size)
    norm = (random.uniform(0.5, 2, size).astype(np.float32), 1e-6)
    x = random_rows(random, 5, size)
    [found] = matmul(x, [weight], [24], norm)
    wanted = expected_product(expected_norm(x, norm), *weight, 24)
    # An activation of quantised weights may be rounded to the other side.
    close(found, wanted, 1e-2 if format in ("q4", "q8") else 1e-5)
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.max(np.abs(wanted))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (40, 20), (3, 1), (96, 130)])
def test_gated_mlp_equals_the_reference(variant, format, hidden, intermediate):
    random = np.random.default_rng(11)
    gate, up = (random_weight(random, format, intermediate, hidden) for _ in range(2))
    down = random_weight(random, format, hidden, intermediate)
    norm = (random.uniform(0.5, 2, hidden).astype(np.float32), 1e-6)
    x = random_rows(random, 9, hidden)
    found = gated_mlp(x, norm, gate, up, down, intermediate)
    wanted = expected_gated_mlp(x, norm, gate, up, down, intermediate)
    close(found, wanted, 2e-2 if format in ("q4", "q8") else 1e-5)
    assert np.median(np.abs(found - wanted)) < 1e-4 * np.max(np.abs(wanted))
    for row in range(9):
        alone = gated_mlp(x[row : row + 1], norm, gate, up, down, intermediate)
        np.testing.assert_array_equal(alone[0], found[row])


def test_gates_of_any_size(variant):
    gates = np.array([[-200, -88, -30, -1, -1e-30, 0, 1e-30, 1, 30, 88, 200, 1e30, -1e30]], np.float32).T
    one = (ones(1, 1), ops.no_scale())
    # Each row has one input, and a gated MLP of ones gives silu(x) * x.
    found = gated_mlp(gates, ops.no_norm(), one, one, one, 1)
    np.testing.assert_allclose(found, jax.nn.silu(gates) * gates, rtol=1e-6)


def attend(fresh, first, layer, slots=None, attention=cached_attention):
    """Attention of new tokens whose rows are in these slots, by default in those of the same number."""
    slots = range(len(first)) if slots is None else slots
    return attention(*fresh, np.array(slots, np.int32), first, layer)


@pytest.mark.parametrize("dtype", CACHE_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 20), (2, 2, 128), (6, 2, 70)])
@pytest.mark.parametrize("length", [1, 3])
def test_attention_equals_the_reference(variant, dtype, heads, kv_heads, head_dim, length):
    random = np.random.default_rng(6)
    layer = random_cache(random, dtype, (4, kv_heads, 700, head_dim))
    fresh = new_tokens(random, 4, length, heads, kv_heads, head_dim)
    first, slots = np.array([0, 255, 40, 700 - length], np.int32), [2, 0, -1, 3]
    found, found_layer = attend(fresh, first, layer, slots)
    wanted, wanted_layer = attend(fresh, first, layer, slots, expected_attention)
    # A number that is stored narrow may be rounded to the other side.
    close(found, wanted, {"float32": 1e-5, "bfloat16": 2e-3, "int8": 4e-3}[dtype])
    assert np.median(np.abs(found - wanted)) < 1e-4 * np.max(np.abs(wanted))
    step = {"float32": 2e-6, "bfloat16": 2.0**-7, "int8": 1.0}[dtype]
    for stored, expected in zip(jax.tree.leaves(found_layer), jax.tree.leaves(wanted_layer), strict=True):
        stored, expected = np.asarray(stored, np.float32), np.asarray(expected, np.float32)
        largest = 1.0 if dtype == "int8" else np.abs(expected).max()
        assert np.abs(stored - expected).max() <= step * largest
        assert (stored != expected).mean() < 0.01
    np.testing.assert_array_equal(found[2], np.zeros_like(found[2]))
    untouched = {slot: np.r_[0:start, start + length : 700] for slot, start in zip(slots, first.tolist(), strict=True)}
    untouched = untouched | {1: np.r_[0:700]}
    del untouched[-1]
    for stored, before in zip(jax.tree.leaves(found_layer), jax.tree.leaves(layer), strict=True):
        for slot, places in untouched.items():
            np.testing.assert_array_equal(stored[slot, :, places], before[slot, :, places])


def test_calls_from_several_threads_do_not_disturb_each_other(variant):
    random = np.random.default_rng(17)
    weights = [random_weight(random, "q4", 256, 128) for _ in range(4)]
    rows = [random_rows(random, 3, 128) for _ in weights]
    wanted = [matmul(x, [weight], [256])[0] for x, weight in zip(rows, weights, strict=True)]

    def call(index):
        return [matmul(rows[index], [weights[index]], [256])[0] for _ in range(50)]

    with ThreadPoolExecutor(len(weights)) as pool:
        for found, product in zip(pool.map(call, range(len(weights))), wanted, strict=True):
            for result in found:
                np.testing.assert_array_equal(result, product)


def test_attention_without_norms(variant):
    random = np.random.default_rng(12)
    layer = random_cache(random, "float32", (1, 1, 40, 32))
    queries, keys, values, _, rotation = new_tokens(random, 1, 1, 2, 1, 32)
    fresh, first = (queries, keys, values, (ops.no_norm(), ops.no_norm()), rotation), np.array([30], np.int32)
    close(attend(fresh, first, layer)[0], attend(fresh, first, layer, attention=expected_attention)[0], 1e-5)


@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_attention_of_a_row_depends_on_neither_batch_nor_capacity(variant, dtype):
    random = np.random.default_rng(7)
    layer = random_cache(random, dtype, (4, 2, 1024, 64))
    queries, keys, values, norms, rotation = new_tokens(random, 4, 1, 6, 2, 64)
    first = np.array([3, 256, 511, 600], np.int32)
    together, stored = attend((queries, keys, values, norms, rotation), first, layer)
    for row in range(4):
        one = slice(row, row + 1)
        own = [x[one] for x in (queries, keys, values)]
        for capacity in (602, 1024):
            cut = jax.tree.map(lambda array, one=one, capacity=capacity: array[one, :, :capacity], layer)
            alone, kept = attend((*own, norms, [x[one] for x in rotation]), first[one], cut)
            np.testing.assert_array_equal(alone[0], together[row])
            for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(stored), strict=True):
                np.testing.assert_array_equal(a[0], b[row, :, :capacity])


def test_attention_reads_nothing_that_is_not_visible(variant):
    random = np.random.default_rng(8)
    layer = random_cache(random, "float32", (1, 1, 300, 32))
    fresh, first = new_tokens(random, 1, 1, 2, 1, 32), np.array([270], np.int32)
    clean, _ = attend(fresh, first, layer)
    spoilt = jax.tree.map(np.copy, layer)
    for array in jax.tree.leaves(spoilt):
        array[:, :, 270:] = np.nan
    np.testing.assert_array_equal(attend(fresh, first, spoilt)[0], clean)


@pytest.mark.parametrize("place", [0, 7, 8, 15, 16, 255, 256, 298])
def test_large_scores_do_not_overflow(variant, place):
    layer = LayerCache(50 * ones(1, 1, 300, 32), 2 * ones(1, 1, 300, 32))
    layer.keys[0, 0, place], layer.values[0, 0, place] = 100, 3
    queries, small = 100 * ones(1, 1, 1, 32), ones(1, 1, 1, 32)
    found, _ = attend(as_they_are(queries, small, small), np.array([299], np.int32), layer)
    np.testing.assert_array_equal(found, np.full((1, 1, 32), 3.0, np.float32))


def test_a_span_of_scores_that_are_all_infinitely_small_counts_nothing(variant):
    layer = LayerCache(zeros(1, 1, 300, 32), 2 * ones(1, 1, 300, 32))
    layer.keys[0, 0, :256], layer.values[0, 0, :256] = -1e30, 3
    fresh = as_they_are(1e10 * ones(1, 1, 1, 32), zeros(1, 1, 1, 32), 2 * ones(1, 1, 1, 32))
    np.testing.assert_array_equal(attend(fresh, np.array([299], np.int32), layer)[0], 2 * ones(1, 1, 32))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_small_weights_add_up(variant, dtype):
    """One key of weight 1 and value 0, and 254 of weight e^-9 and value 1, which are four steps of 16 bits each."""
    kept = {"float32": np.float32, "int8": np.int8}[dtype]
    keys, values = np.zeros((1, 1, 256, 32), kept), np.ones((1, 1, 256, 32), kept)
    keys[..., 0], keys[0, 0, 40, 0], values[0, 0, 40] = -9, 0, 0
    scales = (ones(1, 1, 256), ones(1, 1, 256)) if dtype == "int8" else None
    queries, value = np.sqrt(32) * np.eye(1, 32, dtype=np.float32)[None, None], zeros(1, 1, 1, 32)
    key = -100 * np.eye(1, 32, dtype=np.float32)[None, None]
    layer = LayerCache(keys, values, scales)
    found, _ = attend(as_they_are(queries, key, value), np.array([255], np.int32), layer)
    wanted = 254 * np.exp(-9) / (1 + 254 * np.exp(-9))
    np.testing.assert_allclose(found, wanted, rtol={"float32": 1e-5, "int8": 0.02}[dtype])


def test_small_parts_of_a_query_count(variant):
    """31 numbers of 1 beside one of 100, which meets nothing: 326 steps of 16 bits each."""
    keys, values = np.zeros((1, 1, 8, 32), np.int8), np.zeros((1, 1, 8, 32), np.int8)
    keys[0, 0, 3, 1:], values[0, 0, 3] = -1, 1
    queries, none = ones(1, 1, 1, 32), zeros(1, 1, 1, 32)
    queries[..., 0] = 100
    layer = LayerCache(keys, values, (ones(1, 1, 8), ones(1, 1, 8)))
    found, _ = attend(as_they_are(queries, none, none), np.array([7], np.int32), layer)
    weight = np.exp(-31 / np.sqrt(32))
    np.testing.assert_allclose(found, weight / (7 + weight), rtol=0.02)


@pytest.mark.parametrize(("head_dim", "most"), [(128, 127), (516, -128), (640, 127), (1024, -128)])
def test_the_largest_numbers_of_an_int8_cache_add_up(variant, head_dim, most):
    """-128 is kept by no kernel here; a head of 516 was one whose sums it could make too large for 32 bits."""
    sign = np.where(np.arange(300) % 3, 1, -1 if most > 0 else 0).astype(np.int8)[None, None, :, None]
    numbers, scales = np.broadcast_to(most * sign, (1, 1, 300, head_dim)), np.full((1, 1, 300), 1 / 127, np.float32)
    layer = LayerCache(numbers.copy(), numbers.copy(), (scales, scales))
    queries, small = np.sign(most) * ones(1, 1, 2, head_dim), ones(1, 1, 1, head_dim)
    fresh, first = as_they_are(queries, small, small), np.array([299], np.int32)
    close(attend(fresh, first, layer)[0], attend(fresh, first, layer, attention=expected_attention)[0], 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("spoilt", range(3))
@pytest.mark.parametrize("dtype", CACHE_TYPES)
def test_attention_of_what_is_not_finite_shows_in_its_own_row_alone(variant, dtype, spoilt, bad):
    random = np.random.default_rng(24)
    layer = random_cache(random, dtype, (2, 1, 300, 32))
    *tokens, norms, rotation = new_tokens(random, 2, 1, 2, 1, 32)
    first = np.array([270, 280], np.int32)
    clean, _ = attend((*tokens, norms, rotation), first, layer)
    tokens[spoilt][1, 0, 0, 5] = bad
    found, _ = attend((*tokens, norms, rotation), first, layer)
    np.testing.assert_array_equal(found[0], clean[0])
    assert not np.isfinite(found[1]).all()


def test_a_donated_cache_is_changed_in_place(variant):
    layer = jax.tree.map(jnp.asarray, random_cache(np.random.default_rng(13), "int8", (1, 1, 64, 32)))
    fresh = new_tokens(np.random.default_rng(14), 1, 1, 2, 1, 32)
    step = jax.jit(
        lambda layer, first: attend(fresh, first, layer, attention=ops.cached_attention)[1], donate_argnums=0
    )
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(layer)]
    after = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(step(layer, np.array([5], np.int32)))]
    assert after == before


Q4_WEIGHT = (np.zeros((2, 2, 128), np.uint8), np.zeros((2, 2, 8), np.float16))  # [16, 64]


def matmul_fault(**changed):
    weight, scale = Q4_WEIGHT
    arguments = {"x": zeros(2, 64), "weight": weight, "scale": scale, "outputs": 16} | changed
    return matmul(arguments["x"], [(arguments["weight"], arguments["scale"])], [arguments["outputs"]])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"x": zeros(2, 2, 64)}, "x has shape"),
        ({"x": np.zeros((2, 64), np.float16)}, "x should be float32"),
        ({"x": zeros(2, 96)}, r"weight 0 has shape \[2, 2, 128\], wanted is \[2, 3, 128\]"),
        ({"outputs": 17}, "weight 0 has shape"),
        ({"weight": np.zeros((2, 2, 128), np.uint16)}, "weight 0 should be uint8"),
        ({"weight": np.zeros((2, 2, 128), np.int8)}, "weight 0 has shape"),
        ({"weight": zeros(16, 64)}, "the scale of weight 0 has shape"),
        ({"scale": np.zeros((2, 2, 8), np.float32)}, "the scale of weight 0 should be float16"),
        ({"scale": np.zeros((2, 2, 4), np.float16)}, "the scale of weight 0 has shape"),
    ],
)
def test_a_wrong_argument_of_matmul_is_named(changed, named):
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        matmul_fault(**changed)


def test_an_expert_that_does_not_exist_is_named():
    random = np.random.default_rng(9)
    gate_up, down = random_weight(random, "q4", 64, 32, (4,)), random_weight(random, "q4", 32, 32, (4,))
    ids = np.array([[0, 1], [2, 4]], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="token 1 wants expert 4 of 4"):
        experts(zeros(2, 32), ops.no_norm(), ids, zeros(2, 2), gate_up, down, 32)


def test_a_norm_of_another_size_is_named():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"norm has shape \[63\], wanted is \[64\]"):
        products(zeros(2, 64), (ones(63), 1e-6), [Q4_WEIGHT], [16])


def test_a_norm_of_another_dtype_is_named():
    with pytest.raises(jax.errors.JaxRuntimeError, match="norm should be float32"):
        products(zeros(2, 64), (np.ones(64, np.float16), 1e-6), [Q4_WEIGHT], [16])


@pytest.mark.parametrize(
    ("logits", "top_k", "named"),
    [
        (zeros(3, 4), 5, "top_k is 5, wanted is 1 to 4"),
        (np.zeros((3, 4), np.float16), 2, "logits should be float32"),
        (zeros(3, 4, 1), 2, r"logits has shape \[3, 4, 1\], wanted is \[tokens, experts\]"),
    ],
)
def test_a_wrong_argument_of_the_choice_of_experts_is_named(logits, top_k, named):
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        choose_experts(logits, top_k, True)


def test_a_norm_of_another_size_of_experts_is_named():
    random = np.random.default_rng(11)
    gate_up, down = random_weight(random, "q4", 64, 32, (4,)), random_weight(random, "q4", 32, 32, (4,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"norm has shape \[31\], wanted is \[32\]"):
        experts(zeros(2, 32), (ones(31), 1e-6), np.zeros((2, 2), np.int32), zeros(2, 2), gate_up, down, 32)


@pytest.mark.parametrize(
    ("index", "dtype", "named"),
    [
        (0, np.float16, "x should be float32"),
        (1, np.float32, "ids should be int32"),
        (1, np.int8, "ids should be int32"),
        (2, np.int32, "shares should be float32"),
    ],
)
def test_an_argument_of_another_dtype_of_experts_is_named(index, dtype, named):
    random = np.random.default_rng(10)
    gate_up, down = random_weight(random, "q4", 64, 32, (4,)), random_weight(random, "q4", 32, 32, (4,))
    tokens = [zeros(2, 32), np.zeros((2, 2), np.int32), zeros(2, 2)]
    tokens[index] = tokens[index].astype(dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        experts(tokens[0], ops.no_norm(), *tokens[1:], gate_up, down, 32)


@pytest.mark.parametrize(
    ("index", "weight", "named"),
    [
        (0, (zeros(16, 63), ops.no_scale()), r"gate has shape \[16, 63\], wanted is \[16, 64\]"),
        (1, (zeros(15, 64), ops.no_scale()), r"up has shape \[15, 64\], wanted is \[16, 64\]"),
        (2, Q4_WEIGHT, r"down has shape"),
    ],
)
def test_a_wrong_weight_of_the_gated_mlp_is_named(index, weight, named):
    weights = [Q4_WEIGHT, Q4_WEIGHT, (zeros(64, 16), ops.no_scale())]
    weights[index] = weight
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        gated_mlp(zeros(2, 64), ops.no_norm(), *weights, 16)


def test_an_argument_of_another_dtype_of_the_gated_mlp_is_named():
    weights = [Q4_WEIGHT, Q4_WEIGHT, (zeros(64, 16), ops.no_scale())]
    with pytest.raises(jax.errors.JaxRuntimeError, match="x should be float32"):
        gated_mlp(np.zeros((2, 64), np.int8), ops.no_norm(), *weights, 16)


@pytest.mark.parametrize(
    ("first", "keys", "values", "named"),
    [
        (8, (1, 1, 8, 32), (1, 1, 8, 32), "row 0 holds 8 tokens and gets 1, capacity is 8"),
        (-1, (1, 1, 8, 32), (1, 1, 8, 32), "row 0 holds -1"),
        (0, (1, 1, 8, 16), (1, 1, 8, 16), "cached keys has shape"),
        (0, (1, 1, 8, 32), (1, 1, 9, 32), "cached values has shape"),
        (0, (1, 3, 8, 32), (1, 3, 8, 32), "cached keys has shape"),
    ],
)
def test_a_wrong_cache_is_named(first, keys, values, named):
    fresh = new_tokens(np.random.default_rng(15), 1, 1, 2, 1, 32)
    layer = LayerCache(zeros(*keys), zeros(*values))
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        attend(fresh, np.array([first], np.int32), layer)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({0: zeros(1, 1, 3, 32)}, "the number of heads should be a multiple of kv_heads"),
        ({2: zeros(1, 1, 2, 30)}, "values has shape"),
        ({3: ((ones(31), 1e-6), (ones(32), 1e-6))}, r"query_norm has shape \[31\]"),
        ({3: ((ones(32), 1e-6), (ones(31), 1e-6))}, r"key_norm has shape \[31\]"),
        ({4: (ones(1, 1, 15), ones(1, 1, 16))}, "cos has shape"),
        ({4: (ones(1, 1, 16), ones(1, 1, 15))}, "sin has shape"),
        ({0: np.zeros((1, 1, 4, 32), np.float16)}, "queries should be float32"),
        ({1: np.zeros((1, 1, 2, 32), np.float16)}, "keys should be float32"),
        ({2: np.zeros((1, 1, 2, 32), np.int8)}, "values should be float32"),
        ({3: ((np.ones(32, np.float16), 1e-6), (ones(32), 1e-6))}, "query_norm should be float32"),
        ({3: ((ones(32), 1e-6), (np.ones(32, np.float16), 1e-6))}, "key_norm should be float32"),
        ({4: (np.ones((1, 1, 16), np.float16), ones(1, 1, 16))}, "cos should be float32"),
        ({4: (ones(1, 1, 16), np.ones((1, 1, 16), np.float16))}, "sin should be float32"),
    ],
)
def test_a_wrong_argument_of_attention_is_named(changed, named):
    fresh = list(new_tokens(np.random.default_rng(16), 1, 1, 4, 2, 32))
    for index, value in changed.items():
        fresh[index] = value
    layer = LayerCache(zeros(1, 2, 8, 32), zeros(1, 2, 8, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        attend(fresh, np.array([0], np.int32), layer)


@pytest.mark.parametrize(
    ("first", "slots", "named"), [("f", "i", "first should be int32"), ("i", "f", "slots should be int32")]
)
def test_places_that_are_no_integers_are_named(first, slots, named):
    fresh = new_tokens(np.random.default_rng(17), 1, 1, 4, 2, 32)
    layer = LayerCache(zeros(1, 2, 8, 32), zeros(1, 2, 8, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        cached_attention(*fresh, np.zeros(1, slots + "4"), np.zeros(1, first + "4"), layer)


def test_a_slot_that_does_not_exist_is_named():
    fresh = new_tokens(np.random.default_rng(18), 2, 1, 4, 2, 32)
    layer = LayerCache(zeros(3, 2, 8, 32), zeros(3, 2, 8, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 1 wants slot 3 of 3"):
        attend(fresh, np.array([0, 0], np.int32), layer, [-1, 3])


def test_unwritten_arrays_have_their_shapes():
    shapes = jax.ShapeDtypeStruct((3, 5), np.int8), jax.ShapeDtypeStruct((7,), np.float32)
    for array, shape in zip(ops.unwritten(*shapes), shapes, strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
