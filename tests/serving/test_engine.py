"""Admission, the queue, one engine thread, its faults, loading and draining."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from serving.app import create_app
from serving.engine import Engine
from serving.job import Job
from serving.settings import Settings

from .chat_client import COMPLETIONS, ask, body, frames, text_of
from .conftest import PATIENCE, Server, scripted_server
from .scripted_model import ScriptedModel


class Crash(BaseException):
    """Something that ends a thread."""


async def start(server: Server, text: str) -> asyncio.Task[str]:
    """A question that the engine has taken up, and holds at its first unit of work."""
    server.model.hold_at = 1
    task = asyncio.create_task(ask(server, text))
    await server.held()
    return task


async def test_a_full_queue_refuses_at_once_and_does_no_work_for_it():
    async with scripted_server(max_queued=1) as server:
        running = [await start(server, "one"), asyncio.create_task(ask(server, "two"))]
        await server.until(lambda: server.engine.queued == 1 and server.model.prepared == 2)
        health = (await server.client.get("/health")).json()
        assert (health["busy"], health["active"], health["queued"], health["max_queued"]) == (True, 1, 1, 1)
        prepared = server.model.prepared
        for refused in await asyncio.gather(
            *(server.client.post(COMPLETIONS, json=body("more", stream=n % 2 == 0)) for n in range(20))
        ):
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.model.prepared == prepared
        server.model.gate.set()
        assert await asyncio.gather(*running) == ["one", "two"]
        await server.idle()
        assert await ask(server, "next") == "next"


async def test_requests_run_one_after_the_other_on_one_thread_and_do_not_mix(server):
    server.model.pace = 0.001
    words = [f"code word {number}" * 3 for number in range(8)]
    assert await asyncio.gather(*(ask(server, word) for word in words)) == words
    assert len(server.model.threads) == 1
    assert threading.get_ident() not in server.model.threads


@pytest.mark.parametrize("step", [0, 1, 3])
async def test_a_fault_ends_its_own_request_only(server, caplog, step):
    running = await start(server, "first")
    server.model.faults = {step: RuntimeError("the scripted fault")}
    waiting = asyncio.create_task(ask(server, "second"))
    await server.until(lambda: server.engine.queued == 1)
    server.model.gate.set()
    assert await running == "first"[: max(step - 1, 0)] + "[the engine failed on this request]"
    assert await waiting == "second"
    assert "the scripted fault" in caplog.text
    await server.idle()


async def test_a_fault_in_a_whole_answer_is_a_status(server):
    server.model.faults = {2: RuntimeError("the scripted fault")}
    response = await server.client.post(COMPLETIONS, json=body("hello"))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    assert "scripted" not in response.text


async def test_an_engine_thread_that_dies_fails_everyone_at_once(server):
    running = await start(server, "first")
    waiting = [asyncio.create_task(ask(server, "second")) for _ in range(3)]
    whole = asyncio.create_task(server.client.post(COMPLETIONS, json=body("third")))
    await server.until(lambda: server.engine.queued == 4)
    server.model.faults = {2: Crash("the disk is gone")}
    server.model.gate.set()
    async with asyncio.timeout(PATIENCE):
        assert await running == "f[the engine has failed: Crash: the disk is gone]"
        assert set(await asyncio.gather(*waiting)) == {"[the engine has failed: Crash: the disk is gone]"}
        assert (await whole).status_code == 503
    await server.idle()  # a moment later
    health = await server.client.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["active"]) == (503, "error", 0)
    refused = await server.client.post(COMPLETIONS, json=body("more"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "error")
    assert "the disk is gone" in refused.json()["error"]["message"]


async def test_while_loading_health_answers_and_requests_are_refused():
    go, model = threading.Event(), ScriptedModel()

    def load() -> ScriptedModel:
        go.wait(PATIENCE)
        return model

    async with scripted_server(model, load=load) as server:
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["max_seq"]) == (503, "loading", 0)
        refused = await server.client.post(COMPLETIONS, json=body("hi"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["retry-after"] == "5"
        go.set()
        await server.until(lambda: server.engine.state == "ok")
        assert await ask(server, "hi") == "hi"
        assert (await server.client.get("/health")).json()["max_seq"] == model.max_context


async def test_draining_finishes_what_runs_and_waits_and_refuses_the_rest(server):
    running = await start(server, "first")
    waiting = asyncio.create_task(ask(server, "second"))
    await server.until(lambda: server.engine.queued == 1)
    draining = asyncio.create_task(server.engine.drain(PATIENCE))
    await asyncio.sleep(0)
    health = await server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    refused = await server.client.post(COMPLETIONS, json=body("late"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    counted = await server.client.post("/tokenize", json={"prompt": "late"})
    assert (counted.status_code, counted.json()["error"]["code"]) == (503, "draining")
    server.model.gate.set()
    assert await asyncio.gather(running, waiting) == ["first", "second"]
    await draining


async def test_draining_ends_what_takes_too_long(server):
    server.model.pace = 0.02
    running = await start(server, "x" * 500)
    whole = asyncio.create_task(server.client.post(COMPLETIONS, json=body("waits")))
    await server.until(lambda: server.engine.queued == 1)
    server.model.gate.set()
    await server.until(lambda: server.model.steps > 2)
    await server.engine.drain(0.05)
    assert (await running).endswith("[the server is shutting down]")
    assert (await whole).status_code == 503
    await server.idle()


async def test_health_answers_while_the_engine_computes(server):
    """Inside a step, and while tokens come thick and fast."""
    running = await start(server, "x" * 2000)
    assert (await server.client.get("/health")).json()["busy"]
    server.model.gate.set()
    answered = 0
    while not running.done():
        assert (await server.client.get("/health")).status_code == 200
        answered += 1
    assert await running == "x" * 2000
    assert answered > 5


async def test_silence_is_filled_with_comments():
    """As long as the engine is busy with others, and between tokens that take long."""
    async with scripted_server(ping_seconds=0.03) as server:
        first = await start(server, "a")
        async with server.client.stream("POST", COMPLETIONS, json=body("bc", stream=True)) as response:
            pieces, stream = response.aiter_text(), ""

            async def comments_after(frame: str) -> None:
                nonlocal stream
                while stream.partition(frame)[2].count(": waiting\n\n") < 3:
                    stream += await anext(pieces)

            await comments_after('"role":"assistant"')
            await server.submitted(1)
            await server.run_on(5)  # two tokens of the first, then the prompt and a token of the second
            assert await first == "a"
            await comments_after('"content":"b"')
            server.model.gate.set()
            stream += "".join([piece async for piece in pieces])
        assert text_of(frames(stream)) == "bc"


@pytest.mark.parametrize(("ping_seconds", "awaited"), [(0, None), (15, 15)])
async def test_without_pings_silence_is_silence(monkeypatch, ping_seconds, awaited):
    """Nothing waits for it to pass."""
    silences = []
    events = Job.events
    monkeypatch.setattr(Job, "events", lambda job, silence: silences.append(silence) or events(job, silence))
    async with scripted_server(ping_seconds=ping_seconds) as server:
        assert await ask(server, "a") == "a"
    assert silences == [awaited]


async def test_a_stream_outlives_quarts_own_limit():
    """Quart cuts a response off after RESPONSE_TIMEOUT seconds, without an end, unless it is told otherwise."""
    settings = Settings()
    assert create_app(Engine(ScriptedModel, settings), settings).config["RESPONSE_TIMEOUT"] is None
    async with scripted_server(ScriptedModel(pace=0.02), app_config={"RESPONSE_TIMEOUT": 0.1}) as server:
        assert await ask(server, "x" * 20) == "x" * 20


async def test_frames_are_sent_at_once(server):
    """Not held back until the client has confirmed the frame before."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)

    def accepted() -> list[socket.socket]:
        every = [each.get_extra_info("socket") for each in asyncio.get_running_loop()._transports.values()]
        return [each for each in every if each.getsockname()[1] == server.port]

    await server.until(accepted)
    [connection] = accepted()
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


async def test_requests_of_a_batch_run_together_and_do_not_mix():
    async with scripted_server(ScriptedModel(pace=0.001), batch_max=3, max_queued=20) as server:
        words = [f"code word {number}" * 3 for number in range(9)]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, server.engine.active)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        asking = [await start(server, words[0]), *(asyncio.create_task(ask(server, word)) for word in words[1:])]
        await server.submitted(8)
        server.model.gate.set()
        assert await asyncio.gather(*asking) == words
        watching.cancel()
        assert most == 3
        await server.idle()
        assert (await server.client.get("/health")).json()["slots"]["running"] == 0


async def test_a_batch_takes_as_many_as_it_has_room_for_and_the_queue_as_many_more():
    async with scripted_server(batch_max=2, max_queued=1) as server:
        server.model.gate.clear()
        running = [asyncio.create_task(ask(server, word)) for word in ("one", "two", "three")]
        await server.until(lambda: server.engine.active + server.engine.queued == 3 and server.model.prepared == 3)
        refused = await server.client.post(COMPLETIONS, json=body("more"))
        assert refused.status_code == 429
        server.model.gate.set()
        assert await asyncio.gather(*running) == ["one", "two", "three"]


async def test_leaving_a_batch_frees_a_place_and_disturbs_nobody():
    async with scripted_server(batch_max=2) as server:
        leaver = await start(server, "x" * 200)
        job = await server.held()
        stayer = asyncio.create_task(ask(server, "y" * 200))
        await server.submitted(1)
        await server.run_on(4)
        assert server.engine.active == 2
        leaver.cancel()
        third = asyncio.create_task(ask(server, "z" * 50))
        await server.submitted(1)
        await server.until(lambda: job.cancelled)
        server.model.gate.set()
        assert await third == "z" * 50
        assert await stayer == "y" * 200
        await server.idle()
        assert server.model.dropped == 1


async def test_a_step_of_the_batch_that_fails_ends_what_is_in_it(server, monkeypatch, caplog):
    running = await start(server, "first")
    step = type(server.engine.batch).step

    def fail(batch) -> list:
        monkeypatch.setattr(type(batch), "step", step)
        raise RuntimeError("the cache is gone")

    monkeypatch.setattr(type(server.engine.batch), "step", fail)
    server.model.gate.set()
    assert (await running).endswith("[the engine failed on this request]")
    assert await ask(server, "second") == "second"
    assert "the cache is gone" in caplog.text


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("first", [True, False])
async def test_a_request_that_moves_on_while_it_is_counted_is_counted_once(server, first, looks):
    """The thread takes it up, or ends it, between two looks of the event loop."""

    class Moving(Job):
        running = property(lambda job: next(seen, not first), lambda job, running: None)

    seen = iter([first] * looks)
    server.engine._live.add(Moving())
    told = (await server.client.get("/health")).json()
    assert told["active"] + told["queued"] == 1
    assert told["busy"] == (told["active"] == 1)
    seen = iter([first] * looks)
    told = server.engine.counts()
    assert told["active"] + told["queued"] == 1


async def test_usage_tells_what_was_in_the_cache(server):
    question = "a question that is long enough to be worth it"
    first = (await server.client.post(COMPLETIONS, json=body(question))).json()["usage"]
    second = (await server.client.post(COMPLETIONS, json=body(question))).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    metrics = (await server.client.get("/metrics")).text
    assert f'prefix_cache_hits_total{{model_name="scripted"}} {second["prompt_tokens"] - 1}.0' in metrics
