"""`n`: several answers to one request, one after the other in one place of the queue."""

from __future__ import annotations

import asyncio

import openai
import pytest

from models import SamplingParams

from .chat_client import COMPLETIONS, ask, body, frames
from .conftest import scripted_server
from .scripted_model import ScriptedModel


async def test_streamed_choices(server):
    """Each begins with its role and ends with its finish; usage counts the prompt once."""
    request = body("ab", stream=True, n=3, stream_options={"include_usage": True}, logprobs=True)
    *chunks, usage = frames((await server.client.post(COMPLETIONS, json=request)).text)
    assert len({(chunk["id"], chunk["created"]) for chunk in [*chunks, usage]}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0] * 4 + [1] * 4 + [2] * 4
    for index in range(3):
        role, *content, finish = [choice for choice in choices if choice["index"] == index]
        assert role["delta"] == {"role": "assistant", "content": ""}
        assert [part["delta"] for part in content] == [{"content": "a"}, {"content": "b"}]
        assert all(len(part["logprobs"]["content"]) == 1 for part in content)
        assert (finish["delta"], finish["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    whole = (await server.client.post(COMPLETIONS, json=body("ab", n=3))).json()
    assert whole["usage"] == usage["usage"]


async def test_whole_choices(server):
    answer = (await server.client.post(COMPLETIONS, json=body("ab", n=8))).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert all(choice["message"]["content"] == "ab" for choice in answer["choices"])
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])


async def test_each_choice_has_its_seed(server):
    for _ in range(2):
        await server.client.post(COMPLETIONS, json=body("a", n=3, seed=5, temperature=1))
    seeds = [sampling.seed for sampling in server.model.sampling]
    assert seeds[0] == 5
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    await server.client.post(COMPLETIONS, json=body("a", n=2, temperature=0))
    assert server.model.sampling[6:] == [SamplingParams(temperature=0)] * 2


async def test_one_place_in_the_queue():
    """Held until the last choice has ended, and taken by nobody in between."""
    async with scripted_server(max_queued=1) as server:
        server.model.hold_at = 5  # in the second choice
        running = asyncio.create_task(server.client.post(COMPLETIONS, json=body("a", n=3)))
        await server.held()
        assert (server.engine.active, server.engine.queued) == (1, 0)
        waiting = asyncio.create_task(ask(server, "next"))
        await server.until(lambda: server.engine.queued == 1)
        assert (await server.client.post(COMPLETIONS, json=body("more"))).status_code == 429
        server.model.gate.set()
        assert len((await running).json()["choices"]) == 3
        assert await waiting == "next"
        assert server.engine.total_requests == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_all_choices(server, stream):
    server.model.hold_at = 5
    task = asyncio.create_task(server.client.post(COMPLETIONS, json=body("a", n=8, stream=stream)))
    job = await server.held()
    task.cancel()
    await server.until(lambda: job.cancelled)
    server.model.gate.set()
    await server.idle()
    assert server.model.begun == 5, "a client that had left was computed for"


async def test_a_fault_in_a_later_choice_ends_the_request(server):
    server.model.hold_at = 4
    task = asyncio.create_task(server.client.post(COMPLETIONS, json=body("ab", n=3, stream=True)))
    await server.held()
    server.model.faults = {2: RuntimeError("the scripted fault")}
    server.model.gate.set()
    *chunks, error = frames((await task).text)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 0, 0, 0, 1, 1]
    assert error["error"]["code"] == "engine_error"
    await server.idle()


async def test_the_originals_frames_describe_one_answer():
    async with scripted_server(ScriptedModel(), kestrel_events=True) as server:
        text = (await server.client.post(COMPLETIONS, json=body("a", n=2, stream=True))).text
        assert all(frame["object"] == "chat.completion.chunk" for frame in frames(text))
        assert "metrics" not in (await server.client.post(COMPLETIONS, json=body("a", n=2))).json()


async def test_openai_helper_collects_all_choices(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        request = {"model": "scripted", "messages": body("ab")["messages"], "n": 2}
        async with client.chat.completions.stream(**request) as stream:
            final = await stream.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in final.choices] == [(0, "ab"), (1, "ab")]
