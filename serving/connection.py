"""One connection: HTTP/1.1 by hypercorn's parser and ASGI code, and limits on how long a client may take.

It stands in the place of hypercorn's `TCPServer`, which reads no further while bytes that follow a request are
unhandled, so that it does not see such a client leave; which knows one limit for idle connections and slow heads; and
which lets errors of the socket other than a broken connection out into the application (hypercorn issue 361).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import fcntl
import json
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from serving.errors import ApiError
from serving.settings import Settings

READ_BYTES = 2**16
MOST_AHEAD = 2**16  # bytes after a request that is being answered; a client that sends more has lost its way
PARSING_SECONDS = 0.05  # ample for the bytes that came before the end; longer means that hypercorn has put them off
DISCARDING_SECONDS = 10.0  # for what a client still sends when its answer is already there
SILENCE_SECONDS = 2.0  # in that time


class Reader(asyncio.StreamReader):
    """What the client sends. Knows at once when it has ended its side, whatever is still unread."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(2**20, loop=loop)  # so much that reading never pauses before `MOST_AHEAD` is noticed
        self.left = False
        self.ending = asyncio.Event()  # nothing more is to be read: the client has left, or the server has said its all
        self.answering: Callable[[], bool] = lambda: False  # whether a request has come in full, its answer has not
        self._unread = 0

    async def read(self, n: int = -1) -> bytes:
        data = await super().read(n)
        self._unread -= len(data)
        return data

    def feed_data(self, data: bytes) -> None:
        super().feed_data(data)
        self._unread += len(data)
        if self._unread > MOST_AHEAD and self.answering():
            self._leave()

    def feed_eof(self) -> None:
        super().feed_eof()
        self._leave()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)
        self._leave()

    def _leave(self) -> None:
        self.left = True
        self.ending.set()


async def discard(reader: asyncio.StreamReader) -> None:
    """Takes what a client still sends after its answer. To close on unread bytes would reset the connection, and many
    a client would lose the answer with it."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DISCARDING_SECONDS):
            data = b"more"
            while data:
                async with asyncio.timeout(SILENCE_SECONDS):
                    data = await reader.read(READ_BYTES)


class _Http1(H11Protocol):
    """Says what is wrong with a request as JSON too, and speaks HTTP/1 only: one connection with many streams would
    pass by the limits that hold per connection. The connection ends with what it refuses."""

    on_refusal: Callable[[ApiError], None]

    @property
    def awaits_body(self) -> bool:
        """Whether the client may still be sending what nobody will read."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    def answering(self) -> bool:
        """Whether a request has come in full and is not yet answered."""
        return self.stream is not None and self.connection.their_state in (h11.DONE, h11.MUST_CLOSE)

    async def handle(self, event: Event) -> None:
        try:
            await super().handle(event)
        except ApiError as error:
            await self._refuse(error)
            await self.send(Closed())

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and self.awaits_body:  # the client must not send another request here
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def refuse_slow_head(self) -> None:
        """Says that the head of a request has taken too long."""
        await self._send_error_response(HTTPStatus.REQUEST_TIMEOUT)

    async def _check_protocol(self, event: h11.Request) -> None:
        if not event.http_version.startswith(b"1."):
            raise _head_error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        if any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in event.headers):
            # Hypercorn would keep the connection for ever if the rest of the handshake is wrong.
            raise ApiError(404, "there are no websockets here")

    async def _create_stream(self, request: h11.Request) -> None:
        target = _origin_form(request.target)
        method, headers, version = request.method, request.headers, request.http_version
        await super()._create_stream(h11.Request(method=method, target=target, headers=headers, http_version=version))

    async def _send_error_response(self, status_code: int) -> None:
        await self._refuse(_head_error(status_code))

    async def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
        self.on_refusal(error)
        await self._send_h11_event(h11.Response(status_code=error.status, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _origin_form(target: bytes) -> bytes:
    """The path and query of a request's target, which may also be a whole address (RFC 9112, 3.2). Quart would
    take it apart after its percent signs have been decoded, and fail where that is no address.

    Raises:
        ApiError: 400 for what is no address.
    """
    if target.startswith(b"/"):
        return target
    try:
        address = urlsplit(target)
    except ValueError:
        raise ApiError(400, "the request's target is not a valid address") from None
    path = address.path if address.path.startswith(b"/") else b"/" + address.path
    return path + (b"?" + address.query if address.query else b"")


def _head_error(status: int) -> ApiError:
    """What is wrong with a request that no route has seen."""
    messages = {
        HTTPStatus.REQUEST_TIMEOUT: "the head of the request took too long",
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the head of the request is too large",
        HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "the request should be HTTP/1.1",
    }
    return ApiError(status, messages.get(status, "the request is not valid HTTP/1.1"))


class Connection:
    """Serves what comes on one connection, until the client has ended its side (even if it could still read), or takes
    longer than it may."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        limits: Settings,
        reader: Reader,
        writer: asyncio.StreamWriter,
        on_refusal: Callable[[ApiError], None],
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._limits = limits
        self._reader = reader
        self._writer = writer
        self._on_refusal = on_refusal
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        # Timers that are cancelled stay with the loop for a while; in this context they hold no request.
        self._own_context = contextvars.copy_context()
        self._idle = True  # no request has come, or the last one has been answered
        self._head_begun = False
        self._expired = False
        self._written = 0

    async def run(self) -> None:
        """Serves; returns when the connection is closed."""
        family = self._writer.get_extra_info("socket").family
        client, server = self._writer.get_extra_info("peername"), self._writer.get_extra_info("sockname")
        try:
            if client is None or server is None:  # it was gone before it could be served
                return
            async with TaskGroup(asyncio.get_running_loop()) as tasks:
                self._protocol = _Http1(
                    self._app,
                    self._config,
                    self._context,
                    tasks,
                    ConnectionState({}),
                    False,
                    parse_socket_addr(family, client),
                    parse_socket_addr(family, server),
                    self._send,
                )
                self._protocol.on_refusal = self._on_refusal
                self._reader.answering = self._protocol.answering
                self._allow(self._limits.header_timeout)
                await self._read()
        finally:
            await self._close()

    @property
    def taken(self) -> int:
        """How many bytes of answers have reached the client."""
        waiting = bytearray(4)
        with contextlib.suppress(OSError, ValueError):  # not Linux, or closed
            fcntl.ioctl(self._writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
        kernel = int.from_bytes(waiting, sys.byteorder)
        return self._written - self._writer.transport.get_write_buffer_size() - kernel

    def close_if_idle(self) -> None:
        """Ends the connection unless a request is under way."""
        if self._idle:
            self._reader.ending.set()

    def abort(self) -> None:
        """Ends the connection without a word."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        feeding = asyncio.create_task(self._feed())
        ending = asyncio.create_task(self._reader.ending.wait())
        try:
            await asyncio.wait({feeding, ending}, return_when=asyncio.FIRST_COMPLETED)
            if self._reader.left:
                await asyncio.wait({feeding}, timeout=PARSING_SECONDS)
        finally:
            for task in (feeding, ending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        slow_head = self._expired and self._head_begun and not self._reader.left
        if slow_head:
            await self._protocol.refuse_slow_head()
        await self._protocol.handle(Closed())
        if not self._reader.left and (slow_head or self._protocol.awaits_body):
            self._end_writing()
            await discard(self._reader)

    async def _feed(self) -> None:
        """Hands on what comes, until the client ends its side."""
        with contextlib.suppress(OSError):
            while data := await self._reader.read(READ_BYTES):
                if self._idle and not self._head_begun:
                    self._head_begun = True
                    self._allow(self._limits.header_timeout)
                await self._protocol.handle(RawData(data))

    async def _send(self, event: Event) -> None:
        """Takes what hypercorn's code has to say: bytes, whether a request is under way, and that nothing follows."""
        if isinstance(event, RawData):
            try:
                async with self._writing:
                    self._written += len(event.data)
                    self._writer.write(event.data)
                    await self._writer.drain()
            except (OSError, RuntimeError):
                await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._idle = event.idle
            self._head_begun = False
            self._allow(self._limits.idle_timeout if event.idle else 0)
        elif isinstance(event, Closed):
            self._end_writing()
            self._reader.ending.set()

    def _end_writing(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    def _allow(self, seconds: float) -> None:
        """Ends the connection after so many seconds, if this is not called again before; 0: never."""
        if self._timer is not None:
            self._timer.cancel()
        loop, context = asyncio.get_running_loop(), self._own_context
        self._timer = loop.call_later(seconds, self._expire, context=context) if seconds else None

    def _expire(self) -> None:
        self._expired = True
        self._reader.ending.set()

    async def _close(self) -> None:
        """Waits until the client has taken everything; one that takes nothing, the kernel cuts off."""
        self._allow(0)
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
            await self._writer.wait_closed()
