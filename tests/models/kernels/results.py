"""What the kernels and their references give, in numpy.

XLA takes half a second to compile a reference, and ten under emulation. With `KESTREL_EXPECTED=FOLDER` a reference's
result is read from FOLDER, or computed and put there if it is missing, so that one machine can compute what another
one's kernels should give (tests/aarch64). A result's name is a digest of all arguments: one for slightly different
numbers is computed anew. FOLDER serves one version of the references.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

FOLDER = "KESTREL_EXPECTED"
# A reference runs once per shape, in far less time than XLA would take to optimise it.
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with numpy arrays as results: with JAX arrays every operation of a test would be compiled, again for
    each shape, which takes longer than the kernel does."""
    return lambda *arguments: jax.tree.map(np.asarray, function(*arguments))


def expected_from(reference: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """The reference, compiled once per shape, with numpy arrays as results; they are kept if `KESTREL_EXPECTED` says
    where. Arguments at the positions `static` are constants of the compiled function."""
    compiled = in_numpy(jax.jit(reference, static_argnums=static, compiler_options=UNOPTIMISED))

    def expected(*arguments: Any) -> Any:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return compiled(*arguments)
        file = Path(folder) / f"{reference.__name__}-{digest(arguments)}.pickle"
        if not file.is_file():
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(compiled(*arguments)))
            partial.replace(file)
        return pickle.loads(file.read_bytes())

    return expected


def digest(arguments: tuple[Any, ...]) -> str:
    """A digest of the arguments' structure, dtypes, shapes and bytes."""
    leaves, structure = jax.tree.flatten(arguments)
    found = hashlib.sha256(str(structure).encode())
    for array in map(np.asarray, leaves):
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()
