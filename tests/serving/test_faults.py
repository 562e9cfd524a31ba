"""What goes wrong around a stream: clients that leave, queues that fill, engines that fail."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time

import pytest

from .conftest import paced_server
from .paced_model import PacedModel

LONG = "slow " + "word " * 200


def body(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], **fields}


def raw_request(text: str, **fields) -> bytes:
    payload = json.dumps(body(text, **fields)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


async def texts(server, text: str) -> str:
    """The streamed answer."""
    pieces = []
    async with server.client.stream("POST", "/v1/chat/completions", json=body(text, stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                if "error" in frame:
                    pieces.append(f"[{frame['error']['message']}]")
                else:
                    pieces += [choice["delta"].get("content", "") for choice in frame["choices"]]
            elif line == "data: [DONE]":
                pieces.append("[DONE]")
    return "".join(pieces)


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """Closes a connection: in order, or with a reset."""
    if how == "reset":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stray", [b"", b"\r\n"])
@pytest.mark.parametrize("text", [LONG, "prefill " + LONG])
async def test_a_client_that_leaves_stops_its_generation(server, text, stray, how):
    """During prefill and during decoding, with and without stray bytes after the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request(text, stream=True) + stray)
    await writer.drain()
    await reader.readuntil(b'"assistant"')
    if "prefill" not in text:
        await reader.readuntil(b"word")
    await server.until(lambda: server.engine.active == 1)
    leave(writer, how)
    await server.until(lambda: server.engine.active == 0)
    steps = server.model.steps
    assert await texts(server, "next") == "next [DONE]"
    assert server.model.steps == steps + 1, "nothing was generated for a client that had left"
    assert server.engine.queued == 0


async def test_leaving_before_the_answer_begins(server):
    """Fifty clients that hang up right after their request, streamed and not."""
    for attempt in range(50):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw_request(LONG, stream=attempt % 2 == 0))
        await writer.drain()
        leave(writer, "reset" if attempt % 3 else "close")
    await server.until(lambda: server.engine.active == server.engine.queued == 0)
    assert await texts(server, "next") == "next [DONE]"


async def test_leaving_the_queue_gives_the_place_back(server):
    running = asyncio.create_task(texts(server, LONG))
    await server.until(lambda: server.engine.active == 1)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request("queued", stream=True))
    await server.until(lambda: server.engine.queued == 1)
    leave(writer, "close")
    await server.until(lambda: server.engine.queued == 0)
    assert server.engine.active == 1
    running.cancel()


async def test_leaving_a_whole_answer_stops_it(server):
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request(LONG))
    await server.until(lambda: server.engine.active == 1)
    leave(writer, "close")
    await server.until(lambda: server.engine.active == 0)
    assert server.model.steps < 100


async def test_a_full_queue_refuses_at_once_and_does_no_work():
    async with paced_server(max_queued=1) as server:
        running = [asyncio.create_task(texts(server, LONG)) for _ in range(2)]
        await server.until(lambda: (server.engine.active, server.engine.queued) == (1, 1))
        prompts = server.model.prompts
        refused = await server.client.post("/v1/chat/completions", json=body("more"))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.model.prompts == prompts
        for task in running:
            task.cancel()
        await server.until(lambda: server.engine.active == server.engine.queued == 0)
        assert await texts(server, "next") == "next [DONE]"


async def test_requests_run_one_after_the_other_and_do_not_mix(server):
    words = [f"code{index}" for index in range(8)]
    answers = await asyncio.gather(*(texts(server, f"slow {word} {word}") for word in words))
    assert answers == [f"slow {word} {word} [DONE]" for word in words]


async def test_a_fault_in_the_engine_ends_its_own_request_only(server, caplog):
    answer = await texts(server, "one fail two")
    assert answer == "one [the engine failed on this request][DONE]"
    whole = await server.client.post("/v1/chat/completions", json=body("one fail"))
    assert whole.status_code == 500
    assert "Traceback" not in whole.text
    assert await texts(server, "next") == "next [DONE]"
    assert "the scripted fault" in caplog.text


async def test_a_refused_conversation_is_a_client_error(server):
    answer = await server.client.post("/v1/chat/completions", json=body("refuse", stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the conversation is refused"
    assert server.engine.queued == 0


async def test_a_model_that_cannot_be_loaded():
    def load() -> PacedModel:
        raise OSError("no such disk")

    async with paced_server(load=load) as server:
        await server.until(lambda: server.engine.state == "error")
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "error")
        refused = await server.client.post("/v1/chat/completions", json=body("hi"))
        assert refused.status_code == 503
        assert "no such disk" in refused.json()["error"]["message"]


async def test_while_loading_health_answers_and_requests_are_refused():
    go = threading.Event()
    model = PacedModel()

    def load() -> PacedModel:
        go.wait(5)
        return model

    async with paced_server(model, load=load) as server:
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        refused = await server.client.post("/v1/chat/completions", json=body("hi"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["retry-after"] == "5"
        go.set()
        await server.until(lambda: server.engine.state == "ok")
        assert await texts(server, "hi") == "hi [DONE]"


async def test_draining_finishes_what_runs_and_refuses_the_rest(server):
    running = asyncio.create_task(texts(server, "slow a b c"))
    await server.until(lambda: server.engine.active == 1)
    draining = asyncio.create_task(server.engine.drain(5))
    await asyncio.sleep(0)
    health = await server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    refused = await server.client.post("/v1/chat/completions", json=body("late"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert await running == "slow a b c [DONE]"
    await draining


async def test_draining_ends_a_stream_that_takes_too_long(server):
    running = asyncio.create_task(texts(server, LONG))
    await server.until(lambda: server.model.steps > 2)
    await server.engine.drain(0.05)
    assert (await running).endswith("[the server is shutting down][DONE]")


async def test_a_reader_that_never_reads_delays_nobody(server):
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request("word " * 900, stream=True))
    await server.until(lambda: server.engine.total_requests == 1)
    start = time.monotonic()
    assert await texts(server, "next") == "next [DONE]"
    assert time.monotonic() - start < 2
    leave(writer, "reset")


async def test_silence_is_filled_with_comments():
    async with paced_server(PacedModel(step_seconds=0.1), ping_seconds=0.03) as server:
        response = await server.client.post("/v1/chat/completions", json=body("slow prefill", stream=True))
        lines = [line for line in response.text.splitlines() if line]
        assert ": waiting" in lines
        assert all(line.startswith(("data: ", ":")) for line in lines)


async def test_a_stream_outlives_quarts_own_timeout():
    """Quart cuts a response off after RESPONSE_TIMEOUT seconds, without an end, unless it is told otherwise."""
    async with paced_server(app_config={"RESPONSE_TIMEOUT": 0.1}) as server:
        assert (await texts(server, "slow " + "word " * 20)).endswith("word [DONE]")
