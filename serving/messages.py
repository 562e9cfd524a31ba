"""POST /v1/messages: a chat completion told in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from models import Step
from models.text_stream import first_complete
from serving import request_log, sse
from serving.chat import Choice, Exchange
from serving.errors import ApiError
from serving.job import Job
from serving.streaming import Wire, choice_steps, event_stream

BLOCKS = {"content": ("text", "text"), "reasoning_content": ("thinking", "thinking")}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PATH = "/v1/messages"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a request is one of Anthropic's API, which has errors of its own form."""
    return path == PATH or path.startswith(f"{PATH}/")


def request_id() -> str | None:
    """The name of the request that is being handled: the one of its answer. None if it was refused before it had one,
    as in the log."""
    record = request_log.current()
    return f"req_{_digits(record.jobs[0])}" if record and record.jobs else None


def _digits(job: Job) -> str:
    return job.id.removeprefix("chatcmpl-")


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form, with the `param` and `code` that OpenAI's has besides: clients of both read it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": error.body["error"] | {"type": kind}, "request_id": request_id()}


class Blocks:
    """The content blocks of an answer, whole in `content` and as the events that build them."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._open = False

    def add(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes the delta of a chat completion; the events that tell it."""
        [(name, value)] = delta.items()
        if name in BLOCKS:
            return self._add_text(*BLOCKS[name], value)
        [call] = value
        function = call["function"]
        if "id" in call:
            return self._start({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        self.content[-1]["input"] = json.loads(function["arguments"])
        return [self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})]

    def end(self) -> list[dict[str, Any]]:
        """The events that end the last block."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _add_text(self, kind: str, name: str, text: str) -> list[dict[str, Any]]:
        started = []
        if not self._open or self.content[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            started = self._start({"type": kind, name: ""} | signature)
        self.content[-1][name] += text
        return [*started, self._delta({"type": f"{kind}_delta", name: text})]

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        ended = self.end()
        self.content.append(block)
        self._open = True
        return [*ended, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _encode(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + sse.event(event)


WIRE = Wire(_encode, error_body, b"")


def stream(exchange: Exchange, ping_seconds: float | None) -> AsyncIterator[bytes]:
    """The answer as Anthropic's events; `ping_seconds` of silence bring a comment."""
    blocks = Blocks()
    opening = [{"type": "message_start", "message": _message(exchange, [], None, None, 0)}]
    frames = partial(_step_events, blocks)
    return event_stream(
        exchange.job, exchange.choices, opening, frames, partial(_closing, exchange), ping_seconds, wire=WIRE
    )


def _step_events(blocks: Blocks, choice: Choice, step: Step) -> list[dict[str, Any]]:
    events = [event for delta in choice.take(step) for event in blocks.add(delta)]
    return events if step.finish_reason is None else [*events, *blocks.end()]


def _closing(exchange: Exchange) -> list[dict[str, Any]]:
    reason, sequence = _stop_reason(exchange)
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    usage = {"output_tokens": len(exchange.steps)}
    return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


async def whole(exchange: Exchange) -> dict[str, Any]:
    """The answer as one object.

    Raises:
        ApiError: the request failed.
    """
    blocks = Blocks()
    async for choice, step in choice_steps(exchange.job, exchange.choices):
        _step_events(blocks, choice, step)
    return _message(exchange, blocks.content, *_stop_reason(exchange), len(exchange.steps))


def _message(
    exchange: Exchange, content: list[dict[str, Any]], reason: str | None, sequence: str | None, tokens: int
) -> dict[str, Any]:
    return {
        "id": f"msg_{_digits(exchange.job)}",
        "type": "message",
        "role": "assistant",
        "model": exchange.model_id,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": {"input_tokens": len(exchange.prompt.token_ids), "output_tokens": tokens},
    }


def _stop_reason(exchange: Exchange) -> tuple[str, str | None]:
    """Why the answer ended, and the stop sequence if it was one: then the last token is not the end of the turn."""
    [choice] = exchange.choices
    tokenizer = exchange.engine.model.tokenizer
    if choice.steps[-1].finish_reason == "stop" and choice.steps[-1].token_id not in tokenizer.control_ids:
        text = tokenizer.decode([step.token_id for step in choice.steps])
        return "stop_sequence", first_complete(text, exchange.request.stops)
    if choice.finish_reason == "length" and len(choice.steps) < exchange.request.limit:
        return "model_context_window_exceeded", None
    return STOP_REASONS[choice.finish_reason], None
