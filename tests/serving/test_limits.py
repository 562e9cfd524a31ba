"""Memory and connections that run short: who comes too much is told so, and the others notice nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct

import pytest
from quart import Quart

from serving import __main__ as command
from serving import connection
from serving import engine as engine_module
from serving.listener import TOLD_AT_ONCE, Listener
from serving.metrics import Metrics
from serving.settings import Settings

from .chat_client import COMPLETIONS, ask, body, frames, raw_request, text_of
from .conftest import PATIENCE, Server, scripted_server
from .test_http import assert_refused
from .test_metrics import read

BACKLOG_IN_TCP_INFO = 8 + 5 * 4  # Linux tells a listening socket's in the field `tcpi_sacked`


@pytest.mark.parametrize("stream", [True, False])
async def test_without_memory_no_work_is_begun(monkeypatch, stream):
    async with scripted_server(min_free_mb=512) as server:
        monkeypatch.setattr(engine_module, "available_bytes", lambda: 100 * 2**20)
        response = await server.client.post(COMPLETIONS, json=body("hi", stream=stream))
        error = assert_refused(response, 503)
        assert error["code"] == "insufficient_memory"
        assert "100 MB" in error["message"]
        assert "512 MB" in error["message"]
        assert response.headers["retry-after"] == "5"
        told = await server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
        assert assert_refused(told, 503) == error
        assert server.model.prepared == server.engine.total_requests == server.engine.queued == 0
        assert (await server.client.get("/health")).status_code == 200
        assert (await read(server)).value("request_unfinished_total", outcome="refused") == 2
        monkeypatch.setattr(engine_module, "available_bytes", lambda: 512 * 2**20)
        assert await ask(server, "hi") == "hi"


@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
)
async def test_a_request_that_will_be_refused_is_refused_before_its_body(path):
    """Which would take memory while it comes, and time to be read."""
    async with scripted_server(min_free_mb=10**9) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 30000000\r\n\r\n{{".encode())
        async with asyncio.timeout(PATIENCE):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            writer.write_eof()
            assert b"insufficient_memory" in await reader.read()
        writer.close()


async def test_a_full_waiting_room_takes_no_bodies():
    async with scripted_server() as server:
        server.engine.max_queued = 1
        server.model.hold_at = 1
        running = [asyncio.create_task(ask(server, "one"))]
        await server.held()
        running.append(asyncio.create_task(ask(server, "two")))
        await server.until(lambda: server.engine.queued == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw_request("three")[:-5])
        async with asyncio.timeout(PATIENCE):
            assert (await reader.readline()).startswith(b"HTTP/1.1 429")
        writer.close()
        assert (await server.client.post("/tokenize", json={"prompt": "may be counted"})).status_code == 200
        server.model.gate.set()
        assert await asyncio.gather(*running) == ["one", "two"]


async def test_memory_is_looked_at_unless_told_not_to():
    async with scripted_server(min_free_mb=10**9) as server:
        assert_refused(await server.client.post(COMPLETIONS, json=body("hi")), 503)
    async with scripted_server(min_free_mb=0) as server:
        assert await ask(server, "hi") == "hi"


async def idle_connections(server: Server, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections on which one request has been served."""
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
    for reader, writer in opened:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    return opened


async def test_a_connection_too_many_is_told_so(caplog):
    caplog.set_level(logging.INFO, logger="kestrel.requests")
    async with scripted_server(max_connections=3) as server:
        opened = await idle_connections(server, 3)
        large = body("x" * 1_000_000)  # an answer must come through although the body is never read
        for request in (server.client.get("/health"), server.client.post(COMPLETIONS, json=large)):
            response = await request
            assert assert_refused(response, 503)["code"] == "too_many_connections"
            assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
        for _, writer in opened[:1]:
            writer.close()
        async with asyncio.timeout(PATIENCE):
            while (await server.client.get("/health")).status_code == 503:
                await asyncio.sleep(0.01)
        assert await ask(server, "hi") == "hi"
        for _, writer in opened:
            writer.close()
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "kestrel.requests"]
    told = [line for line in lines if line.get("code") == "too_many_connections"]
    assert [(line["status"], line["outcome"]) for line in told[:2]] == [(503, "refused")] * 2


async def test_who_is_connected_is_not_touched(monkeypatch):
    """A stream runs on while fifty silent clients come and are turned away, the last of them without a word."""
    monkeypatch.setattr(connection, "SILENCE_SECONDS", PATIENCE)  # the first are still being told when the last come
    async with scripted_server(max_connections=1) as server:
        server.model.hold_at = 3
        stream = asyncio.create_task(server.client.post(COMPLETIONS, json=body("hello", stream=True)))
        await server.held()
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(TOLD_AT_ONCE + 18)]
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        told = [answer for answer in answers if isinstance(answer, bytes) and b"too_many_connections" in answer]
        assert len(told) == TOLD_AT_ONCE
        server.model.gate.set()
        assert text_of(frames((await stream).text)) == "hello"
        for _, writer in silent:
            writer.close()


async def test_without_a_limit_any_number_is_served():
    async with scripted_server(max_connections=0) as server:
        for _, writer in await idle_connections(server, 20):
            writer.close()


def backlog(bound: socket.socket) -> int:
    info = bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return struct.unpack_from("I", info, BACKLOG_IN_TCP_INFO)[0]


async def test_the_backlog_is_the_kernels():
    """Before the model is loaded, and after."""
    settings = Settings(port=0, backlog=7)
    bound = command.listening_socket(settings)
    assert backlog(bound) == 7
    listener = Listener(Quart("nothing"), bound, settings, Metrics("nothing"))
    await listener.start()
    assert backlog(bound) == 7
    await listener.close()
