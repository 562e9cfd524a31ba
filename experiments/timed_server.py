"""`python -m serving` around a model that notes how long each of its steps takes, for `experiments.soak_overhead`.

The file named by `KESTREL_STEPS` gets a line of JSON for every answer: when each token was asked of the model and when
it was there, in seconds on the monotonic clock. The first lines are of the model alone, before requests are taken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from models import Batch, BatchLimits, Generation, LoadedModel, Step
from models.batch import Item
from serving import __main__ as command
from serving.settings import Settings

FILE_VARIABLE, TEXTS_VARIABLE, REPEATS_VARIABLE = "KESTREL_STEPS", "KESTREL_STEP_TEXTS", "KESTREL_STEP_REPEATS"


class TimedBatch:
    """A batch with a clock at its steps; in everything else it is the batch."""

    def __init__(self, batch: Batch, file: Path, *, alone: bool) -> None:
        """`alone` says that nobody waits for the tokens."""
        self._batch = batch
        self._file = file
        self._alone = alone
        self._steps: defaultdict[Generation, list[tuple[float, float]]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def step(self) -> list[tuple[Generation, Item]]:
        """A step of the batch, noted for each token that it brings."""
        asked = time.monotonic()
        items = self._batch.step()
        there = time.monotonic()
        for generation, item in items:
            if isinstance(item, Step):
                self._steps[generation].append((asked, there))
                if item.finish_reason is not None:
                    self._note(self._steps.pop(generation))
        return items

    def _note(self, steps: list[tuple[float, float]]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"alone": self._alone, "steps": steps}) + "\n")


class TimedModel:
    """A model whose batches have clocks; in everything else it is the model."""

    def __init__(self, model: LoadedModel, file: Path) -> None:
        self._model = model
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def batch(self, limits: BatchLimits, *, alone: bool = False) -> TimedBatch:
        """A batch of the model."""
        return TimedBatch(self._model.batch(limits), self._file, alone=alone)

    def run_alone(self, texts: list[str], repeats: int, limits: BatchLimits) -> None:
        """Answers each of the texts, with nobody waiting for the tokens."""
        batch = self.batch(limits, alone=True)
        for text in texts * repeats:
            prompt = self._model.prompt([{"role": "user", "content": text}])
            room = self._model.max_context - len(prompt.token_ids)
            batch.join(self._model.request(prompt, max_tokens=room, sampling=self._model.default_sampling))
            while batch.running:
                batch.step()


def load(settings: Settings) -> TimedModel:
    """In the place of the loading of the model itself."""
    model = TimedModel(load_model(settings), Path(os.environ[FILE_VARIABLE]))
    limits = settings.batch_limits(model.bytes_per_slot)
    model.run_alone(json.loads(os.environ[TEXTS_VARIABLE]), int(os.environ[REPEATS_VARIABLE]), limits)
    return model


if __name__ == "__main__":
    load_model, command.load = command.load, load
    status = command.main()
    sys.stdout.flush()
    os._exit(status)  # as the command itself ends, because its engine thread may be inside XLA
