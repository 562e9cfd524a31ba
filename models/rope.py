"""Rotary position embedding: frequencies (plain and YaRN), interleaved MRoPE angles, and the rotation itself."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import RopeConfig, YarnConfig
from models.switches import Switches

Rotation = tuple[Float[Array, "batch length half_dim"], Float[Array, "batch length half_dim"]]  # cos and sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies float32 `[head_dim/2]`, and the factor that multiplies cos and sin (1 without YaRN)."""
    wavelengths = np.float32(rope.theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    plain = (1.0 / wavelengths).astype(np.float32)
    if rope.yarn is None:
        return plain, 1.0
    stretched = (1.0 / (rope.yarn.factor * wavelengths)).astype(np.float32)
    ramp = _yarn_ramp(rope.yarn, rope.theta, head_dim)
    return (stretched * ramp + plain * (1 - ramp)).astype(np.float32), _yarn_attention_factor(rope.yarn)


def _yarn_ramp(yarn: YarnConfig, theta: float, head_dim: int) -> np.ndarray:
    """0 where a frequency is kept, 1 where its positions are interpolated; float32 `[head_dim/2]`."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(yarn.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)


def _yarn_attention_factor(yarn: YarnConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0

    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.mscale) / mscale(yarn.mscale_all_dim)
    return mscale(1.0)


def axis_of_frequency(rope: RopeConfig, head_dim: int, switches: Switches) -> np.ndarray:
    """Which position axis (0 T, 1 H, 2 W) turns each frequency; int32 `[head_dim/2]`.

    Interleaved MRoPE (Qwen3-VL report): T H W T H W ... until the H and W sections are used up, then T alone.
    """
    axes = np.zeros(head_dim // 2, np.int32)
    if rope.mrope_section is None or switches.mrope == "1d":
        return axes
    if switches.mrope == "sectioned":
        return np.repeat(np.arange(3, dtype=np.int32), rope.mrope_section)
    for axis in (1, 2):
        axes[axis : 3 * rope.mrope_section[axis] : 3] = axis
    return axes


class RotaryTable:
    """Turns positions into the cos and sin that rotate queries and keys. Plain numbers, no parameters."""

    def __init__(self, rope: RopeConfig, head_dim: int, switches: Switches) -> None:
        if switches.rope_theta is not None:
            rope = replace(rope, theta=switches.rope_theta)
        self.frequencies, self.factor = inverse_frequencies(rope, head_dim)
        self.axes = axis_of_frequency(rope, head_dim, switches)

    def __call__(self, positions: Int[Array, "3 batch length"]) -> Rotation:
        """(cos, sin), float32 `[batch, length, head_dim/2]`."""
        by_axis = positions.astype(jnp.float32)[self.axes]  # [half_dim, batch, length]
        angles = jnp.moveaxis(by_axis, 0, -1) * jnp.asarray(self.frequencies)[None, None, :]
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    cos: Float[Array, "batch length half_dim"],
    sin: Float[Array, "batch length half_dim"],
) -> Float[Array, "batch length heads head_dim"]:
    """Rotates the pairs (j, j + head_dim/2) of every head ("rotate half")."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
