"""The clients of `experiments.soak`: they ask, leave, err and stall, as a seeded generator of random numbers says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from experiments.http_client import CHAT, BrokenError, Connection, as_sent, connected, fetch
from experiments.server_process import Server
from experiments.tiny_pictures import picture_tasks
from experiments.tiny_tasks import REPEAT_EN, code_word, user

LIMIT_SECONDS = 2  # the server's for slow clients, so that a stall is over soon
MOST_BODY_BYTES = 2**20
MAX_CONTEXT = 640  # tokens: a cache that is soon filled once, so that its memory counts from the beginning
SERVER_ARGUMENTS = ("--header-timeout", "--body-timeout", "--stall-timeout")
PATIENCE = 60  # seconds after which what has not ended is lost; a stall must be cut off much earlier
PAUSE = 0.1  # seconds between a client's requests, on average
RECENT = 2000  # code words that no other request's answer may have
PICTURES = 12
BUSY = {429: "turned away", 503: "turned away"}


def server_arguments() -> list[str]:
    """The limits that the clients run into."""
    seconds = [argument for name in SERVER_ARGUMENTS for argument in (name, str(LIMIT_SECONDS))]
    return [*seconds, "--max-body-bytes", str(MOST_BODY_BYTES), "--max-context", str(MAX_CONTEXT)]


@dataclass
class Record:
    """What became of one request. `outcome` is `answered`, `turned away` (too many wait), `refused` (as it should be),
    `left` (as it meant to), `cut off` (as it should be) or `lost`: then `note` says why. `mixed` tells that an answer
    had another request's code word or changed its id, `exact` that it was what was to be repeated. Times in
    milliseconds; `start` in seconds since the beginning."""

    kind: str
    start: float
    outcome: str = "lost"
    note: str = ""
    mixed: bool = False
    exact: bool | None = None
    ttft_ms: float | None = None
    gaps_ms: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """What is worth keeping."""
        row = asdict(self) | {"mixed": self.mixed or None}
        return {name: value for name, value in row.items() if value not in ("", None, [])}


class Soak:
    """A number of clients, all of one server, until the time is over."""

    def __init__(
        self, server: Server, seed: int, control_tokens: Iterable[int], ended: Callable[[Record], None]
    ) -> None:
        """`control_tokens` are the ids of those that can end an answer; `ended` gets the record of every request."""
        self._server = server
        self._seed = seed
        self._no_end = {str(token): -100 for token in control_tokens}
        self._ended = ended
        self._begin = time.monotonic()
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._pictures = [_picture_message(Random(f"{seed} picture {index}")) for index in range(PICTURES)]
        self._kinds: dict[str, tuple[int, Callable[[Random, Record], Awaitable[None]]]] = {
            "stream": (40, self._stream),
            "whole": (14, self._whole),
            "picture": (8, self._picture),
            "other": (6, self._other),
            "leave": (18, self._leave),
            "garbage": (12, self._garbage),
            "stall": (2, self._stall),
        }

    async def run(self, clients: int, seconds: float) -> None:
        """Lets the clients loose; each ends with the request that it has begun."""
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(Random(f"{self._seed} {number}"), self._begin + seconds))

    async def _client(self, random: Random, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(random.expovariate(1 / PAUSE))
            [kind] = random.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])
            record = Record(kind, round(time.monotonic() - self._begin, 3))
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._kinds[kind][1](random, record)
            except (BrokenError, OSError, EOFError) as error:
                record.note = str(error)
            except TimeoutError:
                record.note = f"not over after {PATIENCE} s"
            self._ended(record)

    # What is asked for, and what should come

    def _words(self, random: Random) -> list[str]:
        """Code words of one request's own."""
        words = [code_word(random) for _ in range(random.randint(1, 4))]
        self._recent.extend(words)
        return words

    async def _stream(self, random: Random, record: Record) -> None:
        words = self._words(random)
        text = random.choice(REPEAT_EN).format(t=" ".join(words))
        self._compare(record, words, await self._streamed([user(text)], record))

    async def _picture(self, random: Random, record: Record) -> None:
        await self._streamed([random.choice(self._pictures)], record)

    async def _streamed(self, messages: list[dict[str, Any]], record: Record) -> str:
        """The text of a streamed answer; notes when its pieces came."""
        async with connected(self._server) as connection:
            begun = time.monotonic()
            connection.send("POST", CHAT, _body(messages, stream=True))
            status, headers = await connection.status()
            if status != 200:
                return _note_refusal(record, status, await connection.object(headers), BUSY)
            text, times, ids, finish = "", [], set(), None
            async for arrived, frame in connection.frames():
                if "error" in frame:
                    raise BrokenError(frame["error"]["message"])
                ids.add(frame["id"])
                choice = frame["choices"][0]
                finish = choice["finish_reason"] or finish
                if choice["delta"].get("content"):
                    text += choice["delta"]["content"]
                    times.append(arrived)
        if finish is None:
            raise BrokenError("the stream has no finish_reason")
        record.outcome, record.mixed = "answered", len(ids) > 1
        if times:
            record.ttft_ms = round(1e3 * (times[0] - begun), 2)
            record.gaps_ms = [round(1e3 * (after - before), 2) for before, after in pairwise(times)]
        return text

    async def _whole(self, random: Random, record: Record) -> None:
        words = self._words(random)
        body = _body([user(random.choice(REPEAT_EN).format(t=" ".join(words)))])
        status, told = await fetch(self._server, "POST", CHAT, body)
        if status != 200:
            _note_refusal(record, status, told, BUSY)
            return
        record.outcome = "answered"
        self._compare(record, words, told["choices"][0]["message"]["content"])

    def _compare(self, record: Record, words: list[str], answer: str) -> None:
        if record.outcome == "answered":
            others = set(self._recent).difference(words)
            record.mixed = record.mixed or any(piece in others for piece in answer.split())
            record.exact = answer.split() == words

    async def _other(self, random: Random, record: Record) -> None:
        words = " ".join(self._words(random))
        message = {"messages": [user(words)], "max_tokens": 8}
        method, path, fields = random.choice(
            [
                ("GET", "/health", None),
                ("GET", "/v1/models", None),
                ("POST", "/tokenize", {"prompt": words}),
                ("POST", "/v1/completions", {"prompt": words, "max_tokens": 8}),
                ("POST", "/v1/messages", message),
            ]
        )
        body = None if fields is None else json.dumps(fields).encode()
        status, told = await fetch(self._server, method, path, body)
        if status == 200:
            record.outcome = "answered"
        else:
            _note_refusal(record, status, told, BUSY)

    # What should not come, and is to do no harm

    async def _leave(self, random: Random, record: Record) -> None:
        """Goes at any moment: in the head, in the body, at once, later, or after some frames."""
        text = random.choice(REPEAT_EN).format(t=" ".join(self._words(random)))
        moment = random.choice(("head", "body", "at once", "later", "frames", "frames"))
        body = _body([user(text)], stream=moment == "frames" or random.random() < 0.6)
        async with connected(self._server) as connection:
            if moment == "head":
                connection.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x"[: random.randint(1, 40)])
            else:
                part = body[: random.randrange(len(body))] if moment == "body" else body
                connection.send("POST", CHAT, part, len(body))
                if moment != "body" and random.random() < 0.3:
                    connection.writer.write(random.choice((b"\r\n", b"x" * 100, b"GET /health HTTP/1.1\r\n\r\n")))
            if moment == "later":
                await asyncio.sleep(random.random())
            if moment == "frames":
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # or its answer is over
                    async with asyncio.timeout(PATIENCE / 2):
                        for _ in range(random.randint(1, 12)):
                            await connection.reader.readuntil(b"data: ")
            await _go(connection, random.choice(("close", "reset", "half")))
        record.outcome = "left"

    async def _garbage(self, random: Random, record: Record) -> None:
        """What must be refused."""
        valid = {"messages": [user("hello")]}
        wrong: list[dict[str, Any]] = [
            {"temperature": 5},
            {"messages": []},
            {"messages": [{"role": "nobody", "content": "a"}]},
            {"n": 0},
            {"max_tokens": "many"},
            {"stop": [""]},
            {"messages": [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])]},
        ]
        bodies = [json.dumps(valid | fields).encode() for fields in wrong]
        expected = 400
        kind = random.choice(("fields", "fields", "bytes", "model", "path", "announced", "large"))
        length, path = None, CHAT
        if kind == "fields":
            body = random.choice(bodies)
        elif kind == "bytes":
            body = random.choice((b"", b"\xff\xfe", b'{"messages":', b"[" * 5000, b"null"))
        elif kind == "model":
            body, expected = json.dumps(valid | {"model": "no-such-model"}).encode(), 404
        elif kind == "path":
            body, path, expected = b"{}", "/v1/nowhere", 404
        elif kind == "announced":
            body, length, expected = b"{", 2**40, 413
        else:
            body, expected = b" " * (2 * MOST_BODY_BYTES), 413
        async with connected(self._server) as connection:
            connection.send("POST", path, body, length)
            status, headers = await connection.status()
            _note_refusal(record, status, await connection.object(headers), BUSY | {expected: "refused"})

    async def _stall(self, random: Random, record: Record) -> None:
        """Stops in the head or the body, or reads no further in a long answer; each must be cut off."""
        where = random.choice(("head", "body", "answer"))
        async with connected(self._server, stuck=True) as connection:
            if where == "head":
                connection.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            elif where == "body":
                connection.send("POST", CHAT, b'{"messages":', 1000)
            else:
                endless = {"logit_bias": self._no_end, "max_tokens": 400}
                connection.send("POST", CHAT, _body([user("hello")], stream=True, top=20, **endless))
                status, headers = await connection.status()
                if status != 200:
                    _note_refusal(record, status, await connection.object(headers), BUSY)
                    return
                for _ in range(3):  # the role, and the beginning of the text
                    await connection.reader.readuntil(b"data: ")
                await asyncio.sleep(3 * LIMIT_SECONDS)
            await self._cut_off(connection, where, record)

    async def _cut_off(self, connection: Connection, where: str, record: Record) -> None:
        """Reads to the end, which must be there soon."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while data := await connection.reader.read(2**16):
                found += data
        status = found.removeprefix(b"HTTP/1.1 ")[:3]
        cut = b"[DONE]" not in found if where == "answer" else status == b"408"
        if where == "body" and status in (b"429", b"503"):  # said before the body, of which nothing is waited for
            record.outcome = BUSY[int(status)]
        elif cut:
            record.outcome = "cut off"
        else:
            record.note = f"a stall in the {where} went on: {found[-80:]!r}"


def _body(messages: list[dict[str, Any]], *, stream: bool = False, top: int = 0, **fields: Any) -> bytes:
    logprobs = {"logprobs": True, "top_logprobs": top} if top else {}
    return json.dumps({"messages": messages, "stream": stream} | logprobs | fields).encode()


def _note_refusal(record: Record, status: int, told: dict[str, Any], outcomes: dict[int, str]) -> str:
    """What it means that a request is refused with this status; the text of such an answer is empty."""
    if status in outcomes and set(told["error"]) == {"message", "type", "param", "code"}:
        record.outcome = outcomes[status]
    else:
        record.note = f"status {status}: {told}"
    return ""


async def _go(connection: Connection, how: str) -> None:
    """Ends a connection in order, with a reset, or its sending side alone for a while."""
    with contextlib.suppress(OSError):
        if how == "half":
            connection.writer.write_eof()
            await asyncio.sleep(0.2)
        elif how == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            connection.writer.close()
            await connection.writer.wait_closed()


def _picture_message(random: Random) -> dict[str, Any]:
    """A picture with a question, as it is sent."""
    task = random.choice([task for name, task in picture_tasks().items() if name != "picture: missing"])
    return as_sent(task(random)[0])
