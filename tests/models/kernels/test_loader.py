"""How the compiled kernels are found, chosen and done without."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import models
from models.errors import KernelError
from models.kernels import loader
from models.kernels.build import (
    SOURCES,
    VARIANTS,
    build,
    compiler,
    instruction_flags,
    is_zig,
    library_file,
    variant_command,
)
from models.kernels.loader import CHOICE, active_variant, choose_variant, runnable_variants


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str | None]]:
    """The variant that a process which has just begun would use, by what `KESTREL_KERNELS` says there."""
    usual = active_variant()

    def choose(choice: str) -> str | None:
        with monkeypatch.context() as patch:
            patch.setenv(CHOICE, choice)
            return active_variant.__wrapped__()

    yield choose
    choose_variant(usual)


def test_the_best_variant_is_used_unless_another_is_named(chosen):
    assert chosen("portable") == "portable"
    assert runnable_variants()[0] == chosen("auto")


def test_plain_jax_can_be_asked_for(chosen):
    assert chosen("reference") is None  # and says nothing: a warning would be an error


def test_a_variant_that_cannot_run_is_refused_with_those_that_can(chosen):
    with pytest.raises(KernelError, match="auto, reference, " + " or ".join(runnable_variants())):
        chosen("sse9")
    with pytest.raises(KernelError, match="sse9"):
        choose_variant("sse9")


def test_without_a_compiler_plain_jax_takes_over_and_says_so(chosen, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(tmp_path / "none"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        for remembered in (loader._load, loader._file):
            patch.setattr(loader, remembered.__name__, remembered.__wrapped__)
        with pytest.warns(UserWarning, match="plain JAX takes the place of the compiled kernels"):
            assert chosen("auto") is None
        with pytest.raises(KernelError, match=r"portable: .*cannot be run"):
            chosen("portable")


def test_plain_jax_answers_as_the_kernels_do():
    question, length = "7 + 8", 8  # a prompt of one chunk, and an answer without its end: plain JAX is slow
    steps = models.load("tiny-moe", quant="q4", max_context=256).generate(question, max_tokens=length)
    command = [sys.executable, *"-m models.generate --model tiny-moe --quant q4 --max-context 256 --max-tokens".split()]
    environment = os.environ | {CHOICE: "reference", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles sooner
    plain = subprocess.run(
        [*command, str(length), question], env=environment, capture_output=True, text=True, check=True
    )
    assert plain.stdout.strip() == "".join(step.text for step in steps) == "7 + 8 = 15"


def test_what_the_compiler_says_is_in_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelError, match="no-such-flag"):
        build(["--no-such-flag"])
    assert not list(tmp_path.rglob("*.so"))


def test_flags_have_libraries_of_their_own(monkeypatch):
    usual = library_file()
    assert library_file(["-g"]) != usual
    monkeypatch.setenv("CXX", "c++ -DOTHER")
    assert compiler() == ["c++", "-DOTHER"]
    assert library_file() != usual


def test_a_library_that_is_there_needs_no_compiler(monkeypatch):
    made = build()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
        compiler()
    assert build() == made
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build() == made
    with pytest.raises(KernelError, match="/no/such/compiler cannot be run"):
        build(["-DOTHER"])


@pytest.mark.parametrize(
    ("command", "zig"),
    [
        (["/usr/bin/python3", "-m", "ziglang", "c++"], True),
        (["/opt/zig/zig", "c++"], True),
        (["c++"], False),
        (["/opt/zig/bin/clang++", "-DOTHER"], False),
    ],
)
def test_zig_is_told_from_other_compilers(command, zig):
    assert is_zig(command) == zig


@pytest.mark.parametrize(
    ("machine", "variant", "usual", "zig"),
    [
        ("x86_64", "portable", (), "-mcpu=baseline"),
        ("x86_64", "avx2", ("-mavx2", "-mfma", "-mf16c"), "-mcpu=baseline+avx2+fma+f16c"),
        ("aarch64", "portable", (), "-mcpu=baseline"),
        ("aarch64", "dotprod", ("-march=armv8.2-a+dotprod",), "-mcpu=baseline+dotprod"),
    ],
)
def test_every_compiler_is_told_the_instructions_in_its_own_way(machine, variant, usual, zig):
    assert instruction_flags(machine, VARIANTS[machine][variant], zig=False) == usual
    assert instruction_flags(machine, VARIANTS[machine][variant], zig=True) == (zig,)
    chosen = [word for word in variant_command(["zig", "c++"], machine, variant) if word.startswith("-m")]
    assert chosen == [zig]


CPU_INFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPU_INFO.is_file(), reason="reads what Linux says of an x86-64"
)
def test_every_variant_that_the_processor_can_run_is_offered():
    """Whichever compiler made the library: the usual question, in the form that zig links, is always answered no."""
    [flags, *_] = [line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags")]
    found = {flag.replace("_", "") for flag in flags.split()}
    wanted = {name for name, features in VARIANTS["x86_64"].items() if found.issuperset(features)}
    assert set(runnable_variants()) == wanted


def zig_command() -> list[str] | None:
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return ["zig", "c++"] if shutil.which("zig") else None


@pytest.mark.skipif(zig_command() is None or not shutil.which("objdump"), reason="needs zig and objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="what wide registers are called is known for x86-64")
def test_zig_makes_the_portable_variant_for_every_processor(tmp_path):
    command = variant_command(zig_command(), "x86_64", "portable")
    made = tmp_path / "portable.o"
    subprocess.run([*command, "-c", str(SOURCES / "variant.cc"), "-o", str(made)], check=True)
    listing = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True).stdout
    assert "%xmm" in listing
    assert not re.search(r"%[yz]mm|\bv[a-z]+ +%xmm", listing)
