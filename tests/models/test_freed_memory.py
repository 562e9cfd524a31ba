"""Memory that is freed is there for the next that need it."""

import platform
import subprocess
import sys

import pytest

# Fills and frees an array several times, from a thread as the server's engine is, and prints how many pages the last
# time took from the system: small ones, which can be counted, also where huge ones are given unasked.
FILL = """
import ctypes, resource, sys, threading
import numpy as np
from models.freed_memory import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if sys.argv[1] == "kept":
    keep_freed_memory()

def fill():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.full(1 << 23, 1.0)
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

taken = []
thread = threading.Thread(target=fill)
thread.start()
thread.join()
print(taken[-1])
"""


def pages_taken(how: str) -> int:
    """By an array of 64 MiB, not for the first time."""
    environment = {"PATH": ""}  # nothing that sets up the allocator otherwise
    command = [sys.executable, "-c", FILL, how]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_freed_is_used_again():
    assert pages_taken("kept") < 100 < pages_taken("given back")
