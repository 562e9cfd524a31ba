"""Token ids in, pieces of text out: never half a character, never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from models.tokenizer import Tokenizer


class TextStream:
    """The text of one answer as it grows. The joined pieces are the decoded answer, cut before the stop string that is
    complete first; `stopped` tells that one was."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Takes one token; the text that may now be shown."""
        if self.stopped:
            return ""
        self._held += self._characters.decode(self._tokenizer.token_bytes(token_id))
        return self._release()

    def finish(self) -> str:
        """What is still held when the answer ends otherwise; a broken last character becomes U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._characters.decode(b"", final=True)
        shown = self._release()
        rest, self._held = self._held, ""
        return shown if self.stopped else shown + rest

    def _release(self) -> str:
        stop = first_complete(self._held, self._stop)
        if stop is not None:
            self.stopped = True
            shown, self._held = self._held[: self._held.find(stop)], ""
            return shown
        keep = max((begun(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


class NoText:
    """Stands in for a text stream where there is no vocabulary, or nobody wants the text."""

    stopped = False

    def push(self, token_id: int) -> str:
        """Nothing to show."""
        return ""

    def finish(self) -> str:
        """Nothing held."""
        return ""


def first_complete(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that is complete first in a text, the longest of those that end together; None if none is."""
    found = [stop for stop in stops if stop in text]
    return min(found, key=lambda stop: (text.find(stop) + len(stop), -len(stop)), default=None)


def begun(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins, without being complete."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
