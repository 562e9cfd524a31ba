"""Compiles the kernels, so that the first start need not: `python -m models.kernels`."""

from __future__ import annotations

import sys

from models.errors import KernelError
from models.kernels.build import build

if __name__ == "__main__":
    try:
        print(build())
    except KernelError as error:
        sys.exit(f"error: {error}")
