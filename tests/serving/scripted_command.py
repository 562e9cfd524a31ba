"""`python -m serving` around a scripted model, for tests that need a process: it repeats what the user says, a
byte each `PACE` seconds. With `HELD` it computes nothing until SIGUSR1 comes."""

from __future__ import annotations

import os
import signal
import sys

from serving import __main__ as command
from serving.settings import Settings

from .scripted_model import ScriptedModel

TOP = tuple((token, -1.0) for token in range(65, 85))
MODEL = ScriptedModel(pace=float(os.environ.get("PACE", 0)), top=TOP, max_context=20_000)


def load(settings: Settings) -> ScriptedModel:
    """In the place of the loading of a real model."""
    return MODEL


if __name__ == "__main__":
    if os.environ.get("HELD"):
        MODEL.gate.clear()
        signal.signal(signal.SIGUSR1, lambda *_: MODEL.gate.set())
    command.load = load
    command.check = lambda settings: None
    sys.exit(command.main())
