"""curl, as it is used from a shell."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from .chat_client import COMPLETIONS, ask, body, data_url, frames, text_of
from .conftest import PATIENCE, Server
from .test_media import about

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl here")


async def curl(server: Server, *arguments: str, data: object = None, folder: Path | None = None) -> tuple[int, str]:
    """Exit status and output of a request with a JSON body, which comes from a file if there is a folder for it."""
    if data is not None:
        text = json.dumps(data)
        if folder is not None:
            (folder / "body.json").write_text(text)
            text = f"@{folder / 'body.json'}"
        arguments = (*arguments, "-H", "Content-Type: application/json", "-d", text)
    command = ("curl", "-sS", "--max-time", str(PATIENCE), *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_stream_and_a_whole_answer(server):
    asked = body("hello 😀")
    status, stream = await curl(server, "-N", f"{server.url}{COMPLETIONS}", data=asked | {"stream": True})
    assert (status, text_of(frames(stream))) == (0, "hello 😀")
    status, whole = await curl(server, f"{server.url}{COMPLETIONS}", data=asked)
    assert json.loads(whole)["choices"][0]["message"]["content"] == "hello 😀"


async def test_a_stream_is_shown_as_it_comes(server):
    server.model.hold_at = 4
    command = ("curl", "-sSN", "-d", json.dumps(body("hello", stream=True)), "-H", "Content-Type: application/json")
    process = await asyncio.create_subprocess_exec(
        *command, f"{server.url}{COMPLETIONS}", stdout=asyncio.subprocess.PIPE
    )
    await server.held()
    async with asyncio.timeout(PATIENCE):
        shown = b"".join([await process.stdout.readline() for _ in range(3)])
    assert b'"role":"assistant"' in shown
    assert b'"content":"h"' in shown
    server.model.gate.set()
    assert text_of(frames((shown + (await process.communicate())[0]).decode())) == "hello"


async def test_a_picture_for_which_curl_asks_before_it_sends(server, tmp_path):
    """Older versions send `Expect: 100-continue` before any body of more than a megabyte."""
    file = io.BytesIO()
    Image.frombytes("L", (1100, 1000), random.Random(1).randbytes(1_100_000)).save(file, "PNG")
    asked = about(data_url(file.getvalue()))
    assert len(json.dumps(asked)) > 2**20
    status, told = await curl(
        server,
        "-H",
        "Expect: 100-continue",
        "-w",
        "\n%{http_code}",
        f"{server.url}{COMPLETIONS}",
        data=asked,
        folder=tmp_path,
    )
    answer, code = told.rsplit("\n", 1)
    assert (status, code) == (0, "200"), answer
    assert json.loads(answer)["usage"]["prompt_tokens"] > 64


async def test_errors(server):
    status, told = await curl(server, "-w", "%{http_code}", f"{server.url}{COMPLETIONS}", data={"messages": []})
    assert (status, told[-3:], json.loads(told[:-3])["error"]["param"]) == (0, "400", "messages")
    status, _ = await curl(server, "--fail", f"{server.url}/nowhere")
    assert status == 22


async def test_one_that_is_interrupted(server):
    server.model.hold_at = 3
    command = ("curl", "-sSN", "-d", json.dumps(body("hello")), "-H", "Content-Type: application/json")
    process = await asyncio.create_subprocess_exec(
        *command, f"{server.url}{COMPLETIONS}", stdout=asyncio.subprocess.PIPE
    )
    job = await server.held()
    process.terminate()  # SIGINT is ignored by what a script starts in the background
    assert await process.communicate() == (b"", None)
    assert process.returncode == -signal.SIGTERM
    await server.until(lambda: job.cancelled)
    server.model.gate.set()
    await server.idle()
    assert await ask(server, "next") == "next"
