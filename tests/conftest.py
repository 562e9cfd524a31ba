"""Strict array semantics for every test: silent dtype or rank promotion is an error, and the networks' shape
annotations are checked as they run."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(
    [f"models.{name}" for name in ("attention", "layers", "moe", "rope", "vision")], "beartype.beartype"
)


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """XLA compiles in half the time what a test runs only now and then, and where roundings do not matter to it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """A run of benchmarks that is kept does not tell what its machine is called."""
    del machine_info["node"]
