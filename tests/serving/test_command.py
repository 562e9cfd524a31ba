"""The process: what it prints, how it ends, and with what status."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from serving.settings import parse_settings

from .chat_client import COMPLETIONS, body, frames, raw_request, text_of
from .conftest import ROOT

SCRIPTED = "tests.serving.scripted_command"


@contextmanager
def command(*arguments: str, module: str = SCRIPTED, pace: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """A server process, killed in the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PACE": str(pace), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def ready(process: subprocess.Popen[str]) -> str:
    """The address that the process prints, once it is ready."""
    address = re.search(r"listening on (http://\S+:\d+);", process.stdout.readline())[1]
    assert "is ready" in process.stdout.readline()
    return address


async def ended(process: subprocess.Popen[str], seconds: float) -> int:
    """The exit status; fails if it takes longer."""
    return await asyncio.to_thread(process.wait, seconds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_end_and_ends_the_process(number):
    """A stream runs to its end, an idle connection and one that has sent half a request do not matter."""
    with command("--port", "0", pace=0.02) as process:
        address = ready(process)
        port = int(address.rsplit(":", 1)[1])
        idle, half = socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port))
        half.sendall(raw_request("never")[:60])
        async with httpx.AsyncClient(base_url=address) as client:
            async with client.stream("POST", COMPLETIONS, json=body("x" * 30, stream=True)) as response:
                pieces = response.aiter_text()
                stream = await anext(pieces)
                process.send_signal(number)
                await asyncio.sleep(0.1)
                refused = await client.post(COMPLETIONS, json=body("late"))
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                stream += "".join([piece async for piece in pieces])
            assert text_of(frames(stream)) == "x" * 30
        assert await ended(process, 8) == 0
        assert "Traceback" not in process.stderr.read()
        idle.close()
        half.close()


async def test_a_stream_that_takes_too_long_ends_with_an_error_frame():
    with command("--port", "0", "--drain-timeout", "0.2", pace=0.02) as process:
        async with httpx.AsyncClient(base_url=ready(process)) as client:
            request = client.stream("POST", COMPLETIONS, json=body("x" * 1000, stream=True))
            async with request as response:
                stream = await anext(response.aiter_text())
                process.send_signal(signal.SIGTERM)
                stream += "".join([piece async for piece in response.aiter_text()])
            assert text_of(frames(stream)).endswith("x[the server is shutting down]")
        assert await ended(process, 5) == 0


async def test_a_second_signal_stops_at_once():
    with command("--port", "0", "--drain-timeout", "60", pace=0.02) as process:
        client = httpx.AsyncClient(base_url=ready(process))
        request = client.stream("POST", COMPLETIONS, json=body("x" * 1000, stream=True))
        async with client, request as response:
            await anext(response.aiter_text())
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert process.poll() is None
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await ended(process, 5) == 0
            assert time.monotonic() - begin < 3


async def test_a_client_that_does_not_read_cannot_keep_the_process_alive():
    """About 6 MB wait for a reader that never reads."""
    with command("--port", "0", "--drain-timeout", "0.2", pace=0.0002) as process:
        address = ready(process)
        stuck = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        stuck.sendall(raw_request("x" * 2500, stream=True, logprobs=True, top_logprobs=20))
        async with httpx.AsyncClient(base_url=address) as client:
            while (await client.get("/health")).json()["total_requests"] == 0:
                await asyncio.sleep(0.02)
            while (await client.get("/health")).json()["busy"]:
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await ended(process, 10) == 0
        stuck.close()


async def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken, command("--port", str(taken.getsockname()[1])) as process:
        assert await ended(process, 30) == 2
        assert process.stderr.read().startswith("error: ")


async def test_a_model_that_does_not_exist_is_said():
    with command("--model", "no-such-model", "--port", "0", module="serving") as process:
        assert await ended(process, 30) == 2
        message = process.stderr.read()
        assert message.startswith("error: 'no-such-model' is neither a folder")
        assert "Traceback" not in message


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_process(tmp_path):
    """Not a server that answers 503 for ever."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with command("--model", str(tmp_path), "--port", "0", module="serving") as process:
        assert await ended(process, 30) == 1
        message = process.stderr.read()
        assert "config.json" in message
        assert "Traceback" not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-queued", "-1"],
        ["--max-queued", "many"],
        ["--ping-seconds", "-1"],
        ["--ping-seconds", "nan"],
        ["--drain-timeout", "inf"],
        ["--dtype", "int4"],
        ["--weights", "good"],
        ["--no-such-flag"],
    ],
)
def test_settings_that_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_settings(arguments)
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_name_that_clients_see():
    assert parse_settings([]).model_id == "tiny-vl"
    assert parse_settings(["--model", "/models/Qwen3-VL-2B/"]).model_id == "Qwen3-VL-2B"
    assert parse_settings(["--model", "/models/x", "--model-id", "mine"]).model_id == "mine"
    assert parse_settings([]).host == "127.0.0.1"
