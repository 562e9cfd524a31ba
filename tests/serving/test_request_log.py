"""The line that every request leaves behind, and the counter of those without an answer."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime

import pytest

from serving import replies

from .chat_client import COMPLETIONS, ask, body, raw_request
from .conftest import PATIENCE, Server, client_of, scripted_server
from .test_command import process
from .test_engine import Crash, start
from .test_metrics import read

SECRET = "the prompt that nobody may read"


@pytest.fixture
def lines(caplog):
    """The lines so far, as objects."""
    caplog.set_level(logging.INFO, logger="kestrel.requests")
    return lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "kestrel.requests"]


async def the_line(server: Server, lines) -> dict:
    """The one line, which comes a moment after the answer."""
    await server.until(lines)
    [line] = lines()
    return line


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_leaves_its_figures_and_no_text(server, lines, caplog, stream):
    server.model.pace = 0.005
    response = await server.client.post(
        f"{COMPLETIONS}?q={SECRET}", json=body(SECRET, stream=stream, max_tokens=4, user=SECRET, stop=["zzz"])
    )
    line = await the_line(server, lines)
    assert line["id"] in response.text
    assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0
    assert {name: line[name] for name in ("method", "path", "status", "outcome", "finish_reason")} == {
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
        "outcome": "finished",
        "finish_reason": "length",
    }
    assert line["generated_tokens"] == 4
    assert line["prompt_tokens"] > len(SECRET)
    assert line["prefill_ms"] >= 5
    assert line["queue_ms"] + line["prefill_ms"] <= line["ttft_ms"] <= line["total_ms"] - 15
    assert SECRET not in caplog.text
    assert "the prom" not in json.dumps(line)


@pytest.mark.parametrize(
    ("path", "fields", "status", "code"),
    [
        (COMPLETIONS, {"temperature": SECRET}, 400, None),
        (COMPLETIONS, {"model": SECRET}, 404, "model_not_found"),
        (COMPLETIONS, {"messages": [{"role": "user", "content": SECRET * 200}]}, 400, "context_length_exceeded"),
        ("/v1/nowhere", {}, 404, None),
    ],
)
async def test_a_refusal_leaves_its_status(server, lines, caplog, path, fields, status, code):
    await server.client.post(path, json=body(SECRET) | fields)
    line = await the_line(server, lines)
    assert (line["path"], line["status"], line["outcome"], line.get("code")) == (path, status, "refused", code)
    assert "ttft_ms" not in line
    assert SECRET not in caplog.text
    assert (await read(server)).value("request_unfinished_total", outcome="refused") == 1


async def test_a_full_queue_is_a_refusal(server, lines):
    server.engine.max_queued = 1
    running = [await start(server, "one"), asyncio.create_task(ask(server, "two"))]
    await server.until(lambda: server.engine.queued == 1)
    await server.client.post(COMPLETIONS, json=body("three"))
    line = await the_line(server, lines)
    assert (line["status"], line["outcome"], line["code"]) == (429, "refused", "queue_full")
    assert "id" not in line
    server.model.gate.set()
    await asyncio.gather(*running)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "status", "code"), [(RuntimeError("a fault"), 500, "engine_error"), (Crash("the end"), 503, "error")]
)
async def test_a_failure_leaves_its_code_and_what_was_done(server, lines, stream, fault, status, code):
    server.model.faults = {3: fault}
    await server.client.post(COMPLETIONS, json=body("hello", stream=stream))
    line = await the_line(server, lines)
    assert (line["status"], line["outcome"]) == (200 if stream else status, "failed")
    assert line["code"] == code
    assert line["generated_tokens"] == 2
    assert "finish_reason" not in line
    assert (await read(server)).value("request_unfinished_total", outcome="failed") == 1


async def test_requests_that_a_failed_engine_refuses_and_drops(server, lines):
    running = await start(server, "first")
    waiting = asyncio.create_task(ask(server, "second"))
    await server.until(lambda: server.engine.queued == 1)
    server.model.faults = {1: Crash("the disk is gone")}
    server.model.gate.set()
    await asyncio.gather(running, waiting)
    await server.client.post(COMPLETIONS, json=body("third"))
    await server.until(lambda: len(lines()) == 3)
    assert sorted((line["outcome"], line["code"]) for line in lines()) == [
        ("failed", "error"),
        ("failed", "error"),
        ("refused", "error"),
    ]


async def test_a_fault_of_the_handler_is_a_failure(server, lines, monkeypatch):
    monkeypatch.setattr(replies, "usage", None)
    await server.client.post(COMPLETIONS, json=body("hello"))
    line = await the_line(server, lines)
    assert (line["status"], line["outcome"], line["code"]) == (500, "failed", "internal_error")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("unit", [1, 4])
async def test_a_client_that_leaves_is_noted(server, lines, stream, unit):
    server.model.hold_at = unit
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw_request("hello", stream=stream))
    await server.held()
    writer.close()
    line = await the_line(server, lines)
    assert (line["outcome"], line.get("status"), line["generated_tokens"]) == (
        "left",
        200 if stream else None,
        max(0, unit - 2),
    )
    server.model.gate.set()
    await server.idle()
    assert (await read(server)).value("request_unfinished_total", outcome="left") == 1


async def test_probes_leave_no_line(server, lines):
    for path in ("/health", "/metrics"):
        await server.client.get(path)
    server.engine.state = "error"
    assert (await server.client.get("/health")).status_code == 503
    await server.client.get("/nowhere")
    assert (await the_line(server, lines))["path"] == "/nowhere"


@pytest.mark.parametrize("path", ["/v1/models", "/admin/status", "/openapi.json", "/"])
async def test_every_other_request_leaves_a_line(server, lines, path):
    await server.client.get(path)
    line = await the_line(server, lines)
    assert (line["method"], line["path"], line["status"], line["outcome"]) == ("GET", path, 200, "finished")
    assert (await read(server)).value("request_success_total", finished_reason="stop") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_are_logged_where_that_is_asked_for(lines, stream):
    async with scripted_server(log_prompts=True) as server:
        await server.client.post(COMPLETIONS, json=body("1, 2 😀", stream=stream, n=2, user=SECRET))
        line = await the_line(server, lines)
        assert line["answers"] == ["1, 2 😀"] * 2
        assert line["prompts"] == ["user\n1, 2 😀\nassistant\n"]
        assert SECRET not in json.dumps(line)


async def test_a_path_makes_neither_a_second_nor_an_endless_line(server, lines):
    await server.client.get("/" + "%0A%22" * 200)
    path = (await the_line(server, lines))["path"]
    assert path == ("/" + '\n"' * 200)[:200]


async def test_the_command_writes_lines_of_json_to_stderr():
    with process() as (running, address):
        async with client_of(address) as client:
            await client.post(COMPLETIONS, json=body(SECRET))
            await client.post(COMPLETIONS, json={})
        running.terminate()
        stderr = await asyncio.to_thread(lambda: running.communicate(timeout=PATIENCE)[1])
    first, second = (json.loads(line) for line in stderr.splitlines())
    assert (first["status"], first["outcome"], first["finish_reason"]) == (200, "finished", "stop")
    assert (second["status"], second["outcome"]) == (400, "refused")
