"""Memory for arrays that every step reads: in pages of 2 MiB where the system has them, because a processor that finds
its way through pages of 4 KiB reads up to a third slower."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

PAGE = 1 << 21  # bytes
REGION = 1 << 26  # bytes taken from the system at once
ALIGNMENT = 64  # bytes; an array that begins at a multiple becomes a JAX array without a copy
WORTHWHILE = 1 << 14  # bytes; smaller arrays are copied to ordinary memory


class HugePages:
    """Hands out memory from large regions. A region is given back when no array in it is left."""

    def __init__(self) -> None:
        self._region = np.empty(0, np.uint8)
        self._used = 0

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A contiguous copy of the array, in huge pages if it is large enough to matter."""
        if array.nbytes < WORTHWHILE:
            return np.array(array, order="C")
        target = self._take(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(target, array)
        return target

    def _take(self, size: int) -> np.ndarray:
        """`size` bytes."""
        if self._used + size > len(self._region):
            self._region, self._used = _new_region(max(size, REGION)), 0
        start = self._used
        self._used = math.ceil((start + size) / ALIGNMENT) * ALIGNMENT
        return self._region[start : start + size]


def _new_region(size: int) -> np.ndarray:
    # Shared memory, Python's default, would get small pages.
    mapped = mmap.mmap(-1, math.ceil(size / PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them has small pages only
            mapped.madvise(mmap.MADV_HUGEPAGE)
    region = np.frombuffer(mapped, np.uint8)
    return region[-region.ctypes.data % PAGE :]


def is_mapped_file(array: np.ndarray | None) -> bool:
    """Whether an array lies over a mapped file."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False
