"""Strict array semantics for every test: silent dtype or rank promotion is an error, and the networks' shape
annotations are checked as they run."""

from typing import Any

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(
    [f"models.{name}" for name in ("attention", "layers", "moe", "rope", "vision")], "beartype.beartype"
)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """A run of benchmarks that is kept does not tell what its machine is called."""
    del machine_info["node"]
