"""The AVX-512 VNNI path on a processor that has only AVX2: whole numbers must come out as there."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.kernels import ops
from models.kernels.build import build
from models.kernels.loader import active_variant, choose_variant, runnable_variants
from tests.models.kernels.stored import new_tokens, random_cache, random_rows, random_weight

SCRIPT = """
import sys
from unittest import mock
import numpy as np
with mock.patch("models.kernels.loader.build", return_value=sys.argv[1]):
    from models.kernels.loader import active_variant, choose_variant
    active_variant()
choose_variant("avx2")
from tests.models.kernels.test_vnni import results
np.savez(sys.argv[2], **results())
"""


def results() -> dict[str, np.ndarray]:
    """Products with quantised weights of some shapes, and attention to an int8 cache."""
    found = {}
    for format in ("q4", "q8"):
        for outputs, inputs, rows in ((8, 32, 1), (50, 200, 3), (70, 65, 9)):
            random = np.random.default_rng([outputs, inputs])
            weight = random_weight(random, format, outputs, inputs)
            [result] = ops.matmul(random_rows(random, rows, inputs), ops.no_norm(), [weight], [outputs])
            found[f"{format} {outputs}"] = np.asarray(result)
    for head_dim in (32, 70):
        random = np.random.default_rng(head_dim)
        layer = random_cache(random, "int8", (1, 2, 300, head_dim))
        fresh, slots, first = new_tokens(random, 1, 1, 6, 2, head_dim), np.zeros(1, np.int32), np.full(1, 290, np.int32)
        found[f"attention {head_dim}"] = np.asarray(ops.cached_attention(*fresh, slots, first, layer)[0])
    return found


@pytest.mark.skipif("avx2" not in runnable_variants(), reason="needs AVX2")
def test_the_vnni_path_gives_what_the_avx2_path_gives(tmp_path):
    header = Path(__file__).with_name("vnni_in_avx2.h")
    library = build(["-include", str(header), "-O0"])  # whole numbers are the same, sooner
    subprocess.run([sys.executable, "-c", SCRIPT, str(library), str(tmp_path / "vnni.npz")], check=True)
    usual = active_variant()
    choose_variant("avx2")
    wanted = results()
    choose_variant(usual)
    with np.load(tmp_path / "vnni.npz") as found:
        for name, product in wanted.items():
            np.testing.assert_array_equal(found[name], product)
