"""`python -m serving` around a model that takes its time for a token, and whose text goes out several tokens at once,
for `experiments.flush_ablation`.

The server sends a frame whenever there is text, and has no switch for that. So the text is held back where tokens
become text, before the server's own code: what goes over the wire is what a server sends that pushes once in so many
tokens, and the times that it notes of every token are untouched. `KESTREL_TOKENS_PER_EVENT` says how many, and
`KESTREL_PACE_MS` how long a token takes at least, in milliseconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models import Batch, Generation, LoadedModel, Request, Step
from models.batch import Item
from models.generation import TextPieces
from serving import __main__ as command
from serving.settings import Settings

TOKENS_VARIABLE, PACE_VARIABLE = "KESTREL_TOKENS_PER_EVENT", "KESTREL_PACE_MS"


class HeldPieces:
    """Pieces of text (`models.generation.TextPieces`) that come out once in `tokens` tokens, and at the end."""

    def __init__(self, pieces: TextPieces, tokens: int) -> None:
        self._pieces = pieces
        self._tokens = tokens
        self._taken = 0
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._pieces.stopped

    def push(self, token_id: int) -> str:
        """Takes one token; the text that may now be shown."""
        self._held += self._pieces.push(token_id)
        self._taken += 1
        return self._release() if self.stopped or self._taken % self._tokens == 0 else ""

    def finish(self) -> str:
        """What is still held when the answer ends otherwise."""
        self._held += self._pieces.finish()
        return self._release()

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text


def paced(
    step: Callable[[], list[tuple[Generation, Item]]], seconds: float
) -> Callable[[], list[tuple[Generation, Item]]]:
    """A batch's step that takes at least so long if it brings a token."""

    def slow() -> list[tuple[Generation, Item]]:
        begun = time.monotonic()
        items = step()
        if any(isinstance(item, Step) for _, item in items):
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
        return items

    return slow


def slowed(model: LoadedModel, seconds: float, tokens: int) -> LoadedModel:
    """The model itself, which from now on takes at least `seconds` for a token and shows `tokens` at a time."""
    make_request, make_batch = model.request, model.batch

    def request(*arguments: Any, **named: Any) -> Request:
        made = make_request(*arguments, **named)
        return replace(made, pieces=HeldPieces(made.pieces, tokens))

    def batch(*arguments: Any) -> Batch:
        made = make_batch(*arguments)
        made.step = paced(made.step, seconds)
        return made

    model.request, model.batch = request, batch
    return model


def load(settings: Settings) -> LoadedModel:
    """In the place of the loading of the model itself."""
    return slowed(load_model(settings), float(os.environ[PACE_VARIABLE]) / 1e3, int(os.environ[TOKENS_VARIABLE]))


if __name__ == "__main__":
    load_model, command.load = command.load, load
    status = command.main()
    sys.stdout.flush()
    os._exit(status)  # as the command itself ends, because its engine thread may be inside XLA
