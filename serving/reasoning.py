"""Takes the reasoning out of an answer: the `<think>` block with which it begins."""

from __future__ import annotations

from models.text_stream import begun

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Tells reasoning from content in text that arrives in pieces, cut anywhere.

    Only a block at the very beginning is reasoning, so that an answer may write about the tag. White space around the
    reasoning belongs to neither side; without a block, nothing is changed.
    """

    def __init__(self, opened: bool = False) -> None:
        """`opened` tells that the prompt ends with the opening tag, as some templates have it."""
        self._place = "reasoning" if opened else "start"
        self._held = ""
        self._begun = False

    def push(self, text: str) -> tuple[str, str]:
        """Takes a piece; the reasoning and the content that may now be shown."""
        self._held += text
        if self._place == "start":
            self._look_for_block()
        reasoning = self._reasoning() if self._place == "reasoning" else ""
        return reasoning, self._content() if self._place in ("gap", "content") else ""

    def finish(self) -> tuple[str, str]:
        """What is still held when the answer ends. A block that was never closed is reasoning to its end."""
        rest, self._held = self._held, ""
        if self._place == "reasoning":
            return self._trimmed(rest.rstrip()), ""
        return "", "" if self._place == "gap" else rest

    def _look_for_block(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._place, self._held = "reasoning", text.removeprefix(OPEN)
        elif not OPEN.startswith(text):
            self._place = "content"

    def _reasoning(self) -> str:
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._place, self._held = "gap", after
            return self._trimmed(before.rstrip())
        shown = before[: len(before) - begun(before, CLOSE)].rstrip()
        self._held = before[len(shown) :]
        return self._trimmed(shown)

    def _trimmed(self, text: str) -> str:
        """The text without the white space at the beginning of all reasoning."""
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or text != ""
        return text

    def _content(self) -> str:
        shown, self._held = self._held, ""
        if self._place == "gap":
            shown = shown.lstrip()
            self._place = "content" if shown else "gap"
        return shown
