"""Bodies that could be a lot of work: what is wrong is refused at little cost, what is right holds up nobody."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from serving import json_body

from .chat_client import COMPLETIONS, ask, body, data_url
from .conftest import PATIENCE
from .test_http import assert_refused


async def post(server, path: str, values: object):
    return await server.client.post(
        path, content=json.dumps(values).encode(), headers={"Content-Type": "application/json"}
    )


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
@pytest.mark.parametrize("message", [0, {"role": "user", "content": "a"}])
async def test_too_many_messages(server, path, message):
    values = {"messages": [message] * 200_000, "max_tokens": 1}
    refused = await post(server, path, values)
    assert refused.status_code == 400
    assert "messages" in refused.text
    assert len(refused.content) < 1000
    assert server.model.prepared == 0


async def test_a_repeated_field_among_many(server):
    fields = ", ".join(f'"x{index}": 0' for index in range(50_000))
    text = f'{{{fields}, "x49999": 1, "messages": []}}'
    headers = {"Content-Type": "application/json"}
    refused = await server.client.post(COMPLETIONS, content=text.encode(), headers=headers)
    assert "'x49999' is there twice" in assert_refused(refused, 400)["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/completions"])
async def test_a_number_too_long_to_read(server, path):
    values = body("hi") | {"prompt": "hi", "logit_bias": {"1" * 5000: 1}}
    refused = await post(server, path, values)
    assert_refused(refused, 400, "logit_bias")


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (COMPLETIONS, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
        ("/v1/completions", {"prompt": "x" * 2_000_000}),
        ("/v1/completions", {"prompt": ["a", "x" * 2_000_000]}),
    ],
)
async def test_a_text_too_long_for_the_context_is_not_encoded(server, monkeypatch, path, values):
    encoded = []
    plain = type(server.model.tokenizer).encode_text

    def noting(tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return plain(tokenizer, text)

    monkeypatch.setattr(type(server.model.tokenizer), "encode_text", noting)
    refused = await post(server, path, values)
    [param] = values
    assert assert_refused(refused, 400, param)["code"] == "context_length_exceeded"
    assert max(encoded, default=0) < 10_000


async def test_a_text_too_long_to_be_tokenized(server):
    refused = await post(server, "/tokenize", {"prompt": "x" * 2_000_000})
    assert_refused(refused, 400, "prompt")


PADDING = {"padding": ["x" * 1000] * 100}
TURN = {"messages": [{"role": "user", "content": "hi"}]}
LARGE = {
    COMPLETIONS: TURN | PADDING,
    "/v1/completions": {"prompt": "hi"} | PADDING,
    "/v1/messages": TURN | PADDING | {"max_tokens": 1},
    "/v1/messages/count_tokens": TURN | PADDING,
    "/tokenize": {"prompt": "hi"} | PADDING,
}


@pytest.mark.parametrize("path", LARGE)
@pytest.mark.parametrize(("changes", "status"), [({}, 200), ({"model": 5}, 400)])
async def test_a_large_body_is_parsed_beside_the_event_loop(server, monkeypatch, path, changes, status):
    """While it is, others are answered: small bodies are not kept waiting by large ones."""
    begun, answered = threading.Event(), threading.Event()
    loads = json.loads

    def slow(text: str, **options: Any) -> Any:
        if len(text) > json_body.SMALL_BODY and "padding" in text:
            begun.set()
            assert answered.wait(PATIENCE)
        return loads(text, **options)

    monkeypatch.setattr(json_body.json, "loads", slow)
    large = asyncio.create_task(post(server, path, LARGE[path] | changes))
    await server.until(begun.is_set)
    assert (await server.client.get("/health")).status_code == 200
    assert await ask(server, "hello") == "hello"
    answered.set()
    assert (await large).status_code == status


@pytest.mark.parametrize("path", LARGE)
@pytest.mark.parametrize("value", ["0", '"a"', "[]", '{"a":0}'])
async def test_more_values_than_any_request_needs(server, path, value):
    text = f'{{"a": [{",".join([value] * 2**20)}]}}'
    refused = await server.client.post(path, content=text.encode(), headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert "it may have 1048576" in refused.text


MANY = 20_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"context_tokens": ["a"] * MANY}),
        (COMPLETIONS, {"logit_bias": {str(number): "a" for number in range(2 * MANY)}}),
        (COMPLETIONS, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
        (COMPLETIONS, {"messages": ["a"] * 2048}),
        (COMPLETIONS, {"stop": [0] * MANY}),
        (COMPLETIONS, {"tools": [0] * MANY}),
        (COMPLETIONS, {"messages": [{"role": "user", "content": ["a"] * MANY}]}),
        (
            COMPLETIONS,
            {"messages": [{"role": "user", "content": [{"type": "video_frames", "video_frames": [0] * MANY}]}]},
        ),
        ("/v1/completions", {"prompt": [{}] * MANY}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(number): "a" for number in range(2 * MANY)}}),
        ("/v1/messages", {"messages": ["a"] * 2048}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ["a"] * MANY}]}),
        ("/v1/messages", {"system": ["a"] * MANY}),
        ("/v1/messages", {"tools": [0] * MANY}),
        ("/v1/messages", {"stop_sequences": [0] * MANY}),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
    ],
)
async def test_of_many_errors_the_first_is_enough(server, monkeypatch, path, fields):
    """An error takes more memory than what is wrong, so they are not collected."""
    counts = []

    def noting(error: ValidationError) -> Exception:
        counts.append(error.error_count())
        return explained(error)

    explained = json_body._explained
    monkeypatch.setattr(json_body, "_explained", noting)
    refused = await post(server, path, {"max_tokens": 1} | (TURN if path != "/v1/completions" else {}) | fields)
    assert refused.status_code == 400
    assert len(refused.content) < 1000
    assert max(counts, default=1) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_picture_is_not_kept_as_text_while_the_answer_takes_its_time(server, stream):
    """Beside the client's own copy, which this process has too."""
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    parts = [{"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}]
    values = json.dumps({"messages": [{"role": "user", "content": parts}], "stream": stream}).encode()
    del noise, file, parts
    server.model.hold_at = 1
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    headers = {"Content-Type": "application/json"}
    asking = asyncio.create_task(server.client.post(COMPLETIONS, content=values, headers=headers))
    await server.held()
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    server.model.gate.set()
    assert (await asking).status_code == 200
    assert most - before > len(values), "nothing was there to be kept"
    assert now - before < len(values) / 2
