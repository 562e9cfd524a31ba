"""The most memory that a process has held, since it began or since the last call of `forget_peak`.

The kernel's other number, `ru_maxrss`, will not do: a new program inherits it from the one that started it, and it
cannot be set back, so that it hides whatever stays below an earlier peak.
"""

from pathlib import Path


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """From here on, only what is held now counts."""
    Path("/proc/self/clear_refs").write_text("5")
