"""The pages of a file that this process has mapped: how many are resident, and letting go of them.

Two hold such a page: the process, among its resident memory, and the system's page cache, from which the process gets
it back without reading the disk. On Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

PROCESS = Path("/proc/self")
HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \S+\s*(.*)")  # of a mapping, in maps and in smaps
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Stretch(NamedTuple):
    """Neighbouring pages: where they are mapped, where they lie in the file, and their size, all in bytes."""

    address: int
    offset: int
    size: int


class MappedFile:
    """A file whose pages are watched and dropped."""

    def __init__(self, file: Path) -> None:
        self.file = os.path.realpath(file)
        self._whole = np.memmap(self.file, np.uint8, mode="r")  # to ask about its pages; never read
        self._descriptor = os.open(self.file, os.O_RDONLY)

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._descriptor)

    def stretches(self, arrays: Iterable[Array]) -> list[Stretch]:
        """The pages under those of the arrays that lie where the file is mapped."""
        mapped, found = self._mapped(), []
        for array in arrays:
            address = array.unsafe_buffer_pointer()
            for start, end, offset in mapped:
                if start <= address < end:
                    first = address - address % mmap.PAGESIZE
                    size = -(-(address + array.nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
                    found.append(Stretch(first, offset + first - start, size))
                    break
        return found

    def ask_for(self, stretches: Iterable[Stretch]) -> None:
        """Has pages read into the page cache that are not in it, without waiting for them."""
        _advise(stretches, mmap.MADV_WILLNEED)

    def drop(self, stretches: Iterable[Stretch]) -> None:
        """Makes pages no longer resident; the page cache keeps them."""
        _advise(stretches, mmap.MADV_DONTNEED)

    def forget(self, stretches: Iterable[Stretch]) -> None:
        """Takes pages that no process has resident out of the page cache too: they will come from the disk."""
        for start, end in joined(stretches):
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)

    def resident(self) -> int:
        """Bytes of the file that are resident in this process: `Rss` of its mappings in /proc/self/smaps."""
        total, own = 0, False
        for line in (PROCESS / "smaps").read_text().splitlines():
            if head := HEAD.fullmatch(line):
                own = head[4] == self.file
            elif own and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
        return total

    def cached(self) -> int:
        """Bytes of the file that the page cache holds, by mincore."""
        pages = np.zeros(-(-self._whole.nbytes // mmap.PAGESIZE), np.uint8)
        if _libc.mincore(self._whole.ctypes.data, self._whole.nbytes, pages.ctypes.data):
            raise OSError(ctypes.get_errno(), f"{self.file}: mincore failed")
        return int((pages & 1).sum()) * mmap.PAGESIZE

    def _mapped(self) -> list[tuple[int, int, int]]:
        """Start, end and place in the file of each mapping."""
        heads = filter(None, map(HEAD.fullmatch, (PROCESS / "maps").read_text().splitlines()))
        return [(int(head[1], 16), int(head[2], 16), int(head[3], 16)) for head in heads if head[4] == self.file]


def _advise(stretches: Iterable[Stretch], advice: int) -> None:
    for address, _, size in stretches:
        if _libc.madvise(address, size, advice):
            raise OSError(ctypes.get_errno(), f"madvise({advice}) failed")


def joined(stretches: Iterable[Stretch]) -> list[tuple[int, int]]:
    """Begin and end of the parts of the file that stretches cover: in one piece where they meet, because the kernel
    keeps pages in groups, and lets go of whole groups only."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((stretch.offset, stretch.offset + stretch.size) for stretch in stretches):
        if found and start <= found[-1][1]:
            start, last = found.pop()
            end = max(end, last)
        found.append((start, end))
    return found
