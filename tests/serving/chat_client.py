"""Requests as the tests send them, down to the bytes, and streams taken apart."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from typing import Any

from .conftest import Server

COMPLETIONS = "/v1/chat/completions"


def body(text: str, **fields: Any) -> dict[str, Any]:
    """A request with one user turn."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A file as pictures come."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def raw_request(text: str, **fields: Any) -> bytes:
    """The same as the bytes of an HTTP request."""
    payload = json.dumps(body(text, **fields)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def stuck_socket(port: int) -> socket.socket:
    """A connection that takes little without being read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


def streams() -> list[asyncio.Task]:
    """The tasks of servers in this process that are sending an answer."""
    return [task for task in asyncio.all_tasks() if "handle_request" in repr(task.get_coro())]


def frames(stream: str) -> list[dict[str, Any]]:
    """The objects of a stream; fails unless it is made of `data:` and comment lines, closes every event with an empty
    line, and ends with `[DONE]`."""
    events = stream.split("\n\n")
    assert events.pop() == ""
    assert all("\n" not in event for event in events)
    events = [event for event in events if not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(objects: list[dict[str, Any]]) -> str:
    """The text of a stream's objects, with an error in brackets."""
    pieces = []
    for entry in objects:
        if "error" in entry:
            pieces.append(f"[{entry['error']['message']}]")
        pieces += [choice["delta"].get("content", "") for choice in entry.get("choices", [])]
    return "".join(pieces)


async def ask(server: Server, text: str, **fields: Any) -> str:
    """The streamed answer to one question."""
    response = await server.client.post(COMPLETIONS, json=body(text, stream=True, **fields))
    assert response.status_code == 200, response.text
    return text_of(frames(response.text))
