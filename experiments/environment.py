"""What a result was measured on and with, as a JSON object to keep beside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from models.kernels.loader import active_variant

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "pillow", "tokenizers", "xllamacpp")
SETTINGS = ("KESTREL_KERNELS", "XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Processor, board, clock governor, memory, load, versions, kernel variant, settings and the commit of the working
    tree."""
    return {
        "cpu": _cpu_name(),
        "board": board(),
        "governor": _governor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "kernels": active_variant() or "plain JAX",
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    """None for one of the optional packages that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def board() -> str:
    """The name that the device tree gives a board; "" for a machine without one."""
    model, compatible = (Path("/proc/device-tree") / name for name in ("model", "compatible"))
    texts = [file.read_text().replace("\0", " ").strip() for file in (model, compatible) if file.is_file()]
    return "; ".join(texts).replace("rk3588", "RK3588")


def _governor() -> str:
    """Who sets the clock of the processor's cores; "" where the kernel does not tell."""
    files = sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    return ", ".join(dict.fromkeys(file.read_text().strip() for file in files))


def _commit() -> str:
    """The commit's hash, marked where the working tree has changes; "unknown" outside a checkout."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def write_environment(folder: Path, **more: Any) -> None:
    """Writes `environment.json` into a result's folder, with what else is to be told."""
    (folder / "environment.json").write_text(json.dumps(environment() | more, indent=2) + "\n")
