"""The quantised weight formats `q4` and `q8`, and which part of a network gets which.

A weight matrix `[outputs, inputs]` is cut into groups of 32 neighbouring inputs; a group has one float16 scale, and its
values are whole multiples of it: -8..7 (q4) or -127..127 (q8). They are stored as kernels read them, 8 output rows at
once, a group after the other:

* `scale`: float16 `[blocks, groups, 8]`; `scale[b, g, r]` belongs to row `8b + r`.
* q8 `weight`: int8 `[blocks, groups, 256]`; byte `32k + 4r + i` (k 0..7, r 0..7, i 0..3) is row `8b + r` at input
  `32g + 4k + i`.
* q4 `weight`: uint8 `[blocks, groups, 128]`; byte `32j + 4r + i` (j 0..3, r 0..7, i 0..3) is row `8b + r`: its low
  nibble at input `32g + 8j + i`, its high nibble at input `32g + 8j + 4 + i`. A nibble n stands for n - 8.

`blocks` is outputs / 8 and `groups` is inputs / 32, both rounded up; what is added has value and scale 0. Stacked
experts `[experts, outputs, inputs]` have the same with a leading `experts` axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from models.errors import CheckpointError, ConfigError

GROUP = 32  # inputs that share a scale
ROWS = 8  # output rows of a block
SLICE_VALUES = 1 << 18  # values worked on at once: few enough to stay in a core's cache
SMALLEST_SCALE = np.float32(2**-24)  # float16's smallest subnormal
LARGEST_SCALE = np.float32(65504)  # float16's largest number

Format = Literal["q4", "q8"]


@dataclass(frozen=True)
class _Coding:
    """How a format stores a group: whole numbers `low`..`high`, `size` bytes of `dtype` for the 8 rows of a block.

    The scales that are tried are the group's extreme value (with its sign if `signed`) divided by `divisors`; the first
    ones are the plain choice, by which the extreme value becomes `high`. A divisor of -8 is Q4_0 of llama.cpp, +8 its
    mirror image; at -8.5 the extreme value loses half a step, as any other may, and all others get finer ones.
    """

    low: int
    high: int
    size: int
    dtype: type[np.generic]
    signed: bool
    divisors: tuple[float, ...]

    @property
    def reach(self) -> float:
        """How many steps from 0 a value may lie: half a step past the last whole number."""
        return 0.5 - self.low


CODINGS: dict[str, _Coding] = {
    "q4": _Coding(-8, 7, ROWS * GROUP // 2, np.uint8, True, (7.0, -7.0, -7.5, -8.0, 8.0, -8.5)),
    "q8": _Coding(-127, 127, ROWS * GROUP, np.int8, False, (127.0, 126.0, 125.0, 124.0)),
}


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix, or a stack of experts, as stored: see the module's beginning for `weight` and `scale`."""

    weight: np.ndarray
    scale: np.ndarray

    @property
    def format(self) -> Format:
        return "q4" if self.weight.dtype == np.uint8 else "q8"


def stored_shapes(shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of `weight` and `scale` for a matrix `[outputs, inputs]` or experts `[experts, outputs, inputs]`.

    Raises:
        ConfigError: another number of axes, or an unknown format.
    """
    if len(shape) not in (2, 3):
        raise ConfigError(f"only matrices and stacks of matrices can be quantised, found shape {tuple(shape)}")
    *experts, outputs, inputs = shape
    blocks, groups = -(-outputs // ROWS), -(-inputs // GROUP)
    return (*experts, blocks, groups, _coding(format).size), (*experts, blocks, groups, ROWS)


def quantise(matrix: np.ndarray, format: Format, name: str = "matrix") -> QuantisedMatrix:
    """Quantises a matrix `[outputs, inputs]` or experts `[experts, outputs, inputs]` of any float dtype.

    Each group gets, of a few scales around the one that fits its extreme value, the one with the least squared error;
    scales are rounded to float16 before values are rounded to them. Values beyond what the largest float16 scale
    reaches become the nearest number that can be stored.

    Raises:
        CheckpointError: a value is infinite or not a number; the message begins with `name`.
        ConfigError: another number of axes, or an unknown format.
    """
    weight_shape, scale_shape = stored_shapes(matrix.shape, format)
    coding = _coding(format)
    weight, scale = np.empty(weight_shape, coding.dtype), np.empty(scale_shape, np.float16)
    height = max(1, SLICE_VALUES // (ROWS * GROUP * max(1, scale_shape[-2])))  # in blocks
    for expert in np.ndindex(matrix.shape[:-2]):
        for block in range(0, scale_shape[-3], height):
            blocks = slice(block, block + height)
            groups = _by_group(matrix[expert][block * ROWS : (block + height) * ROWS])
            integers, scale[(*expert, blocks)] = _quantise_groups(groups, coding, name)
            weight[(*expert, blocks)] = _pack(integers, format)
    return QuantisedMatrix(weight, scale)


def dequantise(matrix: QuantisedMatrix, outputs: int, inputs: int) -> np.ndarray:
    """The float32 values `[outputs, inputs]`, or `[experts, outputs, inputs]`, that the stored numbers stand for.

    Raises:
        ConfigError: the stored shapes are not those of such a matrix.
    """
    experts = matrix.weight.shape[:-3]
    expected = stored_shapes((*experts, outputs, inputs), matrix.format)
    if (matrix.weight.shape, matrix.scale.shape) != expected:
        raise ConfigError(
            f"a {matrix.format} matrix of {outputs} x {inputs} has weight and scale of shape {expected[0]} and "
            f"{expected[1]}, found {matrix.weight.shape} and {matrix.scale.shape}"
        )
    integers = _unpack(matrix.weight, matrix.format)
    scale = np.moveaxis(matrix.scale.astype(np.float32), -1, -2)  # [..., blocks, rows, groups]
    values = integers.astype(np.float32) * scale[..., None]
    blocks, groups = scale.shape[-3], scale.shape[-1]
    return values.reshape(*experts, blocks * ROWS, groups * GROUP)[..., :outputs, :inputs]


def require_finite(values: np.ndarray, name: str) -> None:
    """Raises CheckpointError, with a message that begins with `name`, if a value is infinite or not a number."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} holds values that are infinite or not a number; such weights cannot be used")


def _coding(format: str) -> _Coding:
    if format not in CODINGS:
        raise ConfigError(f"the weight format must be one of {', '.join(CODINGS)}, found {format!r}")
    return CODINGS[format]


def _by_group(rows: np.ndarray) -> np.ndarray:
    """Float32 `[32, blocks, 8, groups]` of rows `[outputs, inputs]`, padded with zeros.

    The values of a group lie along the first axis, so that numpy works on many groups at once.
    """
    outputs, inputs = rows.shape
    blocks, groups = -(-outputs // ROWS), -(-inputs // GROUP)
    padded = np.zeros((blocks * ROWS, groups * GROUP), np.float32)
    padded[:outputs, :inputs] = rows
    return np.ascontiguousarray(padded.reshape(blocks, ROWS, groups, GROUP).transpose(3, 0, 1, 2))


def _quantise_groups(values: np.ndarray, coding: _Coding, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers `[32, blocks, 8, groups]`, as float32, and their float16 scales `[blocks, groups, 8]`."""
    highest, lowest = values.max(axis=0), values.min(axis=0)
    for bound in (highest, lowest):  # infinite or NaN if any value is
        require_finite(bound, name)
    extreme = np.where(highest >= -lowest, highest, lowest)
    if not coding.signed:
        extreme = np.abs(extreme)
    largest = -coding.low * LARGEST_SCALE
    if np.abs(extreme).max() > largest:
        np.clip(values, -largest, largest, out=values)
    scale = _best_scale(values, extreme, coding)
    integers = _round(values, scale, coding, np.empty_like(values))
    scale[extreme == 0] = 0
    return integers, scale.astype(np.float16).swapaxes(1, 2)


def _best_scale(values: np.ndarray, extreme: np.ndarray, coding: _Coding) -> np.ndarray:
    """Of the scales that are tried, each group's one with the least squared error; the earlier one of equals."""
    best = _scale(extreme, coding.divisors[0], coding)
    integers = np.empty_like(values)
    least = _squared_error(values, best, coding, integers)
    for divisor in coding.divisors[1:]:
        scale = _scale(extreme, divisor, coding)
        error = _squared_error(values, scale, coding, integers)
        better = error < least
        np.copyto(least, error, where=better)
        np.copyto(best, scale, where=better)
    return best


def _scale(extreme: np.ndarray, divisor: float, coding: _Coding) -> np.ndarray:
    """`extreme` / `divisor` as a number that float16 has, never 0, and large enough for the extreme value.

    Float16's steps are coarse below 2**-14: there, rounding down could cut the extreme value off.
    """
    exact = extreme / np.float32(divisor)
    rounded = np.clip(np.abs(exact), SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16)
    short = rounded.astype(np.float32) * np.float32(coding.reach) < np.abs(extreme)
    enough = np.where(short, np.nextafter(rounded, np.float16(LARGEST_SCALE)), rounded)
    return np.copysign(enough.astype(np.float32), exact)


def _squared_error(values: np.ndarray, scale: np.ndarray, coding: _Coding, work: np.ndarray) -> np.ndarray:
    """Each group's sum of squared errors `[blocks, 8, groups]`; `work` is overwritten."""
    _round(values, scale, coding, work)
    work *= scale
    work -= values
    work *= work
    return work.sum(axis=0)


def _round(values: np.ndarray, scale: np.ndarray, coding: _Coding, out: np.ndarray) -> np.ndarray:
    """The whole numbers `low`..`high` that are nearest to values / scale."""
    np.divide(values, scale, out=out)
    np.rint(out, out=out)
    return np.clip(out, coding.low, coding.high, out=out)


def _pack(integers: np.ndarray, format: Format) -> np.ndarray:
    """Bytes `[blocks, groups, size]` of whole numbers `[32, blocks, 8, groups]`."""
    _, blocks, rows, groups = integers.shape
    if format == "q8":
        quads = integers.astype(np.int8).reshape(8, 4, blocks, rows, groups)
    else:
        nibbles = (integers + 8).astype(np.uint8).reshape(4, 2, 4, blocks, rows, groups)
        quads = nibbles[:, 0] | nibbles[:, 1] << 4
    return quads.transpose(2, 4, 0, 3, 1).reshape(blocks, groups, -1)


def _unpack(weight: np.ndarray, format: Format) -> np.ndarray:
    """Whole numbers `[..., blocks, 8, groups, 32]`, int8, of bytes `[..., blocks, groups, size]`."""
    *lead, groups, _ = weight.shape
    if format == "q8":
        quads = weight.reshape(-1, groups, 8, ROWS, 4).transpose(0, 3, 1, 2, 4)
    else:
        pairs = weight.reshape(-1, groups, 4, ROWS, 4).transpose(0, 3, 1, 2, 4)
        quads = np.stack([pairs & 15, pairs >> 4], axis=-2).astype(np.int8) - np.int8(8)
    return quads.reshape(*lead, ROWS, groups, GROUP)


DECODER_MATRICES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
VISION_MATRICES = frozenset({"qkv", "proj", "linear_fc1", "linear_fc2"})
VOCABULARY_MATRICES = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True)
class Scheme:
    """Which format the parts of a network get: `decoder` its attention, MLPs and experts; `vocabulary` the embeddings
    and the head; `vision` the matrices of the vision tower's blocks and mergers. Routers, norms, biases, the vision
    tower's patch embedding and its position table are never quantised."""

    name: str
    decoder: Format
    vocabulary: Format
    vision: Format

    def format_of(self, path: str) -> Format | None:
        """The format of the parameter at a dotted path of the network, such as `layers.0.self_attn.q_proj.weight`;
        None if it stays float32."""
        *_, owner, last = path.split(".")
        if owner == "experts":
            return self.decoder
        if last != "weight":
            return None
        if path.startswith("visual."):
            return self.vision if owner in VISION_MATRICES else None
        if owner in VOCABULARY_MATRICES:
            return self.vocabulary
        return self.decoder if owner in DECODER_MATRICES else None

    def config_entry(self) -> dict[str, Any]:
        """What `config.json` says of it, under `quantization_config`."""
        return {"quant_method": "kestrel", "scheme": self.name, "group_size": GROUP, "rows": ROWS}


# The vision tower is q8 in all of them, as in the original engine.
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("q4", decoder="q4", vocabulary="q4", vision="q8"),
        Scheme("q4-head-q8", decoder="q4", vocabulary="q8", vision="q8"),
        Scheme("q8", decoder="q8", vocabulary="q8", vision="q8"),
    )
}


def find_scheme(name: str) -> Scheme:
    """The scheme of this name; ConfigError, which lists them, if there is none."""
    if name not in SCHEMES:
        raise ConfigError(f"quant must be one of {', '.join(SCHEMES)}, found {name!r}")
    return SCHEMES[name]


def scale_name(name: str) -> str:
    """The tensor that holds the scales of the weight tensor `name`: `P.scale` for `P.weight`, and
    `P.gate_up_proj_scale` for the experts' `P.gate_up_proj`."""
    return f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else f"{name}_scale"


def weight_name(scale: str) -> str:
    """The weight tensor whose scales the tensor `scale` holds: the inverse of `scale_name`."""
    return f"{scale.removesuffix('scale')}weight" if scale.endswith(".scale") else scale.removesuffix("_scale")
