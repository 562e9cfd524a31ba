"""Crowds at the door: clients of a socket that nobody accepts from, of a full waiting room, and samples made up."""

import asyncio
import json
import os
import socket
from argparse import Namespace
from contextlib import AsyncExitStack
from typing import Any

import pytest

from experiments import backlog
from experiments.backlog import (
    ACCEPTS,
    BACKLOGS,
    FIGURES,
    ROOM,
    STOPPED,
    UNLIMITED,
    ask,
    ask_politely,
    at_once,
    connect_all,
    socket_bytes,
    watched,
)
from experiments.experiment import Sample
from experiments.server_process import Server
from tests.serving.conftest import scripted_server
from tests.serving.scripted_model import ScriptedModel

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


async def test_as_many_connect_as_the_backlog_has_room_for():
    with socket.create_server(("127.0.0.1", 0), backlog=3) as listening:
        server = Server("127.0.0.1", listening.getsockname()[1], 0)
        found = await connect_all(server, 8, patience=1)
    assert {client["outcome"] for client in found} == {"gave up"}
    assert sum(client["opened_ns"] is not None for client in found) == 4
    assert {client["outcome"] for client in await connect_all(server, 2, patience=5)} == {"refused"}


async def test_a_server_that_accepts_answers_all():
    async with scripted_server() as server:
        found = await connect_all(Server("127.0.0.1", server.port, 0), 20, patience=30)
    assert {client["outcome"] for client in found} == {"answered"}
    assert all(0 < client["opened_ns"] < client["answered_ns"] for client in found)


async def test_a_full_room_turns_away_and_lets_in_later():
    model = ScriptedModel(hold_at=1)
    async with scripted_server(model, max_queued=1) as running, AsyncExitStack() as stack:
        server = Server("127.0.0.1", running.port, 0)
        body = json.dumps(QUESTION | {"stream": True}).encode()
        await ask(stack, server, body, 0)
        await running.held()
        told = await asyncio.gather(*(ask(stack, server, body, 0) for _ in range(3)))
        assert sorted(status for _, status in told) == [200, 429, 429]
        polite = asyncio.create_task(ask_politely(server, QUESTION))
        await running.until(lambda: running.engine.counts()["refused"] == 3)
        model.gate.set()
        waited, tries = await polite
    assert waited > 0
    assert tries >= 2  # more, if the others' answers take longer than the room has said


async def test_a_request_that_is_refused_for_good_is_not_repeated():
    async with scripted_server() as server:
        with pytest.raises(RuntimeError, match="status 400"):
            await ask_politely(Server("127.0.0.1", server.port, 0), QUESTION | {"temperature": 5})


async def test_memory_is_watched_from_the_beginning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backlog, "WATCH_SECONDS", 0.001)
    async with scripted_server() as server, watched(Server("127.0.0.1", server.port, os.getpid())) as memory:
        assert len(memory) == 1
        await server.until(lambda: len(memory) > 2)
    assert all(size > 2**20 for _, size, _ in memory)
    assert socket_bytes() >= 0


def client(opened: float | None, outcome: str = "answered", **cell: Any) -> Sample:
    """One client of a burst, whose connection was made after so many seconds."""
    return {"cell": cell | {"repeat": 0}, "opened_ns": opened and opened * 1e9, "outcome": outcome}


def made_up_crowd(room: int, clients: int, let_in: int, megabytes: float, seconds: float) -> Sample:
    told = [(1e7, 200)] * let_in + [(2e7, 429)] * (clients - let_in)
    memory = [(0, 10e6, 1e6), (1, (10 + megabytes) * 1e6, 1e6), (2, 10e6, 2e6)]
    cell = {"room": room, "clients": clients, "repeat": 0}
    return {"cell": cell, "told": told, "waited_ns": seconds * 1e9, "tries": 3, "memory": memory}


SAMPLES = [
    *(
        client(0.01 if number <= size or loop == ACCEPTS else 1.01, loop=loop, backlog=size)
        for size in BACKLOGS
        for loop in (ACCEPTS, STOPPED)
        for number in range(200)
    ),
    made_up_crowd(ROOM, 16, 16, 1, 2),
    made_up_crowd(UNLIMITED, 16, 16, 1, 2),
    made_up_crowd(ROOM, 96, 16, 4, 3),
    made_up_crowd(UNLIMITED, 96, 96, 19, 12),
]


def test_every_figure_is_read_off_the_cells_that_it_is_about():
    found = [figure.found(SAMPLES) for figure in FIGURES]
    assert [row["measured"] for row in found] == [1, 31, 0, 16, 0, 4, 4]
    assert [row["verdict"] for row in found] == ["holds", *2 * ["answered"], *2 * ["holds"], *2 * ["answered"]]
    unlike = [
        *(client(0.01, loop=STOPPED, backlog=size) for size in BACKLOGS for _ in range(200)),
        client(None, "refused", loop=ACCEPTS, backlog=1),
        made_up_crowd(ROOM, 96, 20, 4, 3),
        made_up_crowd(UNLIMITED, 96, 95, 4, 3),
    ]
    assert {figure.found(unlike)["verdict"] for figure in FIGURES if figure.category == "documented"} == {
        "does not hold"
    }
    asked = {figure.found(unlike)["verdict"] for figure in FIGURES if figure.category == "question"}
    assert asked == {"answered otherwise than expected"}


def test_a_connection_that_never_came_was_not_made_at_once():
    assert at_once([client(None), client(0.4), client(0.6)]) == 1


def test_table_and_plot_show_every_cell():
    options = Namespace(model="tiny-vl", connects=200, clients=[16, 96], tokens=8, repeats=1)
    rows = backlog.table(SAMPLES, options)
    assert f"| {STOPPED} | 32 | 33 (33..33) | 167 (167..167) | 0 (0..0) | 1.01 (1.01..1.01) |" in rows
    assert "| 16 | 96 | 16 (16..16) | 80 (80..80) | 0.02 (0.02..0.02) | 4.0 (4.0..4.0) | 1.0 (1.0..1.0) |" in rows
    assert "| unlimited | 96 | 96 (96..96) | 0 (0..0) |" in rows
    stopped, accepts, memory, waiting = backlog.plot(SAMPLES, options).axes
    assert [len(axes.lines) for axes in (stopped, accepts)] == [len(BACKLOGS) + 2, len(BACKLOGS) + 1]
    assert [len(axes.lines) for axes in (memory, waiting)] == [5, 5]
