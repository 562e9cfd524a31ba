"""What the server adds to the time of a token: the gaps that a client sees against the steps that the model takes.

One client streams one answer after the other on an otherwise idle server, so that every token makes a frame of its own
and nothing else is computed. Client and server read the same clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.http_client import CHAT, BrokenError, connected
from experiments.server_process import Server, running_server
from experiments.timed_server import FILE_VARIABLE, REPEATS_VARIABLE, TEXTS_VARIABLE

TEXTS = ["Count from 1 to 30", "Count down from 60 to 31.", "Count from 40 to 69", "从1数到30"]
PAUSE = 0.05  # seconds between answers, in which the server comes to rest

Answer = dict[str, Any]


def measure_overhead(model: str, repeats: int, folder: Path) -> list[Answer]:
    """Every answer, with milliseconds per token from the second on: `gap` (between two frames at the client), `step`
    (of the model, for the same token), `delivery` (from the model to the client); and `step` of the model alone.
    `folder` is for files in between."""
    steps = folder / "steps.jsonl"
    steps.write_text("")
    settings = {FILE_VARIABLE: str(steps), TEXTS_VARIABLE: json.dumps(TEXTS), REPEATS_VARIABLE: str(repeats)}
    log = folder / "timed_server.log"
    with running_server(["--model", model], log, module="experiments.timed_server", settings=settings) as server:
        arrivals = asyncio.run(_ask_all(server, repeats))
    noted = [json.loads(line) for line in steps.read_text().splitlines()]
    alone = [{"alone": True, "step": _step_ms(entry["steps"])} for entry in noted if entry["alone"]]
    served = [entry["steps"] for entry in noted if not entry["alone"]]
    return alone + [_compared(*pair) for pair in zip(served, arrivals, strict=True)]


async def _ask_all(server: Server, repeats: int) -> list[list[float]]:
    """When each frame that carries a token arrived, for every answer."""
    answers = []
    for text in TEXTS * repeats:
        answers.append(await _arrivals(server, text))
        await asyncio.sleep(PAUSE)
    return answers


async def _arrivals(server: Server, text: str) -> list[float]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    async with connected(server) as connection:
        connection.send("POST", CHAT, json.dumps(body).encode())
        status, _ = await connection.status()
        if status != 200:
            raise BrokenError(f"status {status}")
        return [arrived async for arrived, frame in connection.frames() if "role" not in frame["choices"][0]["delta"]]


def _step_ms(steps: Sequence[Sequence[float]]) -> list[float]:
    return [round(1e3 * (there - asked), 4) for asked, there in steps[1:]]


def _compared(steps: Sequence[Sequence[float]], arrivals: Sequence[float]) -> Answer:
    """One answer; every token has made one frame, the last one that of the finish."""
    if len(steps) != len(arrivals):
        raise RuntimeError(f"{len(steps)} tokens made {len(arrivals)} frames: they cannot be told apart")
    delivery = [round(1e3 * (arrived - there), 4) for (_, there), arrived in zip(steps, arrivals, strict=True)]
    gaps = [round(1e3 * (after - before), 4) for before, after in pairwise(arrivals)]
    return {"alone": False, "gap": gaps, "step": _step_ms(steps), "delivery": delivery[1:]}


def pooled(answers: Sequence[Answer], name: str, *, alone: bool = False) -> np.ndarray:
    """The values of all tokens; `overhead` is the gap less the step of the same token."""
    chosen = [answer for answer in answers if answer["alone"] == alone]
    if name == "overhead":
        return np.concatenate([np.subtract(answer["gap"], answer["step"]) for answer in chosen])
    return np.concatenate([np.asarray(answer[name]) for answer in chosen])
