"""`python -m serving` around a model that notes how long each of its steps takes, for `experiments.soak_overhead`.

The file named by `KESTREL_STEPS` gets a line of JSON for every answer: when each token was asked of the model and when
it was there, in seconds on the monotonic clock. The first lines are of the model alone, before requests are taken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import LoadedModel, PrefillProgress, Step
from serving import __main__ as command
from serving.settings import Settings

FILE_VARIABLE, TEXTS_VARIABLE, REPEATS_VARIABLE = "KESTREL_STEPS", "KESTREL_STEP_TEXTS", "KESTREL_STEP_REPEATS"


class TimedModel:
    """A model with a clock at its loop; in everything else it is the model."""

    def __init__(self, model: LoadedModel, file: Path) -> None:
        self._model = model
        self._file = file
        self._alone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def stream(self, *arguments: Any, **options: Any) -> Iterator[PrefillProgress | Step]:
        items = self._model.stream(*arguments, **options)
        steps: list[tuple[float, float]] = []
        while True:
            asked = time.monotonic()
            item = next(items, None)
            if item is None:
                break
            if isinstance(item, Step):
                steps.append((asked, time.monotonic()))
                if item.finish_reason is not None:
                    self._note(steps)
            yield item

    def run_alone(self, texts: list[str], repeats: int) -> None:
        """Answers each of the texts, with nobody waiting for the tokens."""
        self._alone = True
        for text in texts * repeats:
            prompt = self._model.prompt([{"role": "user", "content": text}])
            room = self._model.max_context - len(prompt.token_ids)
            for _ in self.stream(prompt, max_tokens=room, stop=(), sampling=self._model.default_sampling):
                pass
        self._alone = False

    def _note(self, steps: list[tuple[float, float]]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"alone": self._alone, "steps": steps}) + "\n")


def load(settings: Settings) -> TimedModel:
    """In the place of the loading of the model itself."""
    model = TimedModel(load_model(settings), Path(os.environ[FILE_VARIABLE]))
    model.run_alone(json.loads(os.environ[TEXTS_VARIABLE]), int(os.environ[REPEATS_VARIABLE]))
    return model


if __name__ == "__main__":
    load_model, command.load = command.load, load
    status = command.main()
    sys.stdout.flush()
    os._exit(status)  # as the command itself ends, because its engine thread may be inside XLA
