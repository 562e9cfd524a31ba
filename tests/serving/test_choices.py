"""`n`: several answers to one request in one place of the queue, together where there is room in the batch, otherwise
one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from models import Prompt, SamplingParams
from models.grammar import Grammar

from .chat_client import COMPLETIONS, ask, body, frames
from .conftest import scripted_server
from .scripted_model import END, ScriptedModel


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


class Drawing(ScriptedModel):
    """Writes what follows from prompt and seed, of a length that does too."""

    def _tokens(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None) -> Iterator[int]:
        text = f"{sampling.seed} {self._answer(prompt).decode()}"
        yield from [*text[: 5 + (sampling.seed or 0) % 10].encode(), END]


def texts_of(objects: list[dict]) -> dict[int, tuple[str, str]]:
    """Text and finish reason of every choice of a stream, whose frames may stand in any order."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (entry["choices"][0] for entry in objects):
        index = choice["index"]
        assert index not in reasons, "nothing follows on the end of a choice"
        if index not in texts and "delta" in choice:
            assert choice["delta"] == {"role": "assistant", "content": ""}
        texts[index] = texts.get(index, "") + (
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
        )
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    return {index: (texts[index], reasons[index]) for index in texts}


REQUESTS = {
    COMPLETIONS: body("hello", n=8, seed=7, temperature=1),
    "/v1/completions": {"prompt": ["one", "two", "three"], "n": 4, "seed": 7, "temperature": 1},
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_choices_are_the_same_together_and_one_after_the_other(path):
    answers = []
    for batch_max in (1, 3, 8):
        async with scripted_server(Drawing(), batch_max=batch_max) as server:
            whole = (await server.client.post(path, json=REQUESTS[path])).json()
            stream = await server.client.post(path, json=REQUESTS[path] | {"stream": True})
            await server.idle()
            assert server.engine.slots()["running"] == 0
        told = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
        reasons = [choice["finish_reason"] for choice in whole["choices"]]
        streamed = texts_of(frames(stream.text))
        assert [streamed[index] for index in range(len(told))] == list(zip(told, reasons, strict=True))
        answers.append((told, reasons, whole["usage"]["completion_tokens"]))
    assert len(set(answers[0][0])) > 3
    assert answers[0] == answers[1] == answers[2]


async def test_choices_run_together_once_their_prompt_has_been_taken_in():
    """It is computed once. Who comes later has the rows that are left, and the choices that are left have the next."""
    async with scripted_server(ScriptedModel(chunks=3), batch_max=4) as server:
        server.model.hold_at = 2
        several = asyncio.create_task(server.client.post(COMPLETIONS, json=body("abcd", n=6)))
        job = await server.held()
        assert len(server.engine.batch.running) == 1
        await server.run_on(2)
        await server.until(lambda: len(server.engine.batch.running) == 4)
        assert (server.engine.active, server.engine.queued) == (1, 0)
        other = asyncio.create_task(ask(server, "next"))
        await server.until(lambda: server.engine.queued == 1)
        server.model.gate.set()
        assert await other == "next"
        answer = (await several).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["abcd"] * 6
        assert job.generated == answer["usage"]["completion_tokens"] == 6 * 5
        await server.idle()


async def test_many_choices_do_not_keep_others_out():
    """A row that becomes free goes to who has none, before the next choice of a request that has one."""
    async with scripted_server(batch_max=2) as server:
        server.model.hold_at = 4
        several = asyncio.create_task(server.client.post(COMPLETIONS, json=body("x" * 40, n=8)))
        await server.held()
        assert len(server.engine.batch.running) == 2
        others = [asyncio.create_task(ask(server, text)) for text in ("one", "two", "three")]
        await server.submitted(3)
        await server.run_on(160)  # two choices take 84, and the third has not ended when the others have
        await server.until(lambda: all(task.done() for task in others))
        assert not several.done()
        server.model.gate.set()
        answer = (await several).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["x" * 40] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_choices_that_run_together(stream):
    async with scripted_server(batch_max=3) as server:
        server.model.hold_at = 6
        task = asyncio.create_task(server.client.post(COMPLETIONS, json=body("abcdef", n=5, stream=stream)))
        job = await server.held()
        assert len(server.engine.batch.running) == 3
        task.cancel()
        await server.until(lambda: job.cancelled)
        server.model.gate.set()
        await server.idle()
        assert server.engine.slots()["running"] == 0
        assert await ask(server, "next") == "next"


async def test_a_fault_in_one_of_the_choices_that_run_together_ends_the_request_alone():
    async with scripted_server(batch_max=4) as server:
        server.model.hold_at = 6
        several = asyncio.create_task(server.client.post(COMPLETIONS, json=body("abcdef", n=3, stream=True)))
        await server.held()
        other = asyncio.create_task(ask(server, "other"))
        await server.until(lambda: server.engine.queued == 1)
        server.model.faults = {4: RuntimeError("the scripted fault")}
        server.model.gate.set()
        *_, error = frames((await several).text)
        assert error["error"]["code"] == "engine_error"
        assert await other == "other"
        await server.idle()
        assert server.engine.slots()["running"] == 0


@pytest.mark.parametrize("batch_max", [1, 2])
async def test_openai_helper_collects_all_choices(batch_max):
    """Also those that come interleaved."""
    async with (
        scripted_server(batch_max=batch_max) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        request = {"model": "scripted", "messages": body("ab")["messages"], "n": 2}
        async with client.chat.completions.stream(**request) as stream:
            final = await stream.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in final.choices] == [(0, "ab"), (1, "ab")]
