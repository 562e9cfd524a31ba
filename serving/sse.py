"""Server-sent events: objects as `data:` lines, each event closed by an empty line."""

from __future__ import annotations

import json
from typing import Any

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells nginx to pass every event on at once
}
DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"  # a comment, which clients skip


def event(value: dict[str, Any]) -> bytes:
    """One event. ASCII only, because some clients take U+2028 and its like for line ends."""
    return b"data: " + json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
