"""Compiles the kernels for the machine at hand.

The library is kept under a name made of its sources, flags, compiler and JAX's headers, so that nothing is compiled
twice and nothing stale is ever loaded. One library holds every instruction-set variant of its architecture.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.ffi

from models.compilation import cache_folder
from models.errors import KernelError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi", "-pthread")
# Instruction sets beyond the architecture's least, by variant name; `ffi.cc` chooses among them at run time.
VARIANTS = {
    "x86_64": {
        "portable": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512vnni": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    },
    "aarch64": {"portable": (), "dotprod": ("-march=armv8.2-a+dotprod",)},
}


def compiler() -> list[str]:
    """The command of a C++ compiler: `$CXX`, else the system's, else the one in the ziglang package.

    Raises:
        KernelError: there is none.
    """
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise KernelError("no C++ compiler: install g++ or clang++, or `pip install ziglang`, or name one in CXX")


def architecture() -> str:
    """The machine's architecture, as the keys of `VARIANTS`.

    Raises:
        KernelError: the kernels have no variants for it.
    """
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if machine not in VARIANTS:
        raise KernelError(f"no kernels for {machine}; there are some for {', '.join(VARIANTS)}")
    return machine


def library_file(extra: Sequence[str] = ()) -> Path:
    """Where the library of the present sources and flags is, or will be."""
    key = hashlib.sha256()
    headers = sorted(Path(jax.ffi.include_dir()).rglob("*.h"))
    for file in [*sorted(SOURCES.glob("*.h")), *sorted(SOURCES.glob("*.cc")), *headers]:
        key.update(file.read_bytes())
    machine = architecture()
    key.update(repr((compiler(), FLAGS, VARIANTS[machine], tuple(extra))).encode())
    return cache_folder() / "kernels" / f"kestrel-{machine}-{key.hexdigest()[:16]}.so"


def build(extra: Sequence[str] = ()) -> Path:
    """Compiles the library unless it is there; `extra` are further compiler flags. Returns its file.

    Raises:
        KernelError: there is no compiler, or it fails; its messages are in the error.
    """
    target = library_file(extra)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        scratch = Path(folder)
        include = ["-isystem", jax.ffi.include_dir()]
        jobs = [
            (SOURCES / "variant.cc", scratch / f"{name}.o", [*flags, f"-DKESTREL_VARIANT={name}"])
            for name, flags in VARIANTS[architecture()].items()
        ]
        jobs.append((SOURCES / "ffi.cc", scratch / "ffi.o", include))
        for source, made, flags in jobs:
            _run([*compiler(), *FLAGS, *flags, *extra, "-c", str(source), "-o", str(made)])
        library = scratch / target.name
        _run([*compiler(), "-shared", "-pthread", *extra, *(str(made) for _, made, _ in jobs), "-o", str(library)])
        library.replace(target)
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(f"the kernels do not compile: {shlex.join(command)}\n{result.stderr.strip()}")
