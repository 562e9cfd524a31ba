"""README.md names everything that the server tells and can be told."""

from __future__ import annotations

import re

import pytest

from serving.engine import Engine
from serving.settings import Settings, parse_settings

from .conftest import ROOT
from .scripted_model import ScriptedModel

README = (ROOT / "README.md").read_text()


def section(heading: str) -> str:
    """What stands below a heading, up to the next one."""
    return re.split(r"^#+ ", README.split(f"\n### {heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def missing(names: set[str], text: str) -> set[str]:
    """The names that do not stand in a text as code: in backticks, perhaps with a label or a value, or as JSON keys."""
    return {name for name in names if not re.search(rf'`{re.escape(name)}[`{{ ]|"{re.escape(name)}":', text)}


async def test_every_metric_is_named(server):
    text = (await server.client.get("/metrics")).text
    names = {name for name in re.findall("^# TYPE kestrel:(\\w+)", text, re.MULTILINE) if not name.endswith("_created")}
    assert len(names) > 20
    assert not missing(names, section("`GET /metrics`"))


async def test_every_key_of_health_is_named(server):
    told = (await server.client.get("/health")).json()
    disk = Engine(ScriptedModel, Settings(disk_kv="folder")).disk()
    assert not missing({*told, *told["slots"], "disk_cache", *disk}, section("`GET /health`"))


def test_every_flag_is_named(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    flags = set(re.findall("--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    assert len(flags) > 20
    assert not missing(flags, section("Flags"))


def test_every_code_of_an_error_is_named():
    sources = "".join(file.read_text() for file in (ROOT / "serving").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    assert "forbidden_host" in codes
    assert not missing(codes, section("Errors"))


def test_a_name_is_missing_unless_it_stands_alone():
    text = 'Of `one`, `two{label}` and `three_four`, {"five": 1}.'
    assert missing({"one", "two", "three", "four", "five"}, text) == {"three", "four"}
