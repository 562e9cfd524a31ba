"""Rotary frequencies and the axis that turns each of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeConfig, YarnConfig
from models.rope import RotaryTable, axis_of_frequency, inverse_frequencies, rotate
from models.switches import Switches

PUBLISHED = RopeConfig(theta=5e6, yarn=None, mrope_section=(24, 20, 20))


def test_published_axes_are_thw_interleaved_with_t_at_the_end():
    axes = axis_of_frequency(PUBLISHED, 128, Switches())
    assert axes[:9].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert axes[57:].tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert np.bincount(axes).tolist() == [24, 20, 20]


def test_switched_axes():
    assert axis_of_frequency(PUBLISHED, 128, Switches(mrope="1d")).tolist() == [0] * 64
    assert axis_of_frequency(PUBLISHED, 128, Switches(mrope="sectioned")).tolist() == [0] * 24 + [1] * 20 + [2] * 20


def test_frequencies_fall_from_one_to_the_base():
    frequencies, factor = inverse_frequencies(PUBLISHED, 128)
    assert factor == 1.0
    np.testing.assert_allclose(frequencies, 5e6 ** (-np.arange(64) / 64), rtol=1e-6)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones():
    yarn = YarnConfig(4.0, 32768, 32.0, 1.0, None, None, None, True)
    frequencies, factor = inverse_frequencies(RopeConfig(1e6, yarn, None), 128)
    plain, _ = inverse_frequencies(RopeConfig(1e6, None, None), 128)
    ratio = plain / frequencies
    np.testing.assert_allclose(ratio[:20], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[-16:], 4.0, rtol=1e-6)
    assert (np.diff(ratio) > -1e-6).all()
    assert factor == pytest.approx(0.1 * np.log(4.0) + 1)


def test_rotation_keeps_length_and_depends_on_distance_only():
    table = RotaryTable(RopeConfig(1e4, None, None), 8, Switches())
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 1, 8)), jnp.float32)
    x = jnp.broadcast_to(x[:, :1], x.shape)
    positions = jnp.broadcast_to(jnp.array([0, 3, 10, 13], jnp.int32), (3, 1, 4))
    rotated = rotate(x, *table(positions))[0, :, 0]
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x[0, 0, 0]), rtol=1e-6)
    assert rotated[0] @ rotated[1] == pytest.approx(float(rotated[2] @ rotated[3]), rel=1e-5)
