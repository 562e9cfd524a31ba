"""HTTP down to the socket, for clients that measure: when each frame of a stream arrives, and how a connection ends."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from experiments.server_process import Server

CHAT = "/v1/chat/completions"
LINE_LIMIT = 2**20
SMALL_BUFFER = 4096


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message as a request carries it: its pictures as PNG in data URLs."""
    if isinstance(message["content"], str):
        return message
    return message | {"content": [_part_as_sent(part) for part in message["content"]]}


def _part_as_sent(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    file = io.BytesIO()
    part["image"].save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


class BrokenError(Exception):
    """The connection ended before the answer did."""


@dataclass
class Connection:
    """One connection to a server. Times are seconds on the monotonic clock, which all processes share."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str = "localhost"
    key: str = ""

    def send(self, method: str, path: str, body: bytes | None = None, length: int | None = None) -> None:
        """Writes a request; `length` may announce another length than the body's."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\n"
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n"
        self.writer.write(head.encode() + b"\r\n" + (body or b""))

    async def status(self) -> tuple[int, dict[str, str]]:
        """The status and the headers of the answer, their names in small letters.

        Raises:
            BrokenError: there is none.
        """
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError) as error:
            raise BrokenError(f"no answer: {error!r}") from None
        first, *lines = head.decode("latin-1").split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines if line)

    async def object(self, headers: dict[str, str]) -> dict[str, Any]:
        """The JSON object of an answer that does not stream.

        Raises:
            BrokenError: it is not there in full.
        """
        try:
            return json.loads(await self.reader.readexactly(int(headers["content-length"])))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise BrokenError(f"no body: {error!r}") from None

    async def frames(self) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """The objects of a stream as they arrive, each with its time, up to `[DONE]`.

        Raises:
            BrokenError: the stream ends without it.
        """
        while True:
            try:
                line = await self.reader.readline()
            except OSError as error:
                raise BrokenError(f"in the stream: {error!r}") from None
            arrived = time.monotonic()
            if not line:
                raise BrokenError("the stream ended without [DONE]")
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                yield arrived, json.loads(line[6:])


def host_header(server: Server) -> str:
    """What requests call the server."""
    return f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}"


@asynccontextmanager
async def connected(server: Server, *, stuck: bool = False) -> AsyncIterator[Connection]:
    """A connection, closed in the end; a `stuck` one takes little without being read."""
    client = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
    client.setblocking(False)
    if stuck:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    try:
        await asyncio.get_running_loop().sock_connect(client, (server.host, server.port))
    except BaseException:
        client.close()
        raise
    limit = 4 * SMALL_BUFFER if stuck else LINE_LIMIT
    secured = {"ssl": ssl.create_default_context(), "server_hostname": server.host} if server.tls else {}
    reader, writer = await asyncio.open_connection(sock=client, limit=limit, **secured)
    try:
        yield Connection(reader, writer, host_header(server), server.key)
    finally:
        writer.transport.abort()


async def fetch(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """Status and object of one request on a connection of its own.

    Raises:
        BrokenError: there is no complete answer.
    """
    async with connected(server) as connection:
        connection.send(method, path, body)
        status, headers = await connection.status()
        return status, await connection.object(headers)
