"""The clients that people bring: openai-python in every mode, and readers of lines, with default settings."""

from __future__ import annotations

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionChunk

from .chat_client import COMPLETIONS, body
from .conftest import Server, client_of, scripted_server
from .scripted_model import ScriptedModel

HELLO = [{"role": "user", "content": "hello 😀\u2028 wörld"}]
TEXT = HELLO[0]["content"]


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def strict(server: Server) -> openai.AsyncOpenAI:
    """A client that checks every object against OpenAI's types."""
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
    )


@pytest.mark.parametrize("usage", [False, True])
async def test_openai_raw_loop(client, usage):
    """As written in most programs: the first choice of every chunk, unless usage is asked for."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True, **options)
    everything = [chunk async for chunk in chunks]
    text = [chunk.choices[0].delta.content or "" for chunk in everything if chunk.choices]
    assert "".join(text) == TEXT
    assert everything[0].choices[0].delta.role == "assistant"
    assert (everything[-1].usage is not None) == (not everything[-1].choices) == usage


async def test_openai_strict_validation(server):
    async with strict(server) as client:
        chunks = await client.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        assert all([isinstance(chunk, ChatCompletionChunk) async for chunk in chunks])
        whole = await client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == TEXT
        models = await client.models.list()
        assert [model.id for model in models.data] == ["scripted"]
        assert await client.models.retrieve("scripted") == models.data[0]


async def test_openai_stream_helper(client):
    """It skips the original's frames, which it does not know, and keeps usage, because that comes last."""
    options = {"include_usage": True, "include_metrics": True, "include_tokens": True}
    pieces = []
    async with client.chat.completions.stream(
        model="scripted", messages=HELLO, stream_options=options, logprobs=True, top_logprobs=1
    ) as stream:
        async for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert "".join(pieces) == message.content == TEXT
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == len(TEXT.encode()) + 1
    assert b"".join(bytes(token.bytes) for token in final.choices[0].logprobs.content).decode() == TEXT


async def test_comments_disturb_no_client():
    """They come whenever there is nothing to say for a while."""
    question = [{"role": "user", "content": "hello"}]
    async with scripted_server(ScriptedModel(pace=0.06), ping_seconds=0.02) as server:
        raw = await server.client.post(COMPLETIONS, json=body("hello", stream=True))
        assert raw.text.count("\n\n: ") >= 2  # there are more, unless the machine is busy with something else
        async with strict(server) as ours:
            chunks = await ours.chat.completions.create(model="scripted", messages=question, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "hello"
            async with ours.chat.completions.stream(model="scripted", messages=question) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "hello"
        chat = ChatOpenAI(model="scripted", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert "".join([piece.content async for piece in chat.astream("hello")]) == "hello"
        theirs = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        asking = theirs.messages.stream(model="scripted", messages=question, max_tokens=20)
        async with theirs, asking as stream:
            assert await stream.get_final_text() == "hello"


async def test_openai_from_a_thread(server):
    """The client without asyncio."""

    def ask() -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            chunks = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(ask) == TEXT


async def test_openai_concurrently(client):
    async def ask(word: str) -> str:
        chunks = await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": word}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    words = [f"code word {number}" for number in range(10)]
    assert await asyncio.gather(*map(ask, words)) == words


async def test_openai_closing_a_stream_frees_the_engine(server, client):
    server.model.hold_at = 4
    chunks = await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "x" * 1000}], stream=True
    )
    async for chunk in chunks:
        if chunk.choices[0].delta.content:
            break
    job = await server.held()
    await chunks.close()
    await server.until(lambda: job.cancelled)
    server.model.gate.set()
    await server.idle()
    assert server.model.begun == 4, "a client that had left was computed for"


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"model": "gpt-4"}, openai.NotFoundError),
        ({"tool_choice": "required"}, openai.BadRequestError),
        ({"response_format": "json"}, openai.BadRequestError),
        ({"n": 9}, openai.BadRequestError),
    ],
)
async def test_openai_errors(client, request_fields, error):
    with pytest.raises(error) as refused:
        await client.chat.completions.create(**{"model": "scripted", "messages": HELLO} | request_fields)
    assert refused.value.param == next(iter(request_fields))
    assert refused.value.param in refused.value.message


async def test_openai_sees_a_full_queue():
    async with scripted_server(ScriptedModel(), max_queued=1) as server:
        server.model.hold_at = 1
        waiting = [asyncio.create_task(server.client.post(COMPLETIONS, json=body("hello"))) for _ in range(2)]
        await server.held()  # before that, the one that waits could be the only one
        await server.until(lambda: server.engine.queued == 1)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="scripted", messages=HELLO)
        server.model.gate.set()
        await asyncio.gather(*waiting)


async def test_openai_raises_what_fails_in_mid_stream(server, client):
    server.model.faults = {3: RuntimeError("the scripted fault")}
    chunks = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="the engine failed on this request"):
        assert [chunk async for chunk in chunks]


async def test_readers_of_lines(server):
    """httpx splits lines where Unicode has line ends, which JSON in ASCII does not contain."""
    pieces = []
    async with server.client.stream("POST", COMPLETIONS, json={"messages": HELLO, "stream": True}) as response:
        async for line in response.aiter_lines():
            assert line == "" or line.startswith("data: ")
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
    assert "".join(pieces) == TEXT


async def test_one_connection_serves_many_requests(server):
    """Streams end with a proper last chunk, so that clients keep the connection."""
    limits = httpx.Limits(max_connections=1)
    async with client_of(server.url, limits=limits) as client:
        ports = set()
        for stream in (True, False, True):
            response = await client.post(COMPLETIONS, json={"messages": HELLO, "stream": stream})
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(ports) == 1
