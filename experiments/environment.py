"""What a result was measured on and with, as a JSON object to keep beside it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from models.kernels.loader import active_variant
from models.model import find_folder

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "pillow", "tokenizers", "xllamacpp")
HASHED_BYTES = 1 << 23  # at each end of a file of weights
ARM_PARTS = {  # of /proc/cpuinfo, implementer ARM
    "0xd05": "Cortex-A55",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd41": "Cortex-A78",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
SETTINGS = ("KESTREL_KERNELS", "XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment() -> dict[str, Any]:
    """Processor, board, clock governors, the cores that this process may use, memory, load, versions, kernel variant,
    settings and the commit of the working tree."""
    return {
        "cpu": _cpu_name(),
        "board": board(),
        "governor": ", ".join(dict.fromkeys(_governors().values())),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "affinity": sorted(os.sched_getaffinity(0)),
        "governors": _governors(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "kernels": active_variant() or "plain JAX",
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "commit": _commit(),
    }


def measured_here(folder: Path) -> bool:
    """Whether a folder holds results of this machine, as far as processor, board and number of cores tell."""
    file = folder / "environment.json"
    if not file.is_file():
        return False
    told = json.loads(file.read_text())
    return (told["cpu"], told.get("board", ""), told["cores"]) == (_cpu_name(), board(), len(os.sched_getaffinity(0)))


def _version(package: str) -> str | None:
    """None for one of the optional packages that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    return cpu_name(file.read_text() if file.is_file() else "") or board() or platform.processor()


def cpu_name(cpuinfo: str) -> str:
    """The processor of a /proc/cpuinfo; "" if it does not tell. Kernels for ARM tell no name but each core's part."""
    told = [(name.strip(), value.strip()) for name, _, value in (row.partition(":") for row in cpuinfo.splitlines())]
    for name, value in told:
        if name == "model name":
            return value
    parts = Counter(ARM_PARTS.get(value.lower(), f"CPU part {value}") for name, value in told if name == "CPU part")
    return " + ".join(f"{count} x {part}" for part, count in parts.items())


def board() -> str:
    """The name that the device tree gives a board; "" for a machine without one."""
    model, compatible = (Path("/proc/device-tree") / name for name in ("model", "compatible"))
    texts = [file.read_text().replace("\0", " ").strip() for file in (model, compatible) if file.is_file()]
    return "; ".join(texts).replace("rk3588", "RK3588")


def _governors() -> dict[str, str]:
    """Who sets the clock of each of the machine's cores; empty where the kernel does not tell."""
    files = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = {int(file.parent.parent.name[3:]): file.read_text().strip() for file in files}
    return {str(core): found[core] for core in sorted(found)}


def _commit() -> str:
    """The commit's hash, marked where code of the working tree has changes; "unknown" outside a checkout."""
    root = Path(__file__).parent.parent
    code = ("--", ".", ":!results", ":!README.md")  # those are written from what is measured
    try:
        head, changed = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", *code))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changed else "")


def model_fingerprint(model: str) -> str:
    """A hash of a model's configuration and weights; of files of weights beyond 16 MiB it takes size and both ends. A
    preset has no files."""
    folder = find_folder(model)
    if folder is None:
        return "no files: random weights"
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(HASHED_BYTES))
            file.seek(max(file.tell(), size - HASHED_BYTES))
            found.update(file.read())
    return found.hexdigest()[:16]


def write_environment(folder: Path, **more: Any) -> None:
    """Writes `environment.json` into a result's folder, with what else is to be told."""
    (folder / "environment.json").write_text(json.dumps(environment() | more, indent=2) + "\n")
