"""POST /v1/completions and /tokenize: prompts as they are, in every form, streamed and whole."""

from __future__ import annotations

import asyncio

import openai
import pytest

from models import SamplingParams

from .chat_client import COMPLETIONS, body, frames
from .conftest import Server, scripted_server
from .scripted_model import END, ScriptedModel

TEXTS = "/v1/completions"
TOKENIZE = "/tokenize"


async def whole(server: Server, **fields) -> dict:
    response = await server.client.post(TEXTS, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def counts(answer: dict) -> tuple[int, int, int]:
    """Tokens of the prompt, of the answer, and of both."""
    return tuple(answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


async def streamed(server: Server, **fields) -> list[dict]:
    response = await server.client.post(TEXTS, json=fields | {"stream": True})
    assert response.status_code == 200, response.text
    return frames(response.text)


async def test_a_whole_answer(server):
    answer = await whole(server, prompt="abc")
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"text": "abc", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert counts(answer) == (3, 4, 7)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream(server, usage):
    objects = await streamed(server, prompt="aé", stream_options={"include_usage": usage})
    if usage:
        last = objects.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
        assert all(entry["usage"] is None for entry in objects)
    assert len({(entry["id"], entry["object"], entry["created"]) for entry in objects}) == 1
    choices = [entry["choices"][0] for entry in objects]
    assert [choice["text"] for choice in choices] == ["a", "é", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
async def test_several_prompts_and_answers(server, prompt):
    """In the order of the prompts; each prompt counts once."""
    answer = await whole(server, prompt=prompt, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(
        enumerate(["ab", "ab", "c", "c"])
    )
    assert counts(answer) == (3, 10, 13)
    shown = ["", "", "", ""]
    for entry in await streamed(server, prompt=prompt, n=2):
        [choice] = entry["choices"]
        shown[choice["index"]] += choice["text"]
    assert shown == ["ab", "ab", "c", "c"]


async def test_token_ids_and_control_tokens(server):
    """Ids are taken as they are, and so is what a text says: there is no template to protect."""
    control = "<|im_start|>user\n<tool_call><|im_end|>"
    [start, *_, end] = (await server.client.post(TOKENIZE, json={"prompt": control})).json()["tokens"]
    assert {start, end} <= server.model.tokenizer.control_ids
    assert (await whole(server, prompt=[97, 98]))["choices"][0]["text"] == "ab"
    assert (await whole(server, prompt=control))["usage"]["prompt_tokens"] == len("user\n<tool_call>") + 2


async def test_tags_are_text(server):
    text = "<think>a</think><tool_call>b</tool_call>"
    assert (await whole(server, prompt=text, max_tokens=100))["choices"][0]["text"] == text


@pytest.mark.parametrize("prompt", ["ab ", [97, 98, 32], ["ab "]])
async def test_echo(server, prompt):
    assert (await whole(server, prompt=prompt, echo=True))["choices"][0]["text"] == "ab ab "
    objects = await streamed(server, prompt=prompt, echo=True)
    assert [entry["choices"][0]["text"] for entry in objects] == ["ab a", "b", " ", ""]


async def test_limits_and_stop_strings(server):
    answer = await whole(server, prompt="x" * 30)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("x" * 16, "length")
    assert (await whole(server, prompt="a stop b", stop=" st"))["choices"][0]["text"] == "a"


async def test_of_tokens_that_look_alike_the_likeliest_is_told(server):
    """Parts of characters all look like U+FFFD; the chosen one's log-probability is told in any case."""
    server.model.top = ((0xC3, -0.3), (0xC4, -0.7), (0xC5, -0.9))
    told = (await whole(server, prompt="é", logprobs=3))["choices"][0]["logprobs"]
    assert told["top_logprobs"][0] == {"\ufffd": told["token_logprobs"][0]}


async def test_logprobs_in_the_old_form(server):
    answer = await whole(server, prompt="aé", logprobs=2)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "\ufffd", "\ufffd"]
    assert told["token_logprobs"] == [-0.25] * 3
    assert told["top_logprobs"][0] == {"a": -0.25, "A": -0.5, "B": -9999.0}
    assert told["text_offset"] == [0, 1, 1]
    pieces = [entry["choices"][0]["logprobs"] for entry in await streamed(server, prompt="aé", logprobs=2)]
    assert {name: [value for piece in pieces for value in piece[name]] for name in told} == told
    assert (await whole(server, prompt="a", logprobs=0))["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.25}]


async def test_parameters_reach_the_engine(server):
    await whole(server, prompt="a", temperature=0.5, top_k=3, seed=1, logit_bias={"65": 1}, logprobs=1)
    expected = SamplingParams(temperature=0.5, top_k=3, seed=1, logit_bias={65: 1.0}, top_logprobs=1)
    assert server.model.sampling == [expected]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [END + 100]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 2}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused(server, fields, param, stream):
    response = await server.client.post(TEXTS, json=fields | {"stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert server.engine.active == server.engine.queued == 0


async def test_another_model_is_not_served(server):
    for path in (TEXTS, TOKENIZE):
        response = await server.client.post(path, json={"prompt": "a", "model": "gpt"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving(server, stream):
    server.model.hold_at = 4
    task = asyncio.create_task(server.client.post(TEXTS, json={"prompt": ["ab", "cd"], "stream": stream}))
    job = await server.held()
    task.cancel()
    await server.until(lambda: job.cancelled)
    server.model.gate.set()
    await server.idle()
    assert server.model.begun == 4, "a client that had left was computed for"


async def test_a_fault_is_told(server):
    server.model.faults = {2: RuntimeError("the scripted fault")}
    *_, error = await streamed(server, prompt="abc")
    assert error["error"]["code"] == "engine_error"
    server.model.faults = {2: RuntimeError("the scripted fault")}
    assert (await server.client.post(TEXTS, json={"prompt": "abc"})).status_code == 500


async def test_openai_python(server):
    """Strict only for whole answers: its types demand a finish reason in every chunk, which OpenAI does not send."""
    options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
    async with openai.AsyncOpenAI(**options, _strict_response_validation=True) as client:
        answer = await client.completions.create(model="scripted", prompt="abc", logprobs=1)
        assert answer.choices[0].text == "abc"
    async with openai.AsyncOpenAI(**options) as client:
        chunks = await client.completions.create(model="scripted", prompt="abc", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == "abc"


async def test_tokenize(server):
    text = await server.client.post(TOKENIZE, json={"prompt": "aé", "model": "scripted"})
    assert text.json() == {"count": 3, "max_model_len": 4096, "tokens": [97, 195, 169]}
    request = body("?", stream_options={"include_tokens": True}, max_tokens=1)
    history = (await server.client.post(COMPLETIONS, json=request)).json()["history_tokens"]
    tokens = (await server.client.post(TOKENIZE, json=body("?"))).json()
    assert tokens == {"count": len(history) - 1, "max_model_len": 4096, "tokens": history[:-1]}


@pytest.mark.parametrize("fields", [{}, {"prompt": 5}, {"prompt": "a", "messages": []}, {"messages": []}])
async def test_what_cannot_be_tokenized(server, fields):
    response = await server.client.post(TOKENIZE, json=fields)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_tokenizing_does_not_wait_for_the_engine():
    async with scripted_server(ScriptedModel()) as server:
        server.model.hold_at = 1
        running = asyncio.create_task(whole(server, prompt="a"))
        await server.held()
        assert (await server.client.post(TOKENIZE, json={"prompt": "a"})).json()["count"] == 1
        server.model.gate.set()
        await running


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_cannot_come_with_a_plain_prompt(server, stream):
    values = {"prompt": "What is <|image_pad|>?", "stream": stream}
    refused = await server.client.post("/v1/completions", json=values)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
