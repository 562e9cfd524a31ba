"""The soak: a short one against the real server, and that it sees what it is to see."""

import asyncio
import itertools
from random import Random

import pytest

from experiments import soak
from experiments.server_process import Server
from experiments.soak_clients import Record, Soak
from experiments.soak_report import Memory, pooled
from tests.serving.conftest import scripted_server
from tests.serving.scripted_model import ScriptedModel, say_what_the_user_said

ANSWERS = ("table.md", "plot.svg", "plot.png", "environment.json", "server.json", "tokens.jsonl", "requests.jsonl.gz")


def test_a_short_soak_loses_and_mixes_nothing(tmp_path, capsys):
    # With this seed, the first requests of the clients come to all four outcomes, however few requests there are.
    found = soak.main(["--quick", "--minutes", "0.12", "--seed", "4", "--out", str(tmp_path)])
    assert not [record for record in found.records if record.outcome == "lost" or record.mixed]
    assert {record.outcome for record in found.records} >= {"answered", "refused", "left", "cut off"}
    rows = {}
    for line in (tmp_path / "table.md").read_text().splitlines():
        if line.startswith("| "):
            what, must, value, reached = (cell.strip() for cell in line.strip("|").split("|"))
            rows[what] = (must, value, reached)
    assert all((value, reached) == ("0", "yes") for must, value, reached in rows.values() if must == "0")
    assert rows["requests"][1] == str(len(found.records))
    assert all((tmp_path / name).stat().st_size > 0 for name in ANSWERS)
    assert "lost:" not in capsys.readouterr().err
    assert (pooled(found.overhead, "delivery") > 0).all()
    assert len(pooled(found.overhead, "overhead")) == len(pooled(found.overhead, "step", alone=True))


async def asked(model: ScriptedModel, times: int, **settings) -> list[Record]:
    """What one client finds that asks for a stream so often."""
    records: list[Record] = []
    async with scripted_server(model, **settings) as server:
        crowd = Soak(Server("127.0.0.1", server.port, 0), 1, [], records.append)
        crowd._kinds = {"stream": (1, crowd._stream)}
        for number in range(times):
            random = Random(number)
            record = Record("stream", 0.0)
            try:
                await crowd._stream(random, record)
            except Exception as error:
                record.note = str(error)
            records.append(record)
    return records


def repeated(messages: list[dict]) -> str:
    return say_what_the_user_said(messages).split(": ", 1)[1]


async def test_right_answers_are_counted_as_such():
    records = await asked(ScriptedModel(answer=repeated), 3)
    assert [(record.outcome, record.mixed, record.exact) for record in records] == [("answered", False, True)] * 3
    assert all(record.ttft_ms > 0 and record.gaps_ms for record in records)


async def test_the_answer_to_another_request_is_mixed():
    said = []

    def the_one_before(messages: list[dict]) -> str:
        said.append(repeated(messages))
        return said[max(0, len(said) - 2)]

    records = await asked(ScriptedModel(answer=the_one_before), 3)
    assert [record.mixed for record in records] == [False, True, True]
    assert [record.exact for record in records] == [True, False, False]


async def test_an_answer_that_fails_is_lost():
    records = await asked(ScriptedModel(answer=repeated, faults={2: RuntimeError("out of luck")}), 2)
    assert [record.outcome for record in records] == ["lost", "answered"]
    assert "failed" in records[0].note


async def test_an_answer_that_is_refused_without_reason_is_lost():
    [record] = await asked(ScriptedModel(answer=repeated, max_context=4), 1)
    assert record.outcome == "lost"
    assert "status 400" in record.note


async def test_a_client_that_is_not_cut_off_is_lost():
    async with scripted_server(ScriptedModel(), header_timeout=0) as server:
        crowd = Soak(Server("127.0.0.1", server.port, 0), 1, [], lambda record: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await crowd._stall(Random(first_choice("head")), Record("stall", 0.0))


async def test_a_client_that_is_turned_away_before_its_body_is_not_lost():
    async with scripted_server(ScriptedModel(), min_free_mb=10**9) as server:
        record = Record("stall", 0.0)
        crowd = Soak(Server("127.0.0.1", server.port, 0), 1, [], lambda record: None)
        await crowd._stall(Random(first_choice("body")), record)
    assert (record.outcome, record.note) == ("turned away", "")


def first_choice(wanted: str) -> int:
    """A seed with which a stall is one in this place."""
    return next(seed for seed in itertools.count() if Random(seed).choice(("head", "body", "answer")) == wanted)


def test_the_slope_is_that_of_the_memory_after_the_warm_up():
    megabytes = [0, 1000, 120, 122, 124, 126]
    memory = Memory([0.0, 30.0, 120.0, 180.0, 240.0, 300.0], [size * 10**6 for size in megabytes])
    slope, start = memory.slope()
    assert slope == pytest.approx(2)
    assert start == pytest.approx(116e6)


def test_a_record_keeps_what_is_worth_keeping():
    assert Record("leave", 1.0, "left").row() == {"kind": "leave", "start": 1.0, "outcome": "left"}
    assert Record("stream", 1.0, "answered", exact=False, mixed=True).row()["exact"] is False
