"""What one choice says. The stream's deltas and the whole message come from one place, so that they agree."""

from __future__ import annotations

import uuid
from typing import Any

from serving.reasoning import ReasoningSplitter
from serving.tool_calls import ToolCall, ToolCallParser


class Answer:
    """Turns text that arrives in pieces into the deltas of a chat message: content, reasoning and tool calls."""

    def __init__(self, *, in_reasoning: bool, calls: ToolCallParser | None) -> None:
        """`in_reasoning` tells that the prompt has opened the reasoning; `calls` is None where nothing can be called,
        and may have taken in the beginning of a call that the prompt ends with."""
        self._splitter = ReasoningSplitter(in_reasoning)
        self._parser = calls
        self._reasoning = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        """Takes a piece of text; the deltas that it brings."""
        reasoning, content = self._splitter.push(text)
        return self._deltas(reasoning, [content] if self._parser is None else self._parser.push(content))

    def finish(self) -> list[dict[str, Any]]:
        """The last deltas."""
        reasoning, content = self._splitter.finish()
        if self._parser is None:
            return self._deltas(reasoning, [content])
        return self._deltas(reasoning, [*self._parser.push(content), *self._parser.finish()])

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended, given why its text did."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """The whole message. Its content is null if it only calls."""
        content = None if self._calls and not self._content else self._content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, reasoning: str, parts: list[str | ToolCall]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if reasoning:
            self._reasoning += reasoning
            deltas.append({"reasoning_content": reasoning})
        for part in parts:
            if isinstance(part, ToolCall):
                deltas += self._call_deltas(part)
            elif part:
                self._content += part
                deltas.append({"content": part})
        return deltas

    def _call_deltas(self, call: ToolCall) -> list[dict[str, Any]]:
        """The call without arguments, then its arguments, as OpenAI streams them."""
        index, entry = len(self._calls), {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self._calls.append(entry | {"function": {"name": call.name, "arguments": call.arguments}})
        first = {"index": index} | entry | {"function": {"name": call.name, "arguments": ""}}
        return [
            {"tool_calls": [first]},
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
        ]
