"""Random weights and activations for the kernel tests, in numpy.

They are the same on every machine: what is not whole numbers is computed in float64, so that the last bits of a
machine's libraries do not matter, and then rounded.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from models.cache import LayerCache
from models.kernels.ops import no_scale
from models.kernels.reference import BLOCK, GROUP

FORMATS = ("q4", "q8", "float32", "bfloat16")


def random_weight(random: np.random.Generator, format: str, outputs: int, inputs: int, stack: tuple[int, ...] = ()):
    """A stored weight and its scale; quantised ones with every value that the format has."""
    if format in ("float32", "bfloat16"):
        return random.standard_normal((*stack, outputs, inputs)).astype(jnp.dtype(format)), no_scale()
    blocks, groups = -(-outputs // BLOCK), -(-inputs // GROUP)
    shape = (*stack, blocks, groups)
    scale = random.uniform(0.001, 0.1, (*shape, BLOCK)).astype(np.float16)
    if format == "q4":
        return random.integers(0, 256, (*shape, 128), np.uint8), scale
    return random.integers(-127, 128, (*shape, 256), np.int8), scale


def random_rows(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Activations of very different sizes."""
    return (random.standard_normal(shape) * np.exp(random.standard_normal((*shape[:-1], 1)))).astype(np.float32)


def random_cache(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> LayerCache:
    """Keys and values `[batch, kv_heads, capacity, head_dim]` of a layer and, for int8, their scales."""
    if dtype == "int8":
        numbers = [random.integers(-127, 128, shape, np.int8) for _ in range(2)]
        scales = [random.uniform(0.005, 0.02, shape[:-1]).astype(np.float32) for _ in range(2)]
        return LayerCache(*numbers, tuple(scales))
    return LayerCache(*(random.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(2)))


def new_tokens(
    random: np.random.Generator, batch: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Any, ...]:
    """Queries, keys, values, norms and rotation of new tokens."""
    queries, keys, values = (
        random_rows(random, batch, length, count, head_dim) for count in (heads, kv_heads, kv_heads)
    )
    norms = tuple((random.uniform(0.5, 2, head_dim).astype(np.float32), 1e-6) for _ in range(2))
    angles = random.uniform(-3, 3, (batch, length, head_dim // 2))
    rotation = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    return queries, keys, values, norms, rotation
