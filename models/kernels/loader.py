"""Loads the compiled kernels and registers them with XLA, once per process.

`KESTREL_KERNELS` chooses: `auto` (the default: the compiled library with the best variant this CPU runs), a variant's
name (`portable`, `avx2`, ...), or `reference` (plain JAX).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import warnings
from pathlib import Path

import jax

from models.errors import KernelError
from models.kernels.build import build

TARGETS = (
    "kestrel_matmul",
    "kestrel_gated_mlp",
    "kestrel_choose_experts",
    "kestrel_experts",
    "kestrel_attention",
    "kestrel_unwritten",
    "kestrel_sample",
)
VERSION = 4
CHOICE = "KESTREL_KERNELS"


@functools.cache
def active_variant() -> str | None:
    """The variant in use, or None where plain JAX has to do: because it was asked for, or, with a warning, because the
    library cannot be built or loaded.

    Raises:
        KernelError: `KESTREL_KERNELS` names a variant that this machine cannot run.
    """
    choice = os.environ.get(CHOICE, "auto")
    if choice == "reference":
        return None
    try:
        library = _load()
    except (KernelError, OSError) as error:
        if choice != "auto":
            raise KernelError(f"{CHOICE}={choice}: {error}") from error
        warnings.warn(f"plain JAX takes the place of the compiled kernels, which is slow: {error}", stacklevel=2)
        return None
    variants = library.kestrel_variants().decode().split()
    variant = variants[0] if choice == "auto" else choice
    if not library.kestrel_choose(variant.encode()):
        raise KernelError(f"{CHOICE} should be auto, reference, {' or '.join(variants)} on this CPU, found {choice!r}")
    return variant


@functools.cache
def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_file()))
    library.kestrel_variants.restype = ctypes.c_char_p
    if library.kestrel_version() != VERSION:
        raise KernelError(f"the kernels have version {library.kestrel_version()}, wanted is {VERSION}")
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return library


@functools.cache
def _file() -> Path:
    return Path(build())


@functools.cache
def library_hash() -> str:
    """What tells the compiled kernels in use from those of other sources, flags or compilers."""
    return hashlib.sha256(_file().read_bytes()).hexdigest()


def choose_variant(name: str) -> None:
    """Switches the compiled kernels to another variant, between calls: for tests.

    Raises:
        KernelError: this CPU cannot run it.
    """
    if not _load().kestrel_choose(name.encode()):
        raise KernelError(f"this CPU cannot run the variant {name!r}")


def runnable_variants() -> list[str]:
    """The variants this CPU can run, best first."""
    return _load().kestrel_variants().decode().split()
