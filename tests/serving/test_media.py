"""Pictures in requests: taken from data URLs alone, refused by name, and decoded for admitted requests only."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import time
import zlib

import pytest
from PIL import Image

from serving import media

from .chat_client import COMPLETIONS, frames, text_of
from .conftest import Server, scripted_server

PLACE = "messages.0.content.0.image_url.url"


def png(width: int = 64, height: int = 64, **options) -> bytes:
    """A red picture."""
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), (width, height), options.pop("colour", "red")).save(file, "PNG", **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def about(*urls: str, **fields) -> dict:
    """A request with pictures and a question."""
    pictures = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return {"messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": "what?"}]}], **fields}


async def refused(server: Server, request: dict) -> dict:
    """The error of a request that is refused, the same in both modes."""
    errors = []
    for stream in (False, True):
        response = await server.client.post(COMPLETIONS, json=request | {"stream": stream})
        assert response.status_code == 400, response.text
        errors.append(response.json()["error"])
    assert errors[0] == errors[1]
    assert server.engine.active == server.engine.queued == 0
    return errors[0]


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "image/png;charset=utf-8", "application/octet-stream", ""])
async def test_pictures_become_visual_tokens(server, kind):
    """What the bytes are counts, not what the URL says of them."""
    request = about(data_url(png(), kind), data_url(png(30, 305)), stream_options={"include_tokens": True})
    answer = (await server.client.post(COMPLETIONS, json=request)).json()
    assert answer["choices"][0]["message"]["content"] == "what?"
    pad = server.model.tokenizer.id_of("<|image_pad|>")
    assert answer["history_tokens"].count(pad) > 64


async def test_a_streamed_answer_to_a_picture(server):
    response = await server.client.post(COMPLETIONS, json=about(data_url(png()), stream=True))
    assert text_of(frames(response.text)) == "what?"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/x.png",
        "https://127.0.0.1:{port}/x.png",
        "//127.0.0.1:{port}/x.png",
        "ftp://127.0.0.1:{port}/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "x.png",
    ],
)
async def test_nothing_is_ever_fetched(server, url):
    connections = []
    listener = await asyncio.start_server(lambda reader, writer: connections.append(writer), "127.0.0.1", 0)
    url = url.format(port=listener.sockets[0].getsockname()[1])
    error = await refused(server, about(url))
    assert error["param"] == PLACE
    assert "data URL" in error["message"]
    listener.close()
    assert not connections


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,rawbytes",
        "data:image/png;base64,",
        "data:image/png;base64,####",
        "data:image/png;base64,AAA",
        "data:image/png;base64,é",
        data_url(b"not a picture"),
        data_url(png()[:60]),
        data_url(png(1, 300)),
        data_url(b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "image/svg+xml"),
    ],
)
async def test_pictures_that_cannot_be_used(server, url):
    assert (await refused(server, about(data_url(png()), url)))["param"] == PLACE.replace("content.0", "content.1")


def bomb(width: int, height: int) -> bytes:
    """A small file that says it holds a huge picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + width // 8) * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def test_a_tiny_file_with_an_enormous_picture_is_refused_by_its_header(server):
    begin = time.monotonic()
    error = await refused(server, about(data_url(bomb(30_000, 30_000))))
    assert "at most 50000000" in error["message"]
    assert error["param"] == PLACE
    assert time.monotonic() - begin < 2


async def test_too_many_pictures(server):
    assert "16" in (await refused(server, about(*[data_url(png())] * 17)))["message"]


async def test_only_admitted_requests_are_decoded(monkeypatch):
    """A burst beyond the queue costs nothing."""
    decoded = []
    monkeypatch.setattr(media, "open_image", lambda data: decoded.append(1) or Image.new("RGB", (64, 64)))
    async with scripted_server(max_queued=1) as server:
        server.model.hold_at = 1
        request = about(data_url(png()))
        burst = [asyncio.create_task(server.client.post(COMPLETIONS, json=request)) for _ in range(8)]
        await server.until(lambda: sum(task.done() for task in burst) == 6)
        assert {task.result().status_code for task in burst if task.done()} == {429}
        await server.held()
        server.model.gate.set()
        answers = await asyncio.gather(*burst)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6
    assert len(decoded) == 2


async def test_decoding_does_not_hold_the_event_loop(server, monkeypatch):
    monkeypatch.setattr(media, "open_image", lambda data: time.sleep(0.5) or Image.new("RGB", (64, 64)))
    slow = asyncio.create_task(server.client.post(COMPLETIONS, json=about(data_url(png()))))
    await server.until(lambda: server.engine.queued == 1)
    begin = time.monotonic()
    assert (await server.client.get("/health")).json()["queued"] == 1
    assert time.monotonic() - begin < 0.3
    assert (await slow).status_code == 200
