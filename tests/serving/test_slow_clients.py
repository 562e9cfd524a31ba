"""Clients that are slow or stuck: each is told so or cut off in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest

from .chat_client import COMPLETIONS, ask, frames, raw_request, streams, stuck_socket, text_of
from .conftest import PATIENCE, Server, scripted_server
from .scripted_model import ScriptedModel
from .test_metrics import read

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT = 0.3  # seconds
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
TOP = tuple((token, -1.0) for token in range(65, 85))  # makes frames of 1.6 kB


@pytest.fixture(autouse=True)
async def deadline():
    """What should end does not keep the tests waiting for ever. The task of the fixture is not that of the test."""

    def end() -> None:
        for task in asyncio.all_tasks():
            task.cancel("it takes too long")

    timer = asyncio.get_running_loop().call_later(PATIENCE, end)
    yield
    timer.cancel()


async def connect(server: Server, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which some bytes have come before the server sees it, and so before its time begins to run."""
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(data)
    return await asyncio.open_connection(sock=client)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict]:
    """One answer with a JSON body."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    return int(head.split()[1]), json.loads(await reader.readexactly(int(fields["content-length"])))


async def assert_too_slow(reader: asyncio.StreamReader, part: str) -> None:
    """The connection ends with 408."""
    status, told = await answer(reader)
    assert status == 408
    assert part in told["error"]["message"]
    assert await reader.read() == b""


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, each well within every limit."""
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(SHORT / 20)


@pytest.mark.parametrize("begun", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", POST])
async def test_a_head_that_is_never_finished(begun):
    async with scripted_server(header_timeout=SHORT) as server:
        reader, writer = await connect(server, begun)
        await assert_too_slow(reader, "head")
        writer.close()


async def test_a_head_that_trickles():
    async with scripted_server(header_timeout=SHORT) as server:
        reader, writer = await connect(server, b"GET /health HTTP/1.1\r\nX: ")
        trickling = asyncio.create_task(trickle(writer, b"x" * 1000))
        await assert_too_slow(reader, "head")
        trickling.cancel()
        writer.close()


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word():
    """Browsers open some ahead of time, and would take an answer for that to their next request."""
    async with scripted_server(header_timeout=SHORT) as server:
        reader, writer = await connect(server)
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_closed_without_a_word():
    async with scripted_server(idle_timeout=SHORT) as server:
        reader, writer = await connect(server, HEALTH)
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""
        writer.close()


async def test_a_later_head_that_is_never_finished():
    async with scripted_server(header_timeout=SHORT) as server:
        reader, writer = await connect(server, HEALTH)
        assert (await answer(reader))[0] == 200
        writer.write(HEALTH[:-2])
        await assert_too_slow(reader, "head")
        writer.close()


async def test_between_requests_only_the_idle_limit_holds():
    async with scripted_server(header_timeout=SHORT) as server:
        reader, writer = await connect(server, HEALTH)
        assert (await answer(reader))[0] == 200
        await asyncio.sleep(2 * SHORT)
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_may_take_as_long_as_it_takes(stream):
    """None of the limits is for the server's own work, or for a client that reads."""
    async with scripted_server(
        header_timeout=SHORT, idle_timeout=SHORT, body_timeout=SHORT, stall_timeout=SHORT
    ) as server:
        server.model.hold_at = 3
        asking = asyncio.create_task(server.client.post(COMPLETIONS, content=raw_body("hello", stream), headers=JSON))
        await server.held()
        await asyncio.sleep(3 * SHORT)
        server.model.gate.set()
        response = await asking
        assert response.status_code == 200
        assert "hello" in (text_of(frames(response.text)) if stream else response.text)


JSON = {"Content-Type": "application/json"}


def raw_body(text: str, stream: bool) -> bytes:
    return raw_request(text, stream=stream).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "begun", [b'Content-Length: 100\r\n\r\n{"messages":', b'Transfer-Encoding: chunked\r\n\r\nc\r\n{"messages":\r\n']
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/tokenize"])
async def test_a_body_that_stops(path, begun):
    async with scripted_server(body_timeout=SHORT) as server:
        reader, writer = await connect(server, POST.replace(COMPLETIONS.encode(), path) + begun)
        await assert_too_slow(reader, "body")
        assert server.model.prepared == server.engine.total_requests == server.engine.queued == 0
        writer.close()


async def test_a_body_that_trickles():
    async with scripted_server(body_timeout=SHORT) as server:
        reader, writer = await connect(server, POST + b"Content-Length: 10000\r\n\r\n")
        trickling = asyncio.create_task(trickle(writer, b" " * 1000))
        await assert_too_slow(reader, "body")
        trickling.cancel()
        writer.close()


async def test_zero_is_no_limit():
    none = {"header_timeout": 0, "body_timeout": 0, "idle_timeout": 0, "stall_timeout": 0}
    async with scripted_server(**none) as server:
        reader, writer = await connect(server)
        request = raw_request("hello")
        for part in (HEALTH[:20], HEALTH[20:], request[:30], request[30:-5], request[-5:]):
            writer.write(part)
            await asyncio.sleep(SHORT)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]
        [connection] = server.listener._connections.values()
        assert connection._timer is None
        sent = connection._writer.get_extra_info("socket")
        assert sent.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        writer.close()


async def never_reading(server: Server, count: int) -> asyncio.StreamWriter:
    """A client of a stream of 1.6 kB times `count`, which the engine has taken up when this returns."""
    _, writer = await asyncio.open_connection(sock=stuck_socket(server.port))
    writer.write(raw_request("x" * count, stream=True, logprobs=True, top_logprobs=20))
    await server.until(lambda: server.model.begun > 0)  # not that it is active: it may be done before one looks
    return writer


async def test_a_reader_that_never_reads_is_cut_off():
    """In the middle of its stream, while another one runs on."""
    async with scripted_server(ScriptedModel(top=TOP, max_context=20_000), stall_timeout=2 * SHORT) as server:
        writer = await never_reading(server, 2000)
        assert await ask(server, "next") == "next"
        await server.until(lambda: not streams())
        await server.idle()
        samples = await read(server)
        left = samples.value("request_unfinished_total", outcome="left")
        assert samples.value("request_success_total", finished_reason="stop") + left == 2
        writer.close()


async def test_a_reader_that_never_reads_the_end_is_cut_off():
    """Its answer of 100 kB has been written; the connection would be kept for a next request, and count for ever."""
    async with scripted_server(ScriptedModel(top=TOP), max_connections=1, stall_timeout=2 * SHORT) as server:
        await server.client.aclose()
        client = stuck_socket(server.port)
        client.sendall(raw_request("x" * 60, logprobs=True, top_logprobs=20))
        try:
            while not await one_more_is_served(server):
                await asyncio.sleep(SHORT / 4)
        finally:
            client.close()


async def one_more_is_served(server: Server) -> bool:
    reader, writer = await connect(server, HEALTH)
    status, _ = await answer(reader)
    writer.close()
    return status == 200


async def test_little_is_kept_for_a_reader_that_never_reads():
    """Of a megabyte most waits, in the form of tokens, although the kernel would take all of it. When the client goes,
    its answer stays counted as one that the engine has completed."""
    async with scripted_server(ScriptedModel(top=TOP, max_context=20_000), stall_timeout=0) as server:
        writer = await never_reading(server, 600)
        [stuck] = streams()
        assert await ask(server, "x" * 600, logprobs=True, top_logprobs=20) == "x" * 600
        assert not stuck.done()
        writer.transport.abort()
        await server.until(lambda: not streams())
        samples = await read(server)
        assert samples.value("request_success_total", finished_reason="stop") == 2
        assert samples.value("request_unfinished_total", outcome="left") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_who_sends_on_and_on_while_being_answered_counts_as_gone(stream):
    """To read it all would cost memory, and not to read would hide whether the client is there."""
    async with scripted_server() as server:
        server.model.hold_at = 3
        _, writer = await connect(server, raw_request("hello", stream=stream))
        job = await server.held()
        writer.write(b"x" * 1_000_000)
        await server.until(lambda: job.cancelled)
        server.model.gate.set()
        await server.idle()
        assert await ask(server, "next") == "next"
        writer.close()


async def test_stray_bytes_with_a_request_do_not_hide_that_the_client_leaves():
    async with scripted_server() as server:
        server.model.hold_at = 3
        client = socket.create_connection(("127.0.0.1", server.port))
        client.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(client, raw_request("hello") + b"x" * 150_000)
        job = await server.held()
        client.close()
        await server.until(lambda: job.cancelled)
        server.model.gate.set()
        await server.idle()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n", 505),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_wrong_with_a_head_is_said_in_json(caplog, data, status):
    caplog.set_level(logging.INFO, logger="kestrel.requests")
    async with scripted_server() as server:
        reader, writer = await connect(server, data)
        found, told = await answer(reader)
        assert found == status
        assert list(told["error"]) == ["message", "type", "param", "code"]
        assert await reader.read() == b""
        writer.close()
        assert (await read(server)).value("request_unfinished_total", outcome="refused") == 1
    [line] = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kestrel.requests"]
    assert (line["status"], line["outcome"]) == (status, "refused")


async def test_an_offer_to_speak_http_2_is_not_taken_up():
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n"
    async with scripted_server() as server:
        reader, writer = await connect(server, HEALTH[:-2] + offer)
        assert (await answer(reader))[0] == 200
        writer.close()


async def bodies(server: Server) -> float:
    """Bytes of the bodies that are being taken in."""
    return (await read(server)).value("request_body_bytes")


async def test_the_bodies_of_all_requests_together():
    """They take up so much and no more; who comes on top is told at once, unless it is small."""
    large = {"messages": [{"role": "user", "content": "hi"}], "padding": "x" * 700_000}
    text = json.dumps(large).encode()
    head = POST + b"Content-Length: %d\r\n\r\n" % len(text)
    async with scripted_server(max_bodies_mb=1) as server:
        first, slow = await connect(server, head + text[:-1])
        while await bodies(server) < len(text) - 1:
            await asyncio.sleep(SHORT / 20)
        second, refused = await connect(server, head + text)
        status, told = await answer(second)
        assert (status, told["error"]["code"]) == (503, "bodies_full")
        assert await ask(server, "small") == "small"
        slow.write(text[-1:])
        assert (await answer(first))[0] == 200
        assert await bodies(server) == 0
        alone = await server.client.post(COMPLETIONS, json=large | {"padding": "x" * 2_000_000})
        assert alone.status_code == 200, "one body may be as large as it likes"
        for writer in (slow, refused):
            writer.close()


@pytest.mark.parametrize("limit", [1, 32])
async def test_a_body_without_a_length_is_as_limited(limit):
    async def parts():
        for _ in range(40):
            yield b" " * 50_000

    async with scripted_server(max_body_bytes=limit * 10**6) as server:
        headers = {"Content-Type": "application/json"}
        told = await server.client.post(COMPLETIONS, content=parts(), headers=headers)
        assert told.status_code == (413 if limit == 1 else 400)
        assert await bodies(server) == 0
