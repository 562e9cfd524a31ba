"""The kernels under AddressSanitizer: odd shapes must touch no byte outside their arguments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.kernels.build import build, compiler

FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O1")


def sanitizer_library() -> str | None:
    """The sanitizer's own shared library, which must be loaded before Python."""
    if Path(compiler()[0]).name not in ("c++", "g++") or not shutil.which(compiler()[0]):
        return None
    asked = subprocess.run([*compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if Path(asked.stdout.strip()).is_file() else None


@pytest.mark.skipif(sanitizer_library() is None, reason="no AddressSanitizer for this compiler")
def test_random_shapes_stay_inside_their_arguments():
    library = build(FLAGS)
    environment = os.environ | {
        "LD_PRELOAD": sanitizer_library(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    script = [sys.executable, str(Path(__file__).with_name("fuzz_shapes.py")), str(library)]
    result = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "calls" in result.stdout
