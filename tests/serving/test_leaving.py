"""Clients that leave, at every moment and in every way: generation stops and the place is free."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import pytest

from .chat_client import ask, raw_request, stuck_socket
from .conftest import Server, scripted_server
from .scripted_model import ScriptedModel

LONG = "x" * 500


async def connect(server: Server, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    await writer.drain()
    return reader, writer


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """Closes a connection in order, with a reset, or its sending half alone."""
    if how == "half":
        writer.write_eof()
        return
    if how == "reset":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.fixture
async def server():
    async with scripted_server(ScriptedModel(chunks=5), max_queued=100) as running:
        yield running


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("stray", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("unit", [2, 8])
async def test_leaving_while_the_engine_computes(server, unit, stream, stray, how):
    """In prefill and in decoding: the unit of work under way is the last. Bytes after the body (a stray line end, a
    pipelined request) must not hide that the client leaves."""
    server.model.hold_at = unit
    _, writer = await connect(server, raw_request(LONG, stream=stream) + stray)
    job = await server.held()
    leave(writer, how)
    await server.until(lambda: job.cancelled)
    server.model.gate.set()
    await server.idle()
    assert server.model.begun == unit, "a client that had left was computed for"
    assert server.model.dropped == 1
    assert await ask(server, "next") == "next"
    writer.close()


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("stray", [b"", b"\r\n"])
async def test_leaving_the_queue(server, stray, how):
    """The place is free at once, although the engine is busy with another request."""
    server.model.hold_at = 1
    running = asyncio.create_task(ask(server, "first"))
    await server.held()
    _, writer = await connect(server, raw_request(LONG, stream=True) + stray)
    await server.until(lambda: server.engine.queued == 1)
    leave(writer, how)
    await server.until(lambda: server.engine.queued == 0)
    server.model.gate.set()
    assert await running == "first"
    assert server.model.steps == len("first") + 1
    writer.close()


async def test_leaving_before_the_answer_begins(server):
    """A hundred clients that hang up right after their request, or in the middle of it, streamed and not."""
    chance = random.Random(7)
    for attempt in range(100):
        request = raw_request(LONG, stream=attempt % 2 == 0)
        _, writer = await connect(server, request[: chance.choice([20, 200, -1, None])])
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        leave(writer, chance.choice(["close", "reset"]))
    await server.idle()
    assert await ask(server, "next") == "next"


async def test_leaving_at_random_moments(server):
    """With others at work: nobody's answer suffers, and in the end nothing is left."""
    server.model.pace = 0.0005
    chance = random.Random(11)

    async def leaver(number: int) -> None:
        _, writer = await connect(server, raw_request(f"leaver {number} " * 20, stream=number % 3 > 0))
        await asyncio.sleep(chance.random() * 0.3)
        leave(writer, chance.choice(["close", "reset", "half"]))
        await asyncio.sleep(0.1)
        writer.close()

    async def stayer(number: int) -> str:
        return await ask(server, f"the code word is {number * 1111}")

    async with asyncio.TaskGroup() as group:
        leavers = [group.create_task(leaver(number)) for number in range(30)]
        stayers = [group.create_task(stayer(number)) for number in range(8)]
    assert len(leavers) == 30
    assert [task.result() for task in stayers] == [f"the code word is {number * 1111}" for number in range(8)]
    await server.idle()


async def test_a_reader_that_never_reads_delays_nobody_and_can_leave():
    """About 6 MB of frames, more than any socket takes without being read."""
    top = tuple((token, -1.0) for token in range(65, 85))
    async with scripted_server(ScriptedModel(pace=0.0001, top=top, max_context=20_000)) as server:
        _, writer = await asyncio.open_connection(sock=stuck_socket(server.port))
        writer.write(raw_request("x" * 6000, stream=True, logprobs=True, top_logprobs=20))
        await server.until(lambda: server.engine.active == 1)
        assert await ask(server, "next") == "next"
        await server.idle()
        [stream] = [task for task in asyncio.all_tasks() if "handle_request" in repr(task.get_coro())]
        leave(writer, "reset")
        await server.until(stream.done)
        assert await ask(server, "again") == "again"
