"""The quantised formats: every byte's place, the error of every value, and what is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.parity import CASES
from models.checkpoint import Checkpoint
from models.config import parse_config
from models.errors import CheckpointError, ConfigError
from models.network import Network
from models.presets import PRESETS
from models.quantisation import (
    SCHEMES,
    QuantisedMatrix,
    dequantise,
    find_scheme,
    quantise,
    scale_name,
    stored_shapes,
    weight_name,
)
from models.switches import Switches

FORMATS = ("q4", "q8")
SHAPES = [(8, 32), (16, 96), (1, 1), (7, 31), (9, 33), (24, 50), (13, 64)]


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def read_slowly(stored: QuantisedMatrix, outputs: int, inputs: int) -> np.ndarray:
    """The value of every row and input, found as the format's definition says, one at a time."""
    found = np.empty((outputs, inputs), np.float32)
    for row in range(outputs):
        for column in range(inputs):
            block, r = divmod(row, 8)
            group, place = divmod(column, 32)
            if stored.weight.dtype == np.int8:
                whole = int(stored.weight[block, group, place // 4 * 32 + r * 4 + place % 4])
            else:
                byte = int(stored.weight[block, group, place // 8 * 32 + r * 4 + place % 4])
                whole = (byte >> 4 if place % 8 >= 4 else byte & 15) - 8
            found[row, column] = whole * np.float32(stored.scale[block, group, r])
    return found


def scales_of(stored: QuantisedMatrix, outputs: int, inputs: int) -> np.ndarray:
    """The scale of every value, `[outputs, inputs]`."""
    by_row = stored.scale.astype(np.float32).swapaxes(1, 2).reshape(-1, stored.scale.shape[1])
    return np.repeat(by_row, 32, axis=1)[:outputs, :inputs]


def least_plain_error(matrix: np.ndarray, format: str) -> np.ndarray:
    """Squared error `[outputs, groups]` of the usual choice, scale = largest magnitude / largest whole number."""
    groups = matrix.reshape(matrix.shape[0], -1, 32).astype(np.float64)
    low, high = (-8, 7) if format == "q4" else (-127, 127)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / high).astype(np.float16).astype(np.float64)
    return np.square(np.clip(np.rint(groups / scale), low, high) * scale - groups).sum(axis=-1)


def squared_error(matrix: np.ndarray, stored: QuantisedMatrix) -> np.ndarray:
    """Squared error `[outputs, groups]`."""
    error = dequantise(stored, *matrix.shape).astype(np.float64) - matrix
    return np.square(error).reshape(matrix.shape[0], -1, 32).sum(axis=-1)


def assert_close(matrix: np.ndarray, stored: QuantisedMatrix) -> None:
    """Every value within half a step, except those that q4's ends cut off; their nearest number is the end."""
    found, scale = dequantise(stored, *matrix.shape), scales_of(stored, *matrix.shape)
    assert np.isfinite(found).all()
    steps = np.divide(matrix, scale, out=np.zeros_like(matrix), where=scale != 0)
    cut_off = (steps < -8.5) | (steps > 7.5) if stored.format == "q4" else np.zeros(matrix.shape, bool)
    half = np.where(scale == 0, 0, np.abs(scale) * np.float32(0.5 + 1e-5))
    assert (np.abs(found - matrix) <= half)[~cut_off].all()
    np.testing.assert_array_equal(found[cut_off], (np.where(steps < 0, -8, 7) * scale)[cut_off])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_is_where_the_format_says(format, shape):
    matrix = normal(shape)
    stored = quantise(matrix, format)
    assert (stored.weight.shape, stored.scale.shape) == stored_shapes(shape, format)
    assert stored.weight.flags.c_contiguous
    assert stored.scale.flags.c_contiguous
    assert stored.format == format
    slow = read_slowly(stored, *shape)
    np.testing.assert_array_equal(dequantise(stored, *shape), slow)
    step = scales_of(stored, *shape)
    assert (np.abs(slow - matrix) <= np.abs(step) * (0.501 if format == "q8" else 1.01)).all()


def test_stored_shapes():
    assert stored_shapes((17, 33), "q4") == ((3, 2, 128), (3, 2, 8))
    assert stored_shapes((5, 16, 32), "q8") == ((5, 2, 1, 256), (5, 2, 1, 8))


def test_stored_types():
    types = {format: quantise(normal((8, 32)), format) for format in FORMATS}
    assert {format: (stored.weight.dtype, stored.scale.dtype) for format, stored in types.items()} == {
        "q4": (np.uint8, np.float16),
        "q8": (np.int8, np.float16),
    }


def test_known_bytes():
    """One row by hand: 0, 1, .., 7 and -8 in steps of 0.5."""
    row = np.zeros((1, 32), np.float32)
    row[0, :9] = 0.5 * np.array([0, 1, 2, 3, 4, 5, 6, 7, -8])
    stored = quantise(row, "q4")
    assert stored.scale[0, 0, 0] == 0.5
    assert stored.weight[0, 0, :4].tolist() == [0xC8, 0xD9, 0xEA, 0xFB]
    assert stored.weight[0, 0, 32:36].tolist() == [0x80, 0x88, 0x88, 0x88]
    stored = quantise(np.where(np.arange(32) == 5, -127.0, np.arange(32)).astype(np.float32)[None], "q8")
    assert stored.weight[0, 0, [0, 1, 2, 3, 32, 33, 34, 7 * 32 + 3]].tolist() == [0, 1, 2, 3, 4, -127, 6, 31]


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_zero(format):
    """Added rows have scale 0, added inputs the whole number 0."""
    stored = quantise(normal((9, 33)), format)
    assert (stored.scale[1, :, 1:] == 0).all()
    assert (stored.scale[1, :, 0] != 0).all()
    whole = quantise(np.ones((16, 64), np.float32), format)
    whole = QuantisedMatrix(stored.weight, np.ones_like(whole.scale))
    values = dequantise(whole, 16, 64)
    assert (values[9:] == 0).all()
    assert (values[:, 33:] == 0).all()


def test_no_byte_is_minus_128():
    stored = quantise(np.concatenate([normal((64, 64)), -np.ones((8, 64), np.float32)]), "q8")
    assert stored.weight.min() == -127


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_quantised_one_by_one(format):
    experts = normal((3, 12, 40))
    stored = quantise(experts, format)
    assert (stored.weight.shape, stored.scale.shape) == stored_shapes(experts.shape, format)
    for index, expert in enumerate(experts):
        single = quantise(expert, format)
        np.testing.assert_array_equal(stored.weight[index], single.weight)
        np.testing.assert_array_equal(stored.scale[index], single.scale)
    np.testing.assert_array_equal(
        dequantise(stored, 12, 40), np.stack([dequantise(quantise(expert, format), 12, 40) for expert in experts])
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_matrix_larger_than_a_slice(format):
    """Rows are worked on in slices; no row notices."""
    matrix = normal((1203, 500))
    stored = quantise(matrix, format)
    for rows in (slice(0, 8), slice(520, 528), slice(1200, 1203)):
        alone = quantise(matrix[rows], format)
        blocks = slice(rows.start // 8, rows.start // 8 + 1)
        np.testing.assert_array_equal(stored.weight[blocks], alone.weight)
        np.testing.assert_array_equal(stored.scale[blocks], alone.scale)
    assert_close(matrix, stored)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_types_are_widened(dtype):
    matrix = normal((9, 40)).astype(dtype)
    stored, expected = quantise(matrix, "q4"), quantise(matrix.astype(np.float32), "q4")
    np.testing.assert_array_equal(stored.weight, expected.weight)
    np.testing.assert_array_equal(stored.scale, expected.scale)


@pytest.mark.parametrize("format", FORMATS)
def test_a_transposed_view(format):
    matrix = normal((40, 24))
    np.testing.assert_array_equal(quantise(matrix.T, format).weight, quantise(matrix.T.copy(), format).weight)


@pytest.mark.parametrize("format", FORMATS)
@settings(derandomize=True, max_examples=200, deadline=None)
@given(outputs=st.integers(1, 20), inputs=st.integers(1, 80), seed=st.integers(0, 1 << 20), size=st.integers(-20, 17))
def test_error_bound(format, outputs, inputs, seed, size):
    """For weights of any size, also where scales are subnormal float16."""
    matrix = normal((outputs, inputs), seed, 2.0**size)
    assert_close(matrix, quantise(matrix, format))


@pytest.mark.parametrize("format", FORMATS)
@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    group=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65536, max_value=65536),
        min_size=1,
        max_size=32,
    )
)
def test_error_bound_of_odd_groups(format, group):
    matrix = np.array([group], np.float32)
    assert_close(matrix, quantise(matrix, format))


@pytest.mark.parametrize("format", FORMATS)
@settings(derandomize=True, max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 20), shape=st.sampled_from(["normal", "heavy", "flat", "few", "one-sided"]))
def test_no_worse_than_plain_rounding(format, seed, shape):
    random = np.random.default_rng(seed)
    matrix = {
        "normal": lambda: random.standard_normal((8, 64)),
        "heavy": lambda: random.standard_t(2, (8, 64)),
        "flat": lambda: random.uniform(-1, 1, (8, 64)),
        "few": lambda: random.choice([-1.0, 0.0, 0.5, 1.0], (8, 64)),
        "one-sided": lambda: np.abs(random.standard_normal((8, 64))),
    }[shape]().astype(np.float32)
    matrix[:, ::32] += np.float32(0.01)  # no group of zeros
    plain = least_plain_error(matrix, format)
    assert (squared_error(matrix, quantise(matrix, format)) <= plain * 1.0001 + 1e-9).all()


def test_better_than_plain_rounding():
    """How much the search is worth for the usual weights, and that q4 beats llama.cpp's Q4_0."""
    matrix = normal((64, 1024))
    plain = {format: least_plain_error(matrix, format).sum() for format in FORMATS}
    found = {format: squared_error(matrix, quantise(matrix, format)).sum() for format in FORMATS}
    groups = matrix.reshape(64, -1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    step = (extreme / -8).astype(np.float16).astype(np.float32)
    q4_0 = np.square(np.clip(np.rint(groups / step), -8, 7) * step - groups).sum()
    assert found["q4"] < 0.73 * plain["q4"]
    assert found["q4"] < 0.94 * q4_0
    assert found["q8"] < 0.88 * plain["q8"]


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros(format):
    matrix = normal((8, 96))
    matrix[3, 32:64] = 0
    matrix[4, 32:64] = -0.0
    stored = quantise(matrix, format)
    assert stored.scale[0, 1, 3] == stored.scale[0, 1, 4] == 0
    assert (stored.scale[0, 1, :3] != 0).all()
    found = dequantise(stored, 8, 96)
    assert (found[3:5, 32:64] == 0).all()
    assert (dequantise(quantise(np.zeros((8, 32), np.float32), format), 8, 32) == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1e-45, 1e-30, 2.0**-26, 2.0**-24, 1e-6, 1e-5])
def test_tiny_groups(format, size):
    """No scale falls below float16's smallest subnormal, however small the weights; the smallest ones become 0."""
    matrix = normal((8, 32)).clip(-1, 1) * np.float32(size)
    stored = quantise(matrix, format)
    assert stored.scale.dtype == np.float16
    assert (np.abs(stored.scale.astype(np.float32)) >= np.float32(2.0**-24)).all()
    assert_close(matrix, stored)
    assert (dequantise(stored, 8, 32) == 0).all() == (size < 2.0**-25)


@pytest.mark.parametrize("format", FORMATS)
def test_huge_groups_become_the_largest_numbers(format):
    """Beyond the largest float16 scale a value is cut off; which end of q4 does not matter to the sign."""
    matrix = np.zeros((4, 32), np.float32)
    matrix[0, 0], matrix[1, 0], matrix[2, :2], matrix[3, 0] = 3.4e38, -3.4e38, (1e9, -1e9), 4e5
    stored = quantise(matrix, format)
    assert np.isfinite(stored.scale).all()
    found = dequantise(stored, 4, 32)
    largest = 65504.0 * (8 if format == "q4" else 127)
    assert found[0, 0] == largest
    assert found[1, 0] == -largest
    assert sorted(abs(found[2, :2])) == [65504 * 7 if format == "q4" else largest, largest]
    assert np.sign(found[2, :2]).tolist() == [1, -1]
    assert found[3, 0] == pytest.approx(4e5, rel=1e-3)
    assert (found[:, 2:] == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(format, value):
    matrix = normal((600, 520))
    matrix[577, 3] = value
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: 'x' holds values that are infinite or not a num"):
        quantise(matrix, format, "model.safetensors: 'x'")


def test_unknown_format_and_wrong_shapes():
    with pytest.raises(ConfigError, match=r"q4, q8, found 'q5'"):
        quantise(normal((8, 32)), "q5")
    with pytest.raises(ConfigError, match=r"shape \(8,\)"):
        quantise(normal((8,)), "q4")
    with pytest.raises(ConfigError, match=r"9 x 32 .*\(2, 1, 128\).*found \(1, 1, 128\)"):
        dequantise(quantise(normal((8, 32)), "q4"), 9, 32)


def paths_of(values: dict) -> dict[str, tuple[int, ...]]:
    """Path -> shape of the parameters of a network."""
    state = nnx.split(Network(parse_config(values), Switches()))[1]
    return {".".join(map(str, path)): value.get_value().shape for path, value in nnx.to_flat_state(state)}


@pytest.mark.parametrize("case", ["dense_attention_bias", "moe_mixed", "vl_moe"])
def test_parts_of_a_network(case):
    """Every matrix has a format except the three kinds that never have one; nothing else has."""
    paths = paths_of(Checkpoint.open(CASES / case).config)
    floats = [path for path in paths if find_scheme("q4").format_of(path) is None]
    for path, shape in paths.items():
        excepted = path.endswith("mlp.gate.weight") or path in ("visual.pos_embed.weight", "visual.patch_embed.weight")
        assert (path in floats) == (len(shape) == 1 or excepted), path
    assert any(path.endswith("mlp.gate.weight") for path in floats) == (case != "dense_attention_bias")
    assert ("visual.pos_embed.weight" in floats) == ("visual.patch_embed.weight" in floats) == (case == "vl_moe")


@pytest.mark.parametrize(
    ("path", "formats"),
    [
        ("layers.0.self_attn.q_proj.weight", ("q4", "q4", "q8")),
        ("layers.11.mlp.down_proj.weight", ("q4", "q4", "q8")),
        ("layers.0.mlp.experts.gate_up_proj", ("q4", "q4", "q8")),
        ("layers.0.mlp.experts.down_proj", ("q4", "q4", "q8")),
        ("embed_tokens.weight", ("q4", "q8", "q8")),
        ("lm_head.weight", ("q4", "q8", "q8")),
        ("visual.blocks.0.attn.qkv.weight", ("q8", "q8", "q8")),
        ("visual.blocks.0.mlp.linear_fc2.weight", ("q8", "q8", "q8")),
        ("visual.merger.linear_fc1.weight", ("q8", "q8", "q8")),
        ("visual.deepstack_merger_list.2.linear_fc2.weight", ("q8", "q8", "q8")),
        ("layers.0.self_attn.q_proj.bias", (None, None, None)),
        ("layers.0.self_attn.q_norm.weight", (None, None, None)),
        ("norm.weight", (None, None, None)),
        ("visual.merger.norm.weight", (None, None, None)),
    ],
)
def test_schemes(path, formats):
    assert tuple(scheme.format_of(path) for scheme in SCHEMES.values()) == formats
    assert tuple(SCHEMES) == ("q4", "q4-head-q8", "q8")


def test_config_entry():
    assert find_scheme("q4-head-q8").config_entry() == {
        "quant_method": "kestrel",
        "scheme": "q4-head-q8",
        "group_size": 32,
        "rows": 8,
    }


def test_unknown_scheme():
    with pytest.raises(ConfigError, match=r"q4, q4-head-q8, q8, found 'int4'"):
        find_scheme("int4")


def test_scale_names():
    assert scale_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.scale"
    assert scale_name("model.layers.0.mlp.experts.down_proj") == "model.layers.0.mlp.experts.down_proj_scale"
    for weight in ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.experts.gate_up_proj"):
        assert weight_name(scale_name(weight)) == weight


def test_a_published_shape_is_stored_in_about_four_and_a_half_bits():
    shapes = paths_of(PRESETS["qwen3-vl-2b"])
    scheme, size = find_scheme("q4"), 0
    for path, shape in shapes.items():
        format = scheme.format_of(path)
        if format is None:
            size += 4 * math.prod(shape)
        else:
            weight, scale = stored_shapes(shape, format)
            size += math.prod(weight) + 2 * math.prod(scale)
    assert 4.5 < 8 * size / sum(map(math.prod, shapes.values())) < 5.5
