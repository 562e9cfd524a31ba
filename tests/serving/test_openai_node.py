"""openai-node, where there is a node to run it and an npm that brings it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from models.compilation import cache_folder

from .conftest import PATIENCE

VERSION = "6.49.0"
SCRIPT = Path(__file__).with_name("openai_node.mjs")
TEXT = "hello 😀\u2028 wörld"


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder whose node_modules hold openai-node, installed once."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node with npm here, so openai-node is not tested")
    folder = cache_folder() / "node" / f"openai-{VERSION}"
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", f"openai@{VERSION}"]
        try:
            subprocess.run(command, cwd=folder, check=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip("npm cannot install openai-node here, so it is not tested")
    return folder


async def test_openai_node(server, packages):
    process = await asyncio.create_subprocess_exec(
        "node", SCRIPT, server.url, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PACKAGES": str(packages)}
    )
    printed, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0
    told = json.loads(printed)
    assert told["streamed"] == told["helper"] == told["whole"]["message"]["content"] == TEXT
    assert told["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert told["final"]["message"]["content"] == TEXT
    assert told["final"]["finish_reason"] == told["whole"]["finish_reason"] == "stop"
    assert len(told["whole"]["logprobs"]["content"]) == len(TEXT.encode())
    assert told["refused"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
    assert told["models"] == ["scripted"]
    await server.idle()
