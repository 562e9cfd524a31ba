"""Memory in huge pages: what is copied there stays what it was, and can become a JAX array without another copy."""

import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from models.huge_pages import ALIGNMENT, REGION, WORTHWHILE, HugePages, is_mapped_file


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32, ml_dtypes.bfloat16])
def test_arrays_keep_their_values(dtype):
    pages, random = HugePages(), np.random.default_rng(0)
    arrays = [random.integers(0, 100, shape).astype(dtype) for shape in ((300, 401), (7, 5, 999), (1, 100_003))]
    copies = [pages.copy(array) for array in arrays]
    for array, copy in zip(arrays, copies, strict=True):
        assert not np.shares_memory(array, copy)
        np.testing.assert_array_equal(array, copy)
        assert copy.ctypes.data % ALIGNMENT == 0


def test_a_jax_array_is_made_without_a_copy():
    copy = HugePages().copy(np.arange(100_000, dtype=np.float32))
    assert jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data


def test_arrays_of_another_order_become_contiguous():
    pages, matrix = HugePages(), np.arange(600_000, dtype=np.float32).reshape(1000, 600).T
    for array in (matrix, matrix[:3, :3]):
        copy = pages.copy(array)
        assert copy.flags.c_contiguous
        np.testing.assert_array_equal(copy, array)


def test_small_arrays_are_copied_too():
    small = np.arange(WORTHWHILE // 8 - 1).reshape(1, -1).T
    copy = HugePages().copy(small)
    assert not np.shares_memory(small, copy)
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, small)


def test_an_array_larger_than_a_region_fits():
    copy = HugePages().copy(np.broadcast_to(np.uint8(7), REGION + 3))
    assert len(copy) == REGION + 3
    assert (copy == 7).all()


def test_an_array_outlives_its_pages():
    copies = [HugePages().copy(np.full(50_000, value)) for value in range(5)]
    assert [int(copy.sum()) for copy in copies] == [50_000 * value for value in range(5)]


def test_mapped_files_are_told_from_other_memory(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(range(64)))
    mapped = np.memmap(tmp_path / "numbers", np.uint8, mode="r")
    assert is_mapped_file(mapped)
    assert is_mapped_file(np.asarray(mapped)[3:].reshape(-1, 1))
    assert not is_mapped_file(np.array(mapped))
    assert not is_mapped_file(HugePages().copy(np.zeros(100_000)))


SMAPS = Path("/proc/self/smaps")
HUGE = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.skipif(not SMAPS.is_file(), reason="the system does not tell about its mappings")
@pytest.mark.skipif(not HUGE.is_dir(), reason="the system has no huge pages")
def test_memory_is_private_and_marked_for_huge_pages():
    copy = HugePages().copy(np.zeros(REGION, np.uint8))
    flags = mapping_flags(copy.ctypes.data)
    assert "hg" in flags
    assert "sh" not in flags, "shared memory gets small pages"


def mapping_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")
