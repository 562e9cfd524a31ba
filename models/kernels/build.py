"""Compiles the kernels for the machine at hand.

The library is kept under a name made of its sources, flags and JAX's headers, so that nothing is compiled twice and
nothing stale is ever loaded. Which compiler made it is not in the name: where a library was brought along, it is found
without one. One library holds every instruction-set variant of its architecture.
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
from concurrent.futures import ThreadPoolExecutor
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
        "avx2": ("avx2", "fma", "f16c"),
        "avx512vnni": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    },
    "aarch64": {"portable": (), "dotprod": ("dotprod",)},
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


def is_zig(command: Sequence[str]) -> bool:
    """Whether this compiler is zig's, whose driver reads the flags for instruction sets in its own way."""
    return any(Path(word).stem in ("zig", "ziglang") for word in command)


def instruction_flags(machine: str, features: Sequence[str], zig: bool) -> tuple[str, ...]:
    """What tells a compiler to use these instruction sets beyond the architecture's least, and no others."""
    if zig:  # left to itself, it compiles for the processor at hand, and it does not know gcc's names of architectures
        return ("+".join(["-mcpu=baseline", *features]),)
    if machine == "aarch64":
        return ("+".join(["-march=armv8.2-a", *features]),) if features else ()
    return tuple(f"-m{feature}" for feature in features)


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
    variants = [
        (name, [instruction_flags(machine, features, zig) for zig in (False, True)])
        for name, features in VARIANTS[machine].items()
    ]
    named = [word for word in shlex.split(os.environ.get("CXX", "")) if word.startswith("-")]
    key.update(repr((FLAGS, variants, named, tuple(extra))).encode())
    return cache_folder() / "kernels" / f"kestrel-{machine}-{key.hexdigest()[:16]}.so"


def build(extra: Sequence[str] = ()) -> Path:
    """Compiles the library unless it is there; `extra` are further compiler flags. Returns its file.

    Raises:
        KernelError: there is no compiler, or it fails; its messages are in the error.
    """
    target = library_file(extra)
    if target.is_file():
        return target
    command, machine = compiler(), architecture()
    least = instruction_flags(machine, (), is_zig(command))  # zig's own libraries are made for the same processor
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        scratch = Path(folder)
        jobs = [
            (variant_command(command, machine, name), SOURCES / "variant.cc", scratch / f"{name}.o")
            for name in VARIANTS[machine]
        ]
        include = ["-isystem", jax.ffi.include_dir()]
        jobs.append(([*command, *FLAGS, *least, *include], SOURCES / "ffi.cc", scratch / "ffi.o"))
        commands = [[*start, *extra, "-c", str(source), "-o", str(made)] for start, source, made in jobs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        library = scratch / target.name
        objects = [str(made) for _, _, made in jobs]
        _run([*command, "-shared", "-pthread", *least, *extra, *objects, "-o", str(library)])
        library.replace(target)
    return target


def variant_command(command: Sequence[str], machine: str, name: str) -> list[str]:
    """How this compiler is called for a variant, but for the files."""
    flags = instruction_flags(machine, VARIANTS[machine][name], is_zig(command))
    return [*command, *FLAGS, *flags, f"-DKESTREL_VARIANT={name}"]


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # CXX may name anything
        raise KernelError(f"the compiler {command[0]} cannot be run: {error.strerror}") from None
    if result.returncode:
        raise KernelError(f"the kernels do not compile: {shlex.join(command)}\n{result.stderr.strip()}")
