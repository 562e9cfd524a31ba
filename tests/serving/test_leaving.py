"""Clients that leave, at every moment and in every way: generation stops and the place is free."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import socket
import struct
from collections import Counter

import psutil
import pytest

from .chat_client import COMPLETIONS, ask, raw_request, streams, stuck_socket
from .conftest import Server, scripted_server
from .scripted_model import ScriptedModel

LONG = "x" * 500
BYTES_PER_LEAVE = 2**14  # the log lines that the test keeps take 5 kB


async def connect(server: Server, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request over a connection of its own. What the sockets do not hold goes out later, if the server has not
    ended the connection by then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
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
@pytest.mark.parametrize("stray", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
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
        for number in range(30):
            group.create_task(leaver(number))
        stayers = [group.create_task(stayer(number)) for number in range(8)]
    assert [task.result() for task in stayers] == [f"the code word is {number * 1111}" for number in range(8)]
    await server.idle()


MOMENTS = ("in the head", "in the body", "at once", "admitted", "later", "first token", "some tokens")
STRAY = (b"", b"", b"\r\n", b"x" * 100, b"x" * 200_000, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
STRAY += (raw_request("again"),)


async def leave_at(server: Server, chance: random.Random, moment: str) -> None:
    """One client that leaves at this moment, in one of the ways there are; whole answers have no moments to see."""
    stream = moment in ("admitted", "first token", "some tokens") or chance.random() < 0.5
    request = raw_request(LONG[: chance.randrange(20, 60)], stream=stream)
    head = request.index(b"\r\n\r\n") + 4
    cuts = {"in the head": chance.randrange(head), "in the body": chance.randrange(head, len(request))}
    sent = request[: cuts[moment]] if moment in cuts else request + chance.choice(STRAY)
    reader, writer = await connect(server, sent)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        if moment == "later":
            await asyncio.sleep(chance.random() * 0.1)
        for _ in range({"admitted": 1, "first token": 2, "some tokens": chance.randrange(3, 20)}.get(moment, 0)):
            await reader.readuntil(b"data: ")
    with contextlib.suppress(OSError):
        leave(writer, chance.choice(["close", "reset", "half"]))
        await asyncio.sleep(0.05)
    writer.transport.abort()


@pytest.fixture
def lines(caplog, monkeypatch):
    """The lines of the request log so far, as objects."""
    monkeypatch.setattr(logging.getLogger("kestrel.requests"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kestrel.requests")
    return lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "kestrel.requests"]


def resident(process: psutil.Process) -> int:
    """What a process has in memory, without garbage: how much of that waits to be collected is a matter of chance."""
    gc.collect()
    return process.memory_info().rss


async def test_a_thousand_leaves_leave_nothing_behind(server, lines):
    """Six at a time, at every moment and in every way, while others are served: no place, file, task or memory is kept,
    and what the log says of each request adds up to the counters."""
    chance = random.Random(13)
    process = psutil.Process()
    assert await ask(server, "first") == "first"
    files, tasks = process.num_fds(), len(asyncio.all_tasks())
    moments = [moment for moment in MOMENTS for _ in range(144)]
    chance.shuffle(moments)
    left = iter(moments)

    async def leave_often(times: int) -> None:
        """As many leaves, after which nobody is there any more."""

        async def leavers() -> None:
            for moment in itertools.islice(left, times // 6):
                await leave_at(server, chance, moment)

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(leavers())
        await server.idle()

    async def stayer() -> list[str]:
        return [await ask(server, f"the code word is {number}") for number in range(20)]

    server.model.pace = 0.0002
    async with asyncio.TaskGroup() as group:
        staying = group.create_task(stayer())
        await leave_often(402)
    memory = resident(process)
    await leave_often(606)
    assert next(left, None) is None
    assert resident(process) - memory < 606 * BYTES_PER_LEAVE
    assert staying.result() == [f"the code word is {number}" for number in range(20)]
    await server.idle()
    await server.until(lambda: process.num_fds() <= files and len(asyncio.all_tasks()) <= tasks)
    told, counts = [line for line in lines() if line.get("path") == COMPLETIONS], server.engine.counts()
    assert counts["active"] == counts["queued"] == counts["failed"] == 0
    assert counts["refused"] == sum("path" not in line for line in lines()), "bytes after a request that are none"
    assert counts["admitted"] == sum("id" in line for line in told)
    assert counts["completed"] == sum("finish_reason" in line for line in told)
    assert counts["completed"] + counts["left"] == len(told)
    generated = sum(line.get("generated_tokens", 0) for line in told)
    assert generated <= counts["generation_tokens"] <= generated + counts["left"], "at most the token under way is more"
    assert Counter(line["outcome"] for line in told).keys() == {"finished", "left"}


async def test_a_reader_that_never_reads_delays_nobody_and_can_leave():
    """About 6 MB of frames, more than any socket takes without being read."""
    top = tuple((token, -1.0) for token in range(65, 85))
    async with scripted_server(ScriptedModel(pace=0.0001, top=top, max_context=20_000)) as server:
        _, writer = await asyncio.open_connection(sock=stuck_socket(server.port))
        writer.write(raw_request("x" * 6000, stream=True, logprobs=True, top_logprobs=20))
        await server.until(lambda: server.model.begun > 0)
        [stream] = streams()
        assert await ask(server, "next") == "next"
        await server.idle()
        assert not stream.done()
        leave(writer, "reset")
        await server.until(stream.done)
        assert await ask(server, "again") == "again"
