"""Sums whose bits do not depend on how many rows are summed at once."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

MOST_LANES = 1024


def row_sums(values: Float[Array, "*batch size"]) -> Float[Array, "*batch"]:
    """The sum over the last axis in one order, whatever the other axes are: over stretches of values one after the
    other, then over halves of what is left. XLA's own sum over the last axis takes another order for another number of
    rows."""
    size = values.shape[-1]
    lanes = min(MOST_LANES, 1 << max(size - 1, 0).bit_length())
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -size % lanes)])
    sums = jnp.sum(padded.reshape(*values.shape[:-1], -1, lanes), axis=-2)
    while sums.shape[-1] > 1:
        first, second = jnp.split(sums, 2, axis=-1)
        sums = first + second
    return sums[..., 0]
