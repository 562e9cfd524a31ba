"""Finds the tool calls in an answer: JSON between `<tool_call>` and `</tool_call>`, as Qwen's templates ask for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from models.text_stream import begun

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = re.compile(f"{OPEN}|{CLOSE}")
# A string, closed or not, or a tag: so that a tag inside of a string is passed over.
STRING_OR_TAG = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|{TAG.pattern}', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A complete call. `arguments` is the text of a JSON object, `{}` if the function takes none."""

    name: str
    arguments: str


class ToolCallParser:
    """Tells calls from text in an answer that arrives in pieces, cut anywhere.

    A call is told when it is complete, so that nothing ever has to be taken back. It ends at the first tag that is not
    inside a JSON string, or at the end of the answer. What stands between tags but is no call becomes text; the tags
    never do. White space around calls belongs to neither side; an answer without tags is not changed.
    """

    def __init__(self, *, only_one: bool = False) -> None:
        """With `only_one`, all that follows the first call is left out."""
        self._only_one = only_one
        self._inside = False
        self._after_call = False
        self._held = ""
        self._space = ""
        self._done = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Takes a piece; the texts and calls that are certain now."""
        self._held += text
        parts = []
        while (tag := self._tag()) is not None:
            before, self._held = self._held[: tag.start()], self._held[tag.end() :]
            parts += self._block(before) if self._inside else self._text(before)
            self._inside = tag[0] == OPEN
        if not self._inside:
            shown = len(self._held) - max(begun(self._held, OPEN), begun(self._held, CLOSE))
            parts += self._text(self._held[:shown])
            self._held = self._held[shown:]
        return parts

    def finish(self) -> list[str | ToolCall]:
        """What is still held when the answer ends."""
        parts: list[str | ToolCall] = []
        while self._inside:
            # No string of a call holds a tag in the end: the first tag was the end of the block.
            tag = None if _call(self._held) else TAG.search(self._held)
            block, rest = (self._held, "") if tag is None else (self._held[: tag.start()], self._held[tag.end() :])
            self._held, self._inside = "", tag is not None and tag[0] == OPEN
            parts += self._block(block) + self.push(rest)
        parts += self._text(self._held)
        return parts + ([self._space] if self._space and not self._done else [])

    def _tag(self) -> re.Match[str] | None:
        """The next tag that ends what is being read."""
        if not self._inside:
            return TAG.search(self._held)
        if TAG.search(self._held) is None:
            return None
        return next((match for match in STRING_OR_TAG.finditer(self._held) if TAG.fullmatch(match[0])), None)

    def _block(self, block: str) -> list[str | ToolCall]:
        call = _call(block)
        if call is None:
            return self._text(block)
        if self._done:
            return []
        self._space, self._after_call, self._done = "", True, self._only_one
        return [call]

    def _text(self, text: str) -> list[str | ToolCall]:
        """The text without the white space at its end, which waits: a call may follow."""
        if self._done:
            return []
        text = self._space + (text.lstrip() if self._after_call else text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._after_call = self._after_call and not shown
        return [shown] if shown else []


def _call(block: str) -> ToolCall | None:
    """The call that a block describes; None if it is none. Line ends in strings, which JSON forbids, are forgiven."""
    try:
        value = json.loads(block, strict=False)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode("utf-8")  # refuses half a surrogate pair
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, text)
