"""Bodies that are small to send but could be a lot of work: each is refused at little cost."""

from __future__ import annotations

import json

import pytest

from .chat_client import COMPLETIONS, body
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
