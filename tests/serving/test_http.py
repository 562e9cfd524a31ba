"""Whatever is sent, the answer is an answer: the right status, OpenAI's error shape, and a server that goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import httpx
import pytest

from models import PromptError
from serving import connection
from serving.chat_request import ChatRequest

from .chat_client import COMPLETIONS
from .conftest import PATIENCE, Server, scripted_server
from .scripted_model import ScriptedModel

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def server():
    async with scripted_server(ScriptedModel(), max_body_bytes=2**20) as running:
        yield running


def assert_refused(response: httpx.Response, status: int, param: str | None = None) -> dict:
    """The error object of a reply in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in response.text
    error = json.loads(response.text, parse_constant=pytest.fail)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param
    return error


async def raw(server: Server, data: bytes) -> bytes:
    """What the server says to these bytes, up to its closing the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/v1/models/", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_paths_and_methods_that_do_not_exist(server, method, path, status):
    response = await server.client.request(method, path, json={})
    error = assert_refused(response, status)
    assert method in error["message"]
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"messages":',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"text"',
        b"null",
        b"[]",
        b"\x1f\x8b\x08\x00" + bytes(range(256)),
        b'{"messages":[{"role":"user","content":"a"}],"top_p":NaN}',
        b'{"messages":[{"role":"user","content":"a"}],"x":-Infinity}',
        b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"1" * 5000 + b"}",
        b'\xef\xbb\xbf{"messages":[{"role":"user","content":"a"}]}',
        b'{"stream":true,"messages":[{"role":"user","content":"a"}],"stream":false}',
        b'{"messages":[{"role":"user","role":"system","content":"a"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"stop":["\\uDFFF"]}',
        b'{"messages":[{"role":"user","content":"a","\\udabc":1}]}',
    ],
)
async def test_bodies_that_are_no_request(server, body):
    assert_refused(await server.client.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert (await server.client.post(COMPLETIONS, json=HELLO)).status_code == 200


async def test_a_pair_of_surrogates_is_a_character(server):
    body = b'{"messages":[{"role":"user","content":"\\ud83d\\ude00 \\\\ud800"}]}'
    answer = (await server.client.post(COMPLETIONS, content=body, headers=JSON)).json()
    assert answer["choices"][0]["message"]["content"] == "😀 \\ud800"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        JSON | {"Content-Encoding": "gzip"},
    ],
)
async def test_a_body_must_be_declared_as_plain_json(server, headers):
    response = await server.client.post(COMPLETIONS, content=json.dumps(HELLO), headers=headers)
    assert "application/json" in assert_refused(response, 415)["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_every_spelling_of_json_is_taken(server, kind):
    response = await server.client.post(COMPLETIONS, content=json.dumps(HELLO), headers={"Content-Type": kind})
    assert response.status_code == 200


async def test_a_body_that_is_too_large_is_refused(server):
    for content in (b" " * 2**20 + b"{}", _pieces(b" " * 2**16, 17)):
        error = assert_refused(await server.client.post(COMPLETIONS, content=content, headers=JSON), 413)
        assert str(2**20) in error["message"]


async def test_a_refusal_reaches_a_client_that_is_still_sending(monkeypatch):
    """Far more than the sockets hold; what is sent after the refusal is thrown away, and the next request is served."""
    for name in ("DISCARDING_SECONDS", "SILENCE_SECONDS"):
        monkeypatch.setattr(connection, name, PATIENCE)  # so much takes a busy machine long
    async with scripted_server(api_keys=("key",)) as server:
        for _ in range(3):
            response = await server.client.post(COMPLETIONS, content=b" " * 20_000_000, headers=JSON)
            assert_refused(response, 401)
        server.client.headers["X-Api-Key"] = "key"
        assert_refused(await server.client.post(COMPLETIONS, content=b" " * 40_000_000, headers=JSON), 413)
        assert (await server.client.post(COMPLETIONS, json=HELLO)).status_code == 200


async def test_a_client_that_never_finishes_a_refused_body_is_cut_off(monkeypatch):
    """Its connection is the only one that there may be."""
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.1)
    async with scripted_server(max_connections=1) as server, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nsome")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 404")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        while (await server.client.get("/health")).status_code == 503:
            await asyncio.sleep(0.01)
        writer.close()


async def _pieces(piece: bytes, count: int):
    for _ in range(count):
        yield piece


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"９": 1}}, "logit_bias"),
        ({"functions": [{"name": "now"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"added": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"raise_exception": 1, "loop": {}, "range": 5}}, None),
        ({"messages": [{"role": "system", "content": "be brief"}]}, None),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1, None]}]}, "messages.0.tool_calls.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": {}, "arguments": "{}"}}]}]},
            "messages.0.tool_calls.0.function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_odd_requests_end_in_an_answer_or_a_refusal(fields, param, stream):
    """The same in both modes, and never a failure of the server."""
    async with scripted_server(ScriptedModel(answer=lambda _: "fine")) as server:
        response = await server.client.post(COMPLETIONS, json=HELLO | {"stream": stream} | fields)
        if param:
            assert_refused(response, 400, param)
        else:
            assert response.status_code == 200, response.text
        assert server.engine.active == server.engine.queued == 0


async def test_a_model_that_is_not_served(server):
    response = await server.client.post(COMPLETIONS, json=HELLO | {"model": "gpt-4"})
    assert assert_refused(response, 404, "model")["code"] == "model_not_found"
    for name in ("gpt-4", "scripted/x", "%2e%2e/%00", "x" * 5000):
        response = await server.client.get(f"/v1/models/{name}")
        assert assert_refused(response, 404, "model")["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["scripted", "Qwen/Qwen3-VL-2B-Instruct"])
async def test_the_served_model_by_its_name(name):
    async with scripted_server(model_id=name) as server:
        entry = (await server.client.get(f"/v1/models/{name}")).json()
        assert entry == (await server.client.get("/v1/models")).json()["data"][0]
        assert entry["id"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, HELLO),
        (COMPLETIONS, HELLO | {"tools": [{"type": "function", "function": {"name": "now"}}]}),
        (COMPLETIONS, HELLO | {"context_tokens": [1]}),
        (COMPLETIONS, HELLO | {"response_format": {"type": "json_object"}}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": [1, 2], "echo": True}),
        ("/v1/messages", HELLO | {"max_tokens": 1}),
        ("/v1/messages/count_tokens", HELLO),
        ("/tokenize", HELLO),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_has_no_text(monkeypatch, path, body, stream):
    def none(*_: Any, **__: Any) -> None:
        raise PromptError("scripted has no tokenizer: give it token ids instead of text")

    async with scripted_server() as server:
        for name in ("tokenizer", "takes_tools"):
            monkeypatch.setattr(ScriptedModel, name, property(none), raising=False)
        monkeypatch.setattr(server.model, "prompt", none)
        response = await server.client.post(path, json=body | {"stream": stream})
        assert response.status_code == 400, response.text
        assert "has no tokenizer" in response.json()["error"]["message"]
        assert server.engine.active == server.engine.queued == 0


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize(("length", "counted"), [(83, "102"), (200, "at least 216")])
async def test_a_prompt_longer_than_the_context(path, length, counted):
    """One that is far too long is not encoded, so that its tokens are not counted."""
    async with scripted_server(ScriptedModel(max_context=100)) as server:
        messages = [{"role": "user", "content": "x" * length}]
        response = await server.client.post(path, json={"messages": messages, "stream": True})
        error = assert_refused(response, 400, "messages")
        assert error["code"] == "context_length_exceeded"
        assert f"the prompt has {counted} tokens, but the context is limited to 100" in error["message"]
        assert server.engine.active == server.engine.queued == 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET ?query HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET //health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: nine\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_requests_as_only_raw_sockets_send_them(server, request_bytes, status):
    answer = await raw(server, request_bytes)
    assert answer.split(b" ", 2)[1] == status
    assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("target", ["http://[", "http://[::1", "http://[::1/health?a", "http://]/health", "x://[?["])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_targets_that_are_no_address(server, caplog, method, target):
    told = await raw(server, f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
    head, _, content = told.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] == b"400"
    assert b"content-type: application/json" in head.lower()
    assert json.loads(content)["error"]["type"] == "invalid_request_error"
    assert not caplog.records
    assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "http://%5B/health",
        "http://h%E2%84%80/health",
        "b%3A//%5B/../health",
        "/http://[",
        "%5B",
        "http://x?[",
        "x:[",
        "[//[",
        "*[",
    ],
)
async def test_targets_that_are_addresses_of_nothing_much(server, caplog, target):
    """What decoding its percent signs makes of one is no address, which does not matter."""
    told = await raw(server, f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert told.split(b" ", 2)[1] in (b"200", b"404")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


HANDSHAKE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
HANDSHAKE |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"Sec-WebSocket-Key": None},
        {"Sec-WebSocket-Key": ""},
        {"Sec-WebSocket-Version": None},
        {"Sec-WebSocket-Version": "12"},
        {"Connection": "keep-alive, upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Key": None},
        {"Sec-WebSocket-Version": "12", "Content-Length": "1000000"},
        {"Sec-WebSocket-Version": "12", "Transfer-Encoding": "chunked"},
    ],
)
@pytest.mark.parametrize("start", ["GET /health HTTP/1.1", "GET /v1/chat/completions HTTP/1.1", "GET / HTTP/1.0"])
async def test_websockets_are_refused(monkeypatch, caplog, start, changes):
    """Whatever is wrong with the handshake. The only connection that there may be is then free for others."""
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.1)
    fields = {name: value for name, value in (HANDSHAKE | changes).items() if value is not None}
    handshake = "\r\n".join([start, "Host: localhost", *(f"{name}: {value}" for name, value in fields.items())])
    async with scripted_server(max_connections=1) as server:
        head, _, content = (await raw(server, f"{handshake}\r\n\r\n".encode())).partition(b"\r\n\r\n")
        assert head.split(b" ", 2)[1] == b"404"
        assert json.loads(content)["error"]["message"] == "there are no websockets here"
        async with asyncio.timeout(PATIENCE):
            while (await server.client.get("/health")).status_code == 503:
                await asyncio.sleep(0.01)
    assert not caplog.records


async def test_two_requests_at_once_on_one_connection(server):
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await raw(server, one + one.replace(b"localhost\r\n", b"localhost\r\nConnection: close\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_an_http_10_client_gets_a_stream_ended_by_the_connection(server):
    body = json.dumps(HELLO | {"stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await raw(server, head.encode() + body)
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in answer


async def test_the_preflight_of_another_origin_is_not_allowed(server):
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = await server.client.options(COMPLETIONS, headers=headers)
    assert not any(name.lower().startswith("access-control") for name in response.headers)


ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2.5,
    -0.0,
    1e308,
    2**64,
    "",
    "a",
    "\0",
    "\ud7ff",
    "9" * 50,
    [],
    [[]],
    [None],
    ["a"],
    {},
]
ODD += [{"": None}, {"a": []}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "data:;base64,"}}, {"1": 1}]
FIELDS = [*ChatRequest.model_fields, "user", "metadata"]
ODD += [[{"function": {"name": "a", "arguments": "{}"}}], [{"type": "function", "function": {"name": "a"}}], "required"]
MESSAGE_FIELDS = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "function_call",
    "refusal",
]


def odd_request(chance: random.Random) -> dict:
    """A valid request with some of its values replaced, at two levels."""
    message = {"role": chance.choice(["system", "user", "assistant", "tool"]), "content": "a"}
    if chance.random() < 0.7:
        message[chance.choice(MESSAGE_FIELDS)] = chance.choice(ODD)
    request = {"messages": [message, *HELLO["messages"]], "max_tokens": 2}
    for _ in range(chance.randrange(3)):
        request[chance.choice(FIELDS)] = chance.choice(ODD)
    return request


async def test_no_request_is_a_failure_of_the_server(server):
    """Five hundred odd ones: each is served or refused, and the same in both modes."""
    chance = random.Random(5)
    for _ in range(500):
        request = odd_request(chance)
        statuses = set()
        for stream in (False, True):
            response = await server.client.post(COMPLETIONS, json=request | {"stream": stream})
            assert response.status_code in (200, 400, 404), (request, response.text)
            assert '"server_error"' not in response.text, request
            statuses.add(response.status_code)
        assert len(statuses) == 1, request
    await server.idle()
