"""How fast this machine reads memory: `python -m experiments.bandwidth --threads 2`.

Threads read a share each of an array that no cache can hold. There are two ways of reading, because neither is the
fastest everywhere; the better one counts.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ARRAY_BYTES = 1 << 29  # 512 MiB
PASSES = 3  # over the array; the fastest counts
_memchr = ctypes.CDLL(None).memchr  # through ctypes, so that Python's lock is released
_memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memchr.restype = ctypes.c_void_p


def search(part: np.ndarray) -> None:
    """Reads a float32 array as the C library does that looks for a byte which is not there."""
    if _memchr(part.ctypes.data, 0xFF, part.nbytes) is not None:
        raise ValueError("the array should not hold the byte that is searched for")


def largest(part: np.ndarray) -> None:
    """Reads a float32 array as numpy does that looks for its largest value."""
    part.max()


WAYS: dict[str, Callable[[np.ndarray], None]] = {"search": search, "largest": largest}


class ReadBandwidth:
    """Measures reading with a number of threads."""

    def __init__(self, threads: int, size: int = ARRAY_BYTES) -> None:
        """`size` is that of the array, in bytes."""
        self.array = np.ones(size // 4, np.float32)
        self.parts = np.array_split(self.array, threads)
        self.pool = ThreadPoolExecutor(threads)

    def sample(self) -> dict[str, float]:
        """GB/s (10^9 bytes per second) of each way of reading."""
        return {name: max(self._rate(read) for _ in range(PASSES)) for name, read in WAYS.items()}

    def _rate(self, read: Callable[[np.ndarray], None]) -> float:
        start = time.perf_counter()
        list(self.pool.map(read, self.parts))
        return self.array.nbytes / (time.perf_counter() - start) / 1e9


def main() -> None:
    """Prints five samples."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bandwidth", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    bandwidth = ReadBandwidth(parser.parse_args().threads)
    for _ in range(5):
        print("  ".join(f"{name} {rate:.1f} GB/s" for name, rate in bandwidth.sample().items()))


if __name__ == "__main__":
    main()
