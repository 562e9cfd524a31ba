"""Available memory, from made-up control groups and this machine's own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from serving.memory import V1, V2, Version, available_bytes, resident_bytes

MB = 2**20


def group(folder: Path, version: Version, limit: str, usage: int, active: int = 0, inactive: int = 0) -> None:
    """Writes the files of one control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / version.limit).write_text(f"{limit}\n")
    (folder / version.usage).write_text(f"{usage}\n")
    names = dict(zip(version.file_pages, (active, inactive), strict=True)) | {"anon": usage}
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in names.items()))


@pytest.mark.parametrize(
    ("version", "top", "line"),
    [(V2, "", "0::/outer/inner\n"), (V1, "memory", "9:name=systemd:/x\n4:memory:/outer/inner\n0::/\n")],
)
def test_the_tightest_group_counts(tmp_path, version, top, line):
    membership = tmp_path / "membership"
    membership.write_text(line)
    inner, outer = tmp_path / top / "outer" / "inner", tmp_path / top / "outer"
    group(inner, version, str(100 * MB), 70 * MB)
    group(outer, version, str(200 * MB), 150 * MB)
    assert available_bytes(tmp_path, membership) == 30 * MB
    group(outer, version, str(200 * MB), 190 * MB)
    assert available_bytes(tmp_path, membership) == 10 * MB
    group(outer, version, str(200 * MB), 190 * MB, active=4 * MB, inactive=6 * MB)
    assert available_bytes(tmp_path, membership) == 20 * MB


def test_a_container_that_does_not_see_its_own_group(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/outside/of/here\n")
    group(tmp_path, V2, str(100 * MB), 60 * MB)
    assert available_bytes(tmp_path, membership) == 40 * MB


def test_without_a_limit_the_machine_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123 * MB}))
    membership = tmp_path / "membership"
    assert available_bytes(tmp_path, membership) == 123 * MB
    membership.write_text("4:memory:/a\n0::/b\n")
    assert available_bytes(tmp_path, membership) == 123 * MB
    group(tmp_path / "b", V2, "max", 0)
    group(tmp_path / "memory" / "a", V1, "9223372036854771712", 60 * MB)
    assert available_bytes(tmp_path, membership) == 123 * MB
    group(tmp_path / "b", V2, str(10**15), 0)
    assert available_bytes(tmp_path, membership) == 123 * MB


def test_this_machine():
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    assert MB < resident_bytes() < psutil.virtual_memory().total


@pytest.mark.parametrize("stat", ["", "active_file", "active_file many\ninactive_file 1\n"])
def test_a_group_that_is_written_in_another_way_sets_no_limit(tmp_path, stat):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/mine\n")
    group = tmp_path / "mine"
    group.mkdir()
    for name, text in (("memory.max", "1000"), ("memory.current", "10"), ("memory.stat", stat)):
        (group / name).write_text(text)
    assert available_bytes(tmp_path, membership) > 1000
