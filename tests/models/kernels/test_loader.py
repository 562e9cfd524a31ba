"""How the compiled kernels are found, chosen and done without."""

import os
import subprocess
import sys

import pytest

from models.errors import KernelError
from models.kernels.build import build, compiler, library_file
from models.kernels.loader import CHOICE, choose_variant, runnable_variants

SHOW = "from models.kernels.loader import active_variant; print(active_variant())"
ASK = ["-m", "models.generate", "--model", "tiny-moe", "--quant", "q4", "--max-context", "256", "What is 7 + 8?"]


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which chooses kernels as `variables` say."""
    environment = os.environ | {CHOICE: "auto"} | variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_best_variant_is_used_unless_another_is_named():
    assert run(["-c", SHOW]).stdout.strip() == runnable_variants()[0]
    assert run(["-c", SHOW], **{CHOICE: "portable"}).stdout.strip() == "portable"


def test_plain_jax_can_be_asked_for():
    result = run(["-c", SHOW], **{CHOICE: "reference"})
    assert result.stdout.strip() == "None"
    assert result.stderr == ""


def test_a_variant_that_cannot_run_is_refused_with_those_that_can():
    result = run(["-c", SHOW], **{CHOICE: "sse9"})
    assert "auto, reference, " + " or ".join(runnable_variants()) in result.stderr
    with pytest.raises(KernelError, match="sse9"):
        choose_variant("sse9")


def test_without_a_compiler_plain_jax_takes_over_and_says_so(tmp_path):
    missing = {"CXX": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path)}
    result = run(["-c", SHOW], **missing)
    assert result.stdout.strip() == "None"
    assert "plain JAX takes the place of the compiled kernels" in result.stderr
    named = run(["-c", SHOW], **missing, **{CHOICE: "portable"})
    assert "KernelError" in named.stderr


def test_plain_jax_answers_as_the_kernels_do():
    compiled, plain = run(ASK), run(ASK, **{CHOICE: "reference"})
    assert compiled.stdout == plain.stdout
    assert compiled.stdout.strip()


def test_what_the_compiler_says_is_in_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelError, match="no-such-flag"):
        build(["--no-such-flag"])
    assert not list(tmp_path.rglob("*.so"))


def test_flags_and_compiler_have_libraries_of_their_own(monkeypatch):
    usual = library_file()
    assert library_file(["-g"]) != usual
    monkeypatch.setenv("CXX", "c++ -DOTHER")
    assert compiler() == ["c++", "-DOTHER"]
    assert library_file() != usual
