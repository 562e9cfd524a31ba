"""`python -m serving` around a scripted model, for tests that need a process: it repeats what the user says, a
byte each `PACE` seconds."""

from __future__ import annotations

import os
import sys

from serving import __main__ as command
from serving.settings import Settings

from .scripted_model import ScriptedModel


def load(settings: Settings) -> ScriptedModel:
    """In the place of the loading of a real model."""
    top = tuple((token, -1.0) for token in range(65, 85))
    return ScriptedModel(pace=float(os.environ["PACE"]), top=top, max_context=20_000)


if __name__ == "__main__":
    command.load = load
    command.check = lambda settings: None
    sys.exit(command.main())
