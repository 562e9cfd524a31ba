"""The kernels under AddressSanitizer: odd shapes must touch no byte outside their arguments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.kernels.build import build, compiler

FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O0")


def preloaded() -> str | None:
    """The libraries that must be loaded before Python: the sanitizer, and C++'s own, whose exceptions it watches."""
    if not shutil.which(compiler()[0]):
        return None
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        found.append(asked.stdout.strip())
    return " ".join(found) if all(Path(file).is_file() for file in found) else None


def fixed_addresses() -> list[str]:
    """What starts a program without random addresses, where that is allowed: older sanitizers find their place taken
    now and then where addresses are as random as newer kernels make them."""
    command = ["setarch", "--addr-no-randomize"]
    if not shutil.which(command[0]):
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return [] if tried.returncode else command


@pytest.mark.skipif(preloaded() is None, reason="no AddressSanitizer for this compiler")
def test_random_shapes_stay_inside_their_arguments():
    library = build(FLAGS)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    script = [sys.executable, "-m", "tests.models.kernels.fuzz_shapes", str(library)]
    command = [*fixed_addresses(), "env", f"LD_PRELOAD={preloaded()}", *script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "calls" in result.stdout
