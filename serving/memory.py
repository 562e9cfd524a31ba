"""How much memory can still be had: what the machine has, and what control groups (containers) leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Version(NamedTuple):
    """The names that a version of the kernel's control groups gives to things, in bytes."""

    limit: str
    usage: str
    file_pages: tuple[str, str]


V1 = Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
V2 = Version("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_bytes(control_groups: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes that can be allocated without swapping: the least of what the machine and each of this process's control
    groups have left. Pages of files count as available, because the kernel drops them when it needs room."""
    rooms = [_room(folder, version) for folder, version in _groups(control_groups, membership)]
    return min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)])


def resident_bytes() -> int:
    """What this process has in memory, mapped weights included."""
    return psutil.Process().memory_info().rss


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, Version]]:
    """The folders of this process's memory groups and of those around them; some may not exist in a container."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, version = (root, V2) if controllers == "" else (root / "memory", V1)
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield group, version
            if group == top:
                break


def _room(group: Path, version: Version) -> int | None:
    """What a group may still take; None if it has no limit that can be read."""
    try:
        limit = (group / version.limit).read_text().strip()
        if limit == "max":
            return None
        usage = int((group / version.usage).read_text())
        entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - usage + sum(int(entries[name]) for name in version.file_pages)
    except (OSError, ValueError, KeyError):  # what cannot be read, or is written in another way, sets no limit
        return None
