"""What a client sees of a stream, and what is read off it. Used by every experiment, so that a name means one thing.

first event: from sending the request to the first event of the stream, usually the role frame.
TTFT, time to first token: to the first event with text in it; the role frame does not count.
ITL, inter-token latency: the gaps between one event with text and the next.
TPOT, time per output token: from the first event with text to the last, over the tokens after the first.
Times are monotonic nanoseconds in raw data, milliseconds in tables. The connection is opened before a request is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

from experiments.http_client import CHAT, connected
from experiments.server_process import Server

CLOSING = ("metrics", "tokens", "done")  # the original's last three events


def kind_of(frame: dict[str, Any]) -> tuple[str, str]:
    """What an event of a chat stream is, and the text in it.

    Raises:
        RuntimeError: it reports an error.
    """
    if "error" in frame:
        raise RuntimeError(f"the stream failed: {frame['error']}")
    if frame["object"] != "chat.completion.chunk":
        return frame["object"].rsplit(".", 1)[-1], ""
    if not frame["choices"]:
        return "usage", ""
    [choice] = frame["choices"]
    text = choice["delta"].get("content") or ""
    if text:
        return "content", text
    return ("finish" if choice["finish_reason"] else "role" if "role" in choice["delta"] else "other"), ""


async def stream(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """A chat request whose answer streams: `sent` and `events`, each of time (ns), kind and text; `metrics` and
    `usage` as the server tells them, where it does.

    Raises:
        RuntimeError: it was refused, or it failed.
        BrokenError: the connection ended before the stream did.
    """
    encoded = json.dumps(body | {"stream": True}).encode()
    async with connected(server) as connection:
        sent = time.monotonic_ns()
        connection.send("POST", CHAT, encoded)
        status, headers = await connection.status()
        if status != 200:
            raise RuntimeError(f"the request was refused: {status} {await connection.object(headers)}")
        events: list[tuple[int, str, str]] = []
        metrics, usage = None, None
        async for arrived, frame in connection.frames():
            metrics, usage = frame.get("metrics", metrics), frame.get("usage") or usage
            events.append((round(1e9 * arrived), *kind_of(frame)))
        events.append((time.monotonic_ns(), "done", ""))
    return {"sent": sent, "events": events, "metrics": metrics, "usage": usage}


def streamed(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """`stream`, from where no event loop runs."""
    return asyncio.run(stream(server, body))


def text_of(sample: dict[str, Any]) -> str:
    """The whole answer."""
    return "".join(text for _, _, text in sample["events"])


def _since_sent(sample: dict[str, Any], kinds: tuple[str, ...]) -> list[float]:
    return [(moment - sample["sent"]) / 1e6 for moment, kind, _ in sample["events"] if kind in kinds]


def moments(sample: dict[str, Any]) -> list[float]:
    """Milliseconds from sending to each event with text."""
    return _since_sent(sample, ("content",))


def first_event_ms(sample: dict[str, Any]) -> float:
    """Milliseconds to the first event."""
    return (sample["events"][0][0] - sample["sent"]) / 1e6


def ttft_ms(sample: dict[str, Any]) -> float:
    """Milliseconds to the first event with text."""
    return moments(sample)[0]


def total_ms(sample: dict[str, Any]) -> float:
    """Milliseconds to the end of the stream."""
    return (sample["events"][-1][0] - sample["sent"]) / 1e6


def itl_ms(sample: dict[str, Any]) -> list[float]:
    """Milliseconds from each event with text to the next."""
    return [after - before for before, after in itertools.pairwise(moments(sample))]


def tpot_ms(sample: dict[str, Any], tokens: int) -> float:
    """Milliseconds per token after the first, of an answer of `tokens` tokens, at least two."""
    found = moments(sample)
    return (found[-1] - found[0]) / (tokens - 1)


def closing_ms(sample: dict[str, Any]) -> float | None:
    """Milliseconds from the first to the last of the original's closing events; None without them."""
    found = _since_sent(sample, CLOSING)
    return found[-1] - found[0] if len(found) == len(CLOSING) else None
