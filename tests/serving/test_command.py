"""The process: what it prints, how it ends, and with what status."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest

from models.model import PRETRAINED
from serving import __main__ as command
from serving import request_log
from serving.listener import TAKING_SECONDS
from serving.settings import Settings, parse_settings

from .chat_client import COMPLETIONS, body, frames, raw_request, stuck_socket, text_of
from .conftest import PATIENCE, ROOT, client_of
from .scripted_model import ScriptedModel


@pytest.fixture(autouse=True)
def _the_command_changes_nothing_for_later_tests(monkeypatch) -> Iterator[None]:
    """Its request lines go to this test's standard error, which is closed by the time the next test logs, and what it
    tells the allocator would hold for the whole process."""
    monkeypatch.setattr(command, "keep_freed_memory", lambda: None)
    yield
    for handler in [*request_log.log.handlers]:
        request_log.log.removeHandler(handler)
    request_log.log.setLevel(logging.NOTSET)
    request_log.log.propagate = True


@contextmanager
def process(*arguments: str, pace: float = 0.0, held: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command around a scripted model, and its address once it is ready; killed in the end if it still lives.
    `held`: it computes nothing until SIGUSR1."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.scripted_command", "--port", "0", "--min-free-mb", "0", *arguments],
        cwd=ROOT,
        env=os.environ | {"PACE": str(pace), "HELD": "1" if held else ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"listening on (http://\S+:\d+);", server.stdout.readline())[1]
        assert "is ready" in server.stdout.readline()
        yield server, address
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        server.stderr.close()


async def test_a_signal_lets_streams_end_and_ends_the_process():
    """A stream runs to its end; an idle connection and one that has sent half a request do not matter."""
    with process(held=True) as (server, address):
        port = int(address.rsplit(":", 1)[1])
        idle, half = socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port))
        half.sendall(raw_request("never")[:60])
        client = client_of(address)
        request = client.stream("POST", COMPLETIONS, json=body("x" * 50, stream=True))
        async with client, request as response:
            pieces = response.aiter_text()
            stream = await anext(pieces)
            server.send_signal(signal.SIGTERM)
            while (await client.get("/health")).json()["status"] == "ok":
                await asyncio.sleep(0.01)
            told = await asyncio.to_thread(server.stdout.readline)
            assert told == "finishing 1 running and 0 waiting requests; a second signal stops at once\n"
            refused = await client.post(COMPLETIONS, json=body("late"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            server.send_signal(signal.SIGUSR1)
            stream += "".join([piece async for piece in pieces])
        assert text_of(frames(stream)) == "x" * 50
        assert await asyncio.to_thread(server.wait, PATIENCE) == 0
        assert "Traceback" not in server.stderr.read()
        idle.close()
        half.close()


async def test_a_signal_ends_loading(tmp_path):
    """In the middle of compilation, because nothing is kept from an earlier run."""
    server = subprocess.Popen(
        [sys.executable, "-m", "serving", "--model", "tiny-vl", "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"http://\S+:\d+", server.stdout.readline())[0]
        async with client_of(address) as client:
            assert (await client.get("/health")).json()["status"] == "loading"  # from now on signals are heeded
        await asyncio.sleep(1)  # loading takes several times as long
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.communicate, None, PATIENCE) == ("", "")
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


async def until_computed(address: str) -> None:
    """Waits until the engine is done with the server's first request."""
    async with client_of(address) as client, asyncio.timeout(PATIENCE):
        while (health := (await client.get("/health")).json())["total_requests"] == 0:
            await asyncio.sleep(0.02)
        while health["active"] + health["queued"] > 0:  # not `busy`: it may not have been taken up yet
            await asyncio.sleep(0.02)
            health = (await client.get("/health")).json()


async def test_a_client_that_does_not_read_cannot_keep_the_process_alive():
    """About 6 MB wait for a reader that never reads."""
    with process("--drain-timeout", "0.2", pace=0.0001) as (server, address):
        stuck = stuck_socket(int(address.rsplit(":", 1)[1]))
        stuck.sendall(raw_request("x" * 6000, stream=True, logprobs=True, top_logprobs=20))
        await until_computed(address)
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, PATIENCE) == 0
        stuck.close()


async def test_a_slow_reader_gets_its_answer_to_the_end():
    """About 4 MB, taken in longer than a client may take nothing; the engine is done with it when the signal comes."""
    with process("--drain-timeout", "300", pace=0.0001) as (server, address):  # a busy machine reads slowly too
        slow = stuck_socket(int(address.rsplit(":", 1)[1]))
        slow.sendall(raw_request("x" * 4000, stream=True, logprobs=True, top_logprobs=20))
        await until_computed(address)
        server.send_signal(signal.SIGTERM)
        data = await asyncio.to_thread(read_slowly, slow, 1.5 * TAKING_SECONDS)
        assert b"data: [DONE]\n\n" in data[-100:]
        assert await asyncio.to_thread(server.wait, PATIENCE) == 0


def read_slowly(client: socket.socket, seconds: float) -> bytes:
    """Everything up to the end, in small parts for so many seconds."""
    data, start = b"", time.monotonic()
    while part := client.recv(2**14):
        data += part
        if time.monotonic() < start + seconds:
            time.sleep(0.05)
    client.close()
    return data


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[tuple[asyncio.Task[int], httpx.AsyncClient]]:
    """The same without a process of its own: the task, whose result is the exit status, and a client."""
    bound = command.listening_socket(settings)
    task = asyncio.create_task(command.run(settings, bound))
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with client_of(address) as client:
        yield task, client
    await asyncio.wait({task}, timeout=PATIENCE)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)
    assert task.done()


@pytest.fixture
def slow(monkeypatch) -> ScriptedModel:
    """The model that the command loads."""
    model = ScriptedModel(pace=0.02)
    monkeypatch.setattr(command, "load", lambda settings: model)
    return model


async def until_ready(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).json()["status"] == "loading":
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stream_that_takes_too_long_ends_with_an_error_frame(slow, number):
    async with running(Settings(port=0, drain_timeout=0.2)) as (task, client):
        await until_ready(client)
        async with client.stream("POST", COMPLETIONS, json=body("x" * 1000, stream=True)) as response:
            pieces = response.aiter_text()
            stream = await anext(pieces)
            os.kill(os.getpid(), number)
            stream += "".join([piece async for piece in pieces])
        assert text_of(frames(stream)).endswith("[the server is shutting down]")
        assert await task == 0


async def test_a_second_signal_stops_at_once(slow):
    """The stream is told so, and nobody waits for ten minutes."""
    async with running(Settings(port=0, drain_timeout=600)) as (task, client):
        await until_ready(client)
        async with client.stream("POST", COMPLETIONS, json=body("x" * 1000, stream=True)) as response:
            pieces = response.aiter_text()
            stream = await anext(pieces)
            os.kill(os.getpid(), signal.SIGTERM)
            while (await client.get("/health")).json()["status"] == "ok":
                await asyncio.sleep(0.01)
            assert not task.done()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                stream += "".join([piece async for piece in pieces])
                assert await task == 0
        assert text_of(frames(stream)).endswith("[the server is shutting down]")


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_command(tmp_path, caplog):
    """Not a server that answers 503 for ever."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    async with running(Settings(model=str(tmp_path), port=0)) as (task, _):
        assert await task == 1
    assert "config.json" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder"])
def test_a_model_that_does_not_exist_is_said(monkeypatch, capsys, model):
    monkeypatch.setattr(sys, "argv", ["serving", "--model", model, "--port", "0"])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith(f"error: '{model}' is neither a folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-context", "1"], "max_context must lie in 2.."),
        (["--max-context", "-5"], "max_context must lie in 2.."),
        (["--max-context", "100000000"], "max_context must lie in 2.."),
        (["--max-image-tokens", "0"], "max_image_tokens must be at least 1, found 0"),
        (["--max-image-tokens", "-1"], "max_image_tokens must be at least 1, found -1"),
        (["--model", "qwen3-vl-2b"], "weights='random'"),
        (["--model", "qwen3-vl-2b", "--weights", "random", "--max-context", "100000000"], "max_context must lie in"),
        (["--model", "{empty}"], "config.json"),
        (["--model", "{broken}"], "config.json"),
        (["--model", "{bare}"], "no weights"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_loading(tmp_path, monkeypatch, capsys, arguments, message):
    """As far as that takes no weights: nobody is told that requests will be taken."""
    folders = {name: tmp_path / name for name in ("empty", "broken", "bare")}
    for folder in folders.values():
        folder.mkdir()
    (folders["broken"] / "config.json").write_text('{"model_type": "qwen3"}')
    (folders["bare"] / "config.json").write_text((PRETRAINED / "tiny-moe" / "config.json").read_text())
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(sys, "argv", ["serving", "--port", "0", *(entry.format(**folders) for entry in arguments)])
    assert command.main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert message in told.err
    assert told.err.count("\n") == 1


def test_a_folder_that_cannot_be_used_is_said(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["serving", "--port", "0", "--disk-kv", str(tmp_path / "file")])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file'}: keys and values cannot be kept there")


def test_a_port_in_use_is_said(monkeypatch, capsys):
    monkeypatch.setattr(command, "check", lambda settings: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(sys, "argv", ["serving", "--port", str(taken.getsockname()[1])])
        assert command.main() == 2
        port = taken.getsockname()[1]
    told = capsys.readouterr().err
    assert told.startswith(f"error: cannot listen on port {port} of 127.0.0.1: Address already in use; --port and")


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("key",), False),
    ],
)
def test_a_server_that_others_can_reach_without_a_key_is_warned_of(monkeypatch, caplog, host, keys, warned):
    async def serve_nobody(settings: Settings, bound: socket.socket) -> int:
        bound.close()
        return 0

    monkeypatch.setattr(command, "run", serve_nobody)
    monkeypatch.setattr(command, "parse_settings", lambda: Settings(host=host, port=0, api_keys=keys))
    assert command.main() == 0
    told = [record.message for record in caplog.records if record.name == command.log.name]
    assert [line.startswith("without an API key") for line in told] == [True] * warned


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-queued", "-1"],
        ["--max-queued", "many"],
        ["--min-free-mb", "-1"],
        ["--disk-kv-mb", "-1"],
        ["--disk-kv", "folder", "--prefix-cache-mb", "0"],
        ["--max-connections", "-1"],
        ["--backlog", "1.5"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--ping-seconds", "-1"],
        ["--ping-seconds", "nan"],
        ["--drain-timeout", "inf"],
        ["--header-timeout", "-1"],
        ["--body-timeout", "soon"],
        ["--idle-timeout", "nan"],
        ["--stall-timeout", "inf"],
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
