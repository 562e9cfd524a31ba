"""Compiled steps: one executable per bucket of shapes, kept here and in a cache on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax


def cache_folder() -> Path:
    """Where this project keeps what it can make again: `$XDG_CACHE_HOME/kestrel-jax`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kestrel-jax"


def enable_persistent_cache() -> None:
    """Keeps XLA's executables on disk, unless JAX_COMPILATION_CACHE_DIR or the program has already said where."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompiledStep:
    """A function compiled ahead of time for each bucket of argument shapes.

    Unlike `jax.jit` it never compiles silently for shapes that slipped through: a call names its bucket, and arguments
    that do not fit the bucket's executable are an error.
    """

    def __init__(
        self, function: Callable[..., Any], donate: tuple[int, ...] = (), static: tuple[int, ...] = ()
    ) -> None:
        self._jitted = jax.jit(function, donate_argnums=donate, static_argnums=static)
        self._static = frozenset(static)
        self._executables: dict[Hashable, jax.stages.Compiled] = {}

    def compile(self, bucket: Hashable, *arguments: Any) -> None:
        """Makes the executable of `bucket`; arguments may be arrays or `jax.ShapeDtypeStruct`."""
        if bucket not in self._executables:
            self._executables[bucket] = self._jitted.lower(*arguments).compile()

    def __call__(self, bucket: Hashable, *arguments: Any) -> Any:
        self.compile(bucket, *arguments)
        dynamic = (argument for index, argument in enumerate(arguments) if index not in self._static)
        return self._executables[bucket](*dynamic)

    def text(self, bucket: Hashable) -> str:
        """XLA's text of the executable of `bucket`, which must have been made."""
        return self._executables[bucket].as_text()
