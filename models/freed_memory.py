"""What a program that runs models tells the C library's allocator, once, before it starts threads."""

from __future__ import annotations

import contextlib
import ctypes

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST_KEPT = 2**31 - 1  # bytes


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next that need it: XLA takes the memory of a step's results anew each time,
    and the kernel would have to find and to clear its pages anew.

    Freed memory is given back only beyond `MOST_KEPT`. Threads share one arena, because only the first keeps so much.
    Other C libraries go on as they do.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST_KEPT)):
            mallopt(parameter, value)
