"""The listening socket: accepts connections and runs hypercorn's HTTP code on each of them.

`hypercorn.asyncio.serve` does this too, but two of its habits would hurt here. From Python 3.12 on its shutdown waits
for every connection without a limit, so that one client that does not read keeps the process alive (hypercorn issues
308 and 374). And it reads no further while bytes that follow a request are unhandled, so that it does not see such a
client leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from hypercorn.utils import wrap_app
from quart import Quart

from serving.errors import ApiError
from serving.settings import Settings

PARSING_SECONDS = 0.05  # ample for the bytes that came before the end; longer means that hypercorn has put them off
ABORTING_SECONDS = 1.0
DISCARDING_SECONDS = 2.0  # for what a client still sends when its answer is already there
TOLD_AT_ONCE = 32  # such clients; more are cut off without one, since they cost open files too


class Listener:
    """Serves an application on a bound socket, which it takes over."""

    def __init__(self, app: Quart, bound: socket.socket, settings: Settings, *, keep_alive: float) -> None:
        """`keep_alive` is how many seconds a connection may be idle."""
        self._app = app
        self._socket = bound
        self._backlog = settings.backlog
        self._max_connections = settings.max_connections
        self._turned_away = 0
        self._config = Config()
        self._config.keep_alive_timeout = keep_alive
        self._config.accesslog = None
        self._context = WorkerContext(None)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Starts the application and accepts connections."""
        # Inherited by every connection: frames must not wait until the client has confirmed the one before.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._app.startup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(loop=loop), self._serve, loop=loop),
            sock=self._socket,
            backlog=self._backlog,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._max_connections and len(self._connections) >= self._max_connections:
            await self._turn_away(reader, writer)
            return
        task = asyncio.current_task()
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)
        app = wrap_app(self._run_app, self._config.wsgi_max_body_size, "asgi")
        await _Connection(app, asyncio.get_running_loop(), self._config, self._context, {}, reader, writer)

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tells a client that there are too many, unless too many are being told."""
        self._turned_away += 1
        try:
            if self._turned_away <= TOLD_AT_ONCE:
                writer.write(_too_many(len(self._connections)))
                writer.write_eof()
                await _discard(reader)
        except OSError:
            pass
        finally:
            self._turned_away -= 1
            writer.transport.abort()

    async def _run_app(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope.get("path") == "":  # of "GET ?query", which Quart takes the first letter of
            scope["path"] = "/"
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
        else:
            await self._app(scope, receive, send)

    async def close(self, patience: float) -> None:
        """Accepts nothing more, closes idle connections, cuts the others off after `patience` seconds."""
        self._server.close()
        await self._context.terminated.set()
        await self._wait(patience)
        for writer in self._connections.values():
            writer.transport.abort()
        await self._wait(ABORTING_SECONDS)
        await self._app.shutdown()

    async def _wait(self, seconds: float) -> None:
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)


async def _discard(reader: asyncio.StreamReader) -> None:
    """Takes what a client still sends after its answer. To close on unread bytes would reset the connection, and many
    a client would lose the answer with it."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DISCARDING_SECONDS):
            while await reader.read(2**16):
                pass


def _too_many(count: int) -> bytes:
    """The answer to a connection beyond the limit, whatever is asked on it."""
    error = ApiError(503, f"{count} connections are open, which is the limit; retry later", code="too_many_connections")
    body = json.dumps(error.body).encode()
    head = "HTTP/1.1 503 \r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _refuse_websocket(send: ASGISendCallable) -> None:
    """Quart would run no `before_request` for it, and has no place for an answer other than its own."""
    error = ApiError(404, "there are no websockets here")
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": json.dumps(error.body).encode(), "more_body": False})


class _Reader(asyncio.StreamReader):
    """Knows at once when the client has ended its side, whatever is still unread."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.left = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.left.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)
        self.left.set()


class _Connection(TCPServer):
    """One connection. A client that has ended its side counts as gone, even if it could still read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refused = asyncio.Event()
        self._read = False

    async def _read_data(self) -> None:
        reading = asyncio.create_task(super()._read_data())
        leaving = asyncio.create_task(self.reader.left.wait())
        refusing = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({reading, leaving, refusing}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await asyncio.wait({reading}, timeout=PARSING_SECONDS)
                if not reading.done():
                    await self.protocol.handle(Closed())
        finally:
            leaving.cancel()
            refusing.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            self._read = True
        if self._refused.is_set():
            await _discard(self.reader)

    async def _close(self) -> None:
        """Leaves the closing to `_read_data` where a request was answered before all of it had come."""
        if self._read or not self._awaits_body():
            await super()._close()
            return
        self._refused.set()
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()

    def _awaits_body(self) -> bool:
        if not hasattr(self, "protocol"):  # hypercorn has not come so far
            return False
        connection = getattr(self.protocol.protocol, "connection", None)
        return getattr(connection, "their_state", None) is h11.SEND_BODY  # HTTP/2 has none
