"""Odd requests to the endpoints beside chat completions: each is served or refused, never a failure of the server."""

from __future__ import annotations

import random
from typing import Any

import pytest

from serving.completions import CompletionRequest
from serving.messages_request import CountTokensRequest, MessagesRequest

from .chat_client import COMPLETIONS

ODD: list[Any] = [None, True, 0, -1, 2.5, 1e308, 2**64, "", "a", "\0", "9" * 50, [], [[]], [None], ["a"], [0], [[0]]]
ODD += [
    {},
    {"": None},
    {"type": "text"},
    {"type": "image", "source": {"type": "base64", "data": "x"}},
    [{"type": "text"}],
]
ODD += [[{"type": "text", "text": "a"}], {"type": "tool"}, [{"type": "tool_result", "tool_use_id": "a"}]]
ODD += [[{"type": "tool_use", "id": "a", "name": "b", "input": {"c": [1]}}], [{"name": "a", "input_schema": {}}]]
USER = {"role": "user", "content": "a"}
ENDPOINTS = {
    "/v1/completions": ({"prompt": "a"}, [*CompletionRequest.model_fields, "user"]),
    "/v1/messages": ({"messages": [USER], "max_tokens": 2}, [*MessagesRequest.model_fields, "metadata"]),
    "/v1/messages/count_tokens": ({"messages": [USER]}, [*CountTokensRequest.model_fields]),
    "/tokenize": ({}, ["prompt", "messages", "model", "tools", "n"]),
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_request_is_a_failure_of_the_server(server, path):
    valid, fields = ENDPOINTS[path]
    chance = random.Random(5)
    for _ in range(150):
        request = valid | {chance.choice(fields): chance.choice(ODD) for _ in range(chance.randrange(1, 3))}
        if "messages" in request and chance.random() < 0.4:
            role = chance.choice(["user", "assistant"])
            request["messages"] = [{"role": role, "content": chance.choice(ODD)}, USER]
        response = await server.client.post(path, json=request)
        assert response.status_code in (200, 400, 404), (request, response.text)
        assert '"server_error"' not in response.text, request
        assert '"api_error"' not in response.text, request
    await server.idle()


@pytest.mark.parametrize("depth", [60, 100, 500, 100_000])
async def test_arguments_of_any_depth(server, depth):
    """They come as text, so that the limit on the body's own nesting does not see them."""
    function = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    messages = [{"role": "assistant", "tool_calls": [{"function": function}]}, USER]
    response = await server.client.post(COMPLETIONS, json={"messages": messages})
    assert response.status_code == (200 if depth == 60 else 400), response.text
