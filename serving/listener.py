"""The listening socket: accepts connections, up to a number, and closes them in the end.

`hypercorn.asyncio.serve` does this too, but from Python 3.12 on its shutdown waits for every connection without a
limit, so that one client that does not read keeps the process alive (hypercorn issues 308 and 374).
"""

from __future__ import annotations

import asyncio
import json
import socket

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.utils import wrap_app
from quart import Quart

from serving import request_log
from serving.connection import Connection, Reader, discard
from serving.errors import ApiError
from serving.metrics import Metrics
from serving.settings import Settings

ABORTING_SECONDS = 1.0
TAKING_SECONDS = 3.0
TICK_SECONDS = 0.1
TOLD_AT_ONCE = 32  # clients too many; more are cut off without a word, since they cost open files too
SEND_BUFFER = 2**17  # bytes; the kernel would let a reader that never reads fill megabytes


class Listener:
    """Serves an application on a bound socket, which it takes over."""

    def __init__(self, app: Quart, bound: socket.socket, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._socket = bound
        self._settings = settings
        self._metrics = metrics
        self._turned_away = 0
        self._config = Config()
        self._config.accesslog = None
        self._context = WorkerContext(None)
        self._connections: dict[asyncio.Task[None], Connection] = {}

    async def start(self) -> None:
        """Starts the application and accepts connections."""
        self._set_options()
        await self._app.startup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(Reader(loop=loop), self._serve, loop=loop),
            sock=self._socket,
            backlog=self._settings.backlog,
        )

    def _set_options(self) -> None:
        """Options that every connection inherits."""
        # Frames must not wait until the client has confirmed the one before.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        # The kernel itself resets a connection whose client has taken nothing of what waits for it for so long.
        milliseconds = round(1e3 * self._settings.stall_timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    async def _serve(self, reader: Reader, writer: asyncio.StreamWriter) -> None:
        limit = self._settings.max_connections
        if limit and len(self._connections) >= limit:
            await self._turn_away(reader, writer)
            return
        app = wrap_app(self._app, self._config.wsgi_max_body_size, "asgi")
        connection = Connection(app, self._config, self._context, self._settings, reader, writer, self._refused)
        task = asyncio.current_task()
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)
        await connection.run()

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tells a client that there are too many, unless too many are being told."""
        self._turned_away += 1
        try:
            if self._turned_away <= TOLD_AT_ONCE:
                error = _too_many(len(self._connections))
                self._refused(error)
                writer.write(_plain_answer(error))
                writer.write_eof()
                await discard(reader)
        except OSError:
            pass
        finally:
            self._turned_away -= 1
            writer.transport.abort()

    def _refused(self, error: ApiError) -> None:
        """Notes what the application has not seen."""
        request_log.refused(error)
        self._metrics.unfinished("refused")

    async def finish(self, patience: float) -> None:
        """Accepts nothing more, closes idle connections, and waits until the others have taken their answers: up to
        `patience` seconds, or `TAKING_SECONDS` in which none of them takes anything."""
        self._server.close()
        await self._context.terminated.set()
        for connection in self._connections.values():
            connection.close_if_idle()
        loop = asyncio.get_running_loop()
        now, taken = loop.time(), -1
        end = silent_at = now + patience
        while self._connections and now < min(end, silent_at):
            before, taken = taken, sum(connection.taken for connection in self._connections.values())
            if taken != before:
                silent_at = now + TAKING_SECONDS
            await self._wait(min(TICK_SECONDS, end - now))
            now = loop.time()

    async def close(self) -> None:
        """Ends the connections that are left without a word, and the application."""
        self._server.close()
        for connection in self._connections.values():
            connection.abort()
        await self._wait(ABORTING_SECONDS)
        await self._app.shutdown()

    async def _wait(self, seconds: float) -> None:
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)


def _too_many(count: int) -> ApiError:
    """What a connection beyond the limit is told, whatever is asked on it."""
    message = f"{count} connections are open, which is the limit; retry later"
    return ApiError(503, message, code="too_many_connections")


def _plain_answer(error: ApiError) -> bytes:
    body = json.dumps(error.body).encode()
    head = "HTTP/1.1 503 \r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
