"""POST /v1/messages: Anthropic's client gets what OpenAI's gets, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from models.chat_template import ChatTemplate

from .chat_client import COMPLETIONS, body, data_url
from .conftest import Server, scripted, scripted_server
from .scripted_model import ScriptedModel
from .test_media import png

MESSAGES = "/v1/messages"
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


def asked(text: str = "?", **fields) -> dict:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


async def events(server: Server, **fields) -> list[dict]:
    """The events of a stream, whose names are those of their objects."""
    response = await server.client.post(MESSAGES, json=asked(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    objects = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        objects.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {objects[-1]['type']}"
    return objects


async def whole(server: Server, **fields) -> dict:
    response = await server.client.post(MESSAGES, json=asked(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_whole_answer(server):
    answer = await whole(server, messages=[{"role": "user", "content": "abc"}])
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "scripted")
    assert answer["content"] == [{"type": "text", "text": "abc"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == 4


async def test_the_events_of_a_stream():
    async with scripted(f"<think>w</think>ab{CALL}") as server:
        start, *between, delta, stop = await events(server, tools=[LOOK])
        assert (start["type"], start["message"]["content"]) == ("message_start", [])
        assert start["message"]["usage"] == {
            "input_tokens": start["message"]["usage"]["input_tokens"],
            "output_tokens": 0,
        }
        shown = [(event["type"].removeprefix("content_block_"), event["index"]) for event in between]
        text = [("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)]
        call = [("start", 2), ("delta", 2), ("stop", 2)]
        assert shown == [("start", 0), ("delta", 0), ("stop", 0), *text, *call]
        assert between[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
        assert between[1]["delta"] == {"type": "thinking_delta", "thinking": "w"}
        assert between[3]["content_block"] == {"type": "text", "text": ""}
        block = between[-3]["content_block"]
        assert block == {"type": "tool_use", "id": block["id"], "name": "look", "input": {}}
        assert between[-2]["delta"] == {"type": "input_json_delta", "partial_json": '{"at": "é"}'}
        assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert stop == {"type": "message_stop"}
        answer = await whole(server, tools=[LOOK])
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        assert answer["content"][2]["input"] == {"at": "é"}
        assert answer["usage"]["output_tokens"] == delta["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ("end_turn", None)),
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["x", "wn"]}, ("stop_sequence", "wn")),
        ({"stop_sequences": ["brown", "row", "ro"]}, ("stop_sequence", "ro")),
    ],
)
async def test_why_an_answer_ends(fields, reason):
    async with scripted("The brown fox") as server:
        answer = await whole(server, **fields)
        assert (answer["stop_reason"], answer["stop_sequence"]) == reason
        *_, delta, _ = await events(server, **fields)
        assert tuple(delta["delta"].values()) == reason


async def test_the_prompt_is_that_of_a_chat_completion(server):
    """System, pictures, calls, their results and earlier thinking, in the places where a chat has them."""
    picture = data_url(png())
    source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
    blocks = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "a circle"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    image = {"type": "image_url", "image_url": {"url": picture}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a circle"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "look", "description": "Look.", "parameters": LOOK["input_schema"]}
    tools = [{"type": "function", "function": function}]
    chat = (await server.client.post(COMPLETIONS, json=body("", messages=messages, tools=tools))).json()
    answer = await whole(server, messages=blocks, tools=[LOOK], system=[{"type": "text", "text": "be brief"}])
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["content"] == [{"type": "text", "text": "and?"}]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
async def test_a_demanded_call(choice):
    async with scripted(' {"at": "é"}}' if "name" in choice else 'look", "arguments": {"at": "é"}}') as server:
        answer = await whole(server, tools=[LOOK], tool_choice=choice)
        assert [block["input"] for block in answer["content"]] == [{"at": "é"}]
        assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "messages.0.content.0.source.type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
            "messages.0.content.0.content",
        ),
        ({"system": 5}, "system"),
        ({"system": [5]}, "system.0"),
        ({"system": [{"type": "image"}]}, "system.0.source"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"messages": [{"role": "system", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        ({"thinking": {"type": "long"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
async def test_what_is_refused(server, fields, param):
    response = await server.client.post(MESSAGES, json=asked() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert is_anthropic_error(response.json(), "invalid_request_error")
    assert server.engine.active == server.engine.queued == 0


def is_anthropic_error(body: dict, kind: str) -> bool:
    """Whether a body has the form that Anthropic's API and OpenAI's have in common."""
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return body["error"]["type"] == kind


async def test_a_failure_in_mid_stream(server):
    server.model.faults = {2: RuntimeError("the scripted fault")}
    start, *_, error = await events(server, messages=[{"role": "user", "content": "abc"}])
    assert is_anthropic_error(error, "api_error")
    assert error["error"]["message"] == "the engine failed on this request"
    assert error["request_id"].removeprefix("req_") == start["message"]["id"].removeprefix("msg_")


async def test_a_stream_that_the_end_of_the_server_cuts_off(server):
    server.model.hold_at = 3
    stream = asyncio.create_task(server.client.post(MESSAGES, json=asked("abc", stream=True)))
    await server.held()
    await server.engine.drain(0)
    *_, error = (await stream).text.removesuffix("\n\n").split("\n\n")
    name, data = error.split("\n")
    assert name == "event: error"
    assert is_anthropic_error(json.loads(data.removeprefix("data: ")), "overloaded_error")


@pytest.mark.parametrize(
    ("path", "options", "kind"),
    [
        (MESSAGES, {"content": b"{"}, (400, "invalid_request_error")),
        (MESSAGES, {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, (415, "invalid_request_error")),
        (MESSAGES, {"json": asked(model="other")}, (404, "not_found_error")),
        (MESSAGES, {"content": b"x" * 5000}, (413, "request_too_large")),
        (f"{MESSAGES}/batches", {"json": {}}, (404, "not_found_error")),
        (f"{MESSAGES}/count_tokens", {"json": {"messages": []}}, (400, "invalid_request_error")),
    ],
)
async def test_errors_have_anthropics_types(path, options, kind):
    async with scripted_server(max_body_bytes=4000) as server:
        response = await server.client.post(path, **{"headers": {"Content-Type": "application/json"}} | options)
        assert response.status_code == kind[0]
        assert is_anthropic_error(response.json(), kind[1])
        assert response.json()["request_id"] is None
        assert "request-id" not in response.headers
        wrong = await server.client.get(MESSAGES)
        assert wrong.status_code == 405
        assert is_anthropic_error(wrong.json(), "invalid_request_error")
        assert list((await server.client.get("/v1/messagesx")).json()) == ["error"]


async def test_the_anthropic_client():
    async with (
        scripted(f"Hi 😀\u2028{CALL}") as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client,
    ):
        request = {"model": "scripted", **asked(tools=[LOOK])}
        message = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        for answer in (message, final):
            assert [block.type for block in answer.content] == ["text", "tool_use"]
            assert answer.content[1].input == {"at": "é"}
            assert answer.stop_reason == "tool_use"
        assert text == message.content[0].text
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**request, extra_body={"temperature": 3})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**request | {"model": "other"})


BAD = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
GOOD = BAD | {"source": BAD["source"] | {"data": data_url(png()).partition(",")[2]}}
TEXT = {"type": "text", "text": "a"}
USED = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
UNUSABLE = {"type": "object", "properties": {"a": {"not": {}}}}


def turns(*contents) -> list[dict]:
    """Turns of the user and the assistant."""
    return [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": turns([BAD])}, "messages.0.content.0.source.data"),
        ({"messages": turns([BAD]), "system": "a"}, "messages.0.content.0.source.data"),
        ({"messages": turns("a", "b", [TEXT, GOOD, BAD]), "system": [TEXT]}, "messages.2.content.2.source.data"),
        ({"messages": turns("a", [TEXT, USED], [RESULT, TEXT, BAD])}, "messages.2.content.2.source.data"),
        (
            {"messages": turns("a", [USED], [RESULT, RESULT | {"content": [TEXT, BAD]}]), "system": "a"},
            "messages.2.content.1.content.1.source.data",
        ),
        ({"messages": turns("a", [USED], [RESULT], "b", [BAD])}, "messages.4.content.0.source.data"),
        (
            {"messages": [{"role": "system", "content": [TEXT]}, *turns([TEXT, BAD])]},
            "messages.1.content.1.source.data",
        ),
        ({"messages": turns([]), "system": "a"}, "messages.0.content"),
        ({"messages": turns("a"), "system": []}, "system"),
        ({"messages": turns("a"), "system": [TEXT, BAD]}, "system.1.source.data"),
        ({"messages": turns("a"), "system": [TEXT, 5]}, "system.1"),
        ({"messages": turns("a"), "tools": [LOOK, LOOK]}, "tools.1.name"),
        ({"messages": turns("a"), "tools": [LOOK | {"name": "a b"}]}, "tools.0.name"),
        ({"messages": turns("a"), "tools": [LOOK, {"name": "b"}]}, "tools.1.input_schema"),
        ({"messages": turns("a"), "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": turns("a"), "tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": turns("a"), "tools": [LOOK], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        (
            {"messages": turns("a", "b"), "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
        ({"messages": turns("a"), "output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_what_is_wrong_is_named_as_it_was_sent(server, path, fields, param):
    """Although it is found in the chat completion that the request becomes."""
    await assert_named(server, path, {"max_tokens": 5} | fields, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "tools": [LOOK, LOOK | {"name": "b", "input_schema": {"type": "object", "properties": 5}}],
                "tool_choice": {"type": "any"},
            },
            "tools.1.input_schema",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": UNUSABLE}}}, "output_config.format"),
    ],
)
async def test_an_unusable_schema_is_named_but_does_not_count(server, fields, param):
    """It costs time to find out, and a count has no answer that could follow it."""
    request = {"messages": turns("a"), "max_tokens": 5} | fields
    await assert_named(server, MESSAGES, request, param)
    counted = await server.client.post(f"{MESSAGES}/count_tokens", json=request)
    assert counted.status_code == 200


async def assert_named(server: Server, path: str, request: dict, param: str) -> None:
    """That a request is refused with the name of the field that is wrong."""
    response = await server.client.post(path, json=request)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}" in error["message"]
    *places, last = param.split(".")
    for place in places:  # the field is there, unless its lack is what is wrong
        request = request[int(place) if isinstance(request, list) else place]
    assert "is required" in error["message"] or (int(last) if isinstance(request, list) else last) in (
        range(len(request)) if isinstance(request, list) else request
    )


@asynccontextmanager
async def clients(server: Server, key: str = "none"):
    """Anthropic's client and OpenAI's, which do not try again."""
    options = {"api_key": key, "max_retries": 0, "timeout": 20}
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, **options) as ours,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options) as other,
    ):
        yield ours, other


async def errors_of(
    server: Server, key: str = "none", **fields
) -> tuple[anthropic.APIStatusError, openai.APIStatusError]:
    """What both clients raise for the same request to POST /v1/messages."""
    request = {"model": "scripted", **asked(**fields)}
    async with clients(server, key) as (ours, other):
        with pytest.raises(anthropic.APIStatusError) as first:
            await ours.messages.create(**request)
        with pytest.raises(openai.APIStatusError) as second:
            await other.post("/messages", cast_to=object, body=request)
    return first.value, second.value


async def test_both_clients_read_a_refusal(server):
    ours, other = await errors_of(server, max_tokens=0)
    assert isinstance(ours, anthropic.BadRequestError)
    assert (ours.type, ours.request_id) == ("invalid_request_error", None)
    assert isinstance(other, openai.BadRequestError)
    assert (other.type, other.param, other.code) == ("invalid_request_error", "max_tokens", None)
    assert ours.api_message == other.body["message"]
    assert "'max_tokens'" in ours.api_message


async def test_both_clients_read_a_prompt_that_is_too_long():
    async with scripted_server(ScriptedModel(max_context=50)) as server:
        ours, other = await errors_of(server, text="x" * 100)
        assert ours.type == "invalid_request_error"
        assert other.code == "context_length_exceeded"
        assert ours.request_id.startswith("req_")
        assert ours.request_id == ours.response.headers["request-id"] == ours.body["request_id"]


async def test_both_clients_read_that_the_key_is_wrong():
    async with scripted_server(api_keys=("secret",)) as server:
        ours, other = await errors_of(server)
        assert isinstance(ours, anthropic.AuthenticationError)
        assert ours.type == "authentication_error"
        assert isinstance(other, openai.AuthenticationError)
        assert other.code == "invalid_api_key"
        async with clients(server, "secret") as (client, _):
            answer = await client.messages.create(model="scripted", **asked("hi"))
            assert answer.content[0].text == "hi"


async def test_both_clients_read_that_the_queue_is_full():
    async with scripted_server(max_queued=1) as server:
        server.model.hold_at = 1
        waiting = [asyncio.create_task(server.client.post(MESSAGES, json=asked("hi"))) for _ in range(2)]
        await server.held()
        await server.until(lambda: server.engine.queued == 1)
        ours, other = await errors_of(server)
        assert isinstance(ours, anthropic.RateLimitError)
        assert ours.type == "rate_limit_error"
        assert ours.response.headers["retry-after"] == "1"
        assert (type(other), other.code) == (openai.RateLimitError, "queue_full")
        server.model.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_both_clients_read_that_the_server_is_going(server):
    await server.engine.drain(0)
    ours, other = await errors_of(server)
    assert isinstance(ours, anthropic.InternalServerError)
    assert (ours.status_code, ours.type) == (503, "overloaded_error")
    assert (other.status_code, other.code) == (503, "draining")


async def test_both_clients_read_that_the_engine_failed(server):
    server.model.faults = {2: RuntimeError("the scripted fault")}
    async with clients(server) as (ours, _):
        with pytest.raises(anthropic.InternalServerError) as error:
            await ours.messages.create(model="scripted", **asked("abc"))
        assert (error.value.status_code, error.value.type) == (500, "api_error")
        assert error.value.request_id.startswith("req_")
        server.model.faults = {2: RuntimeError("the scripted fault")}
        with pytest.raises(anthropic.APIStatusError, match="the engine failed") as told:
            async with ours.messages.stream(model="scripted", **asked("abc")) as stream:
                await stream.get_final_message()
        assert told.value.type == "api_error"
        assert told.value.body["request_id"].startswith("req_")


async def test_the_name_of_a_request_is_that_of_its_answer(server):
    async with clients(server) as (ours, _):
        message = await ours.messages.create(model="scripted", **asked("hi"))
        assert message._request_id.removeprefix("req_") == message.id.removeprefix("msg_")
        async with ours.messages.stream(model="scripted", **asked("hi")) as stream:
            final = await stream.get_final_message()
            assert stream.request_id.removeprefix("req_") == final.id.removeprefix("msg_")


async def test_counting_tokens(server):
    """As many as the answer to the same request says that its prompt had."""
    fields = {"system": "be brief", "tools": [LOOK], "messages": [{"role": "user", "content": "abc"}]}
    async with clients(server) as (ours, _):
        counted = await ours.messages.count_tokens(model="scripted", **fields)
        answer = await ours.messages.create(model="scripted", max_tokens=1, **fields)
        assert counted.input_tokens == answer.usage.input_tokens > 50
        picture = {"type": "base64", "media_type": "image/png", "data": data_url(png()).partition(",")[2]}
        fields = {"messages": [{"role": "user", "content": [{"type": "image", "source": picture}]}]}
        assert (await ours.messages.count_tokens(model="scripted", **fields)).input_tokens > 64
        with pytest.raises(anthropic.NotFoundError):
            await ours.messages.count_tokens(model="other", **fields)
    assert server.engine.total_requests == 1


async def test_a_system_message_among_the_turns(server):
    """Where it may stand, the template decides."""
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "be brief"}
    blocks = system | {"content": [{"type": "text", "text": "be brief"}]}
    field = await whole(server, messages=[user], system="be brief")
    for first in (system, blocks):
        assert (await whole(server, messages=[first, user]))["usage"] == field["usage"]
    response = await server.client.post(MESSAGES, json=asked(messages=[user, system, user]))
    assert "must be the first" in response.json()["error"]["message"]


async def test_an_answer_that_the_client_has_begun():
    """It goes on where the last message ends, and is told without it."""
    async with scripted(" is 5.") as server:
        user = {"role": "user", "content": "2 + 3?"}
        begun = [user, {"role": "assistant", "content": "The sum"}]
        answer = await whole(server, messages=begun)
        assert answer["content"] == [{"type": "text", "text": " is 5."}]
        plain = await whole(server, messages=[user])
        assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"] + len("The sum")
        options = {"messages": begun, "continue_final_message": True, "stream_options": {"include_tokens": True}}
        chat = (await server.client.post(COMPLETIONS, json=options)).json()
        assert chat["choices"][0]["message"]["content"] == " is 5."
        ids = chat["history_tokens"]
        assert server.model.tokenizer.decode(ids).endswith("assistant\nThe sum is 5.")
        blocks = [user, {"role": "assistant", "content": [{"type": "text", "text": "The sum"}]}]
        assert (await whole(server, messages=blocks))["usage"] == answer["usage"]


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    ],
)
async def test_what_cannot_be_continued(server, last):
    request = {"messages": [{"role": "user", "content": "?"}, last], "continue_final_message": True}
    response = await server.client.post(COMPLETIONS, json=request)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


async def test_an_answer_cannot_be_begun_for_a_model_that_reasons_first(server):
    server.model._prompts.template = ChatTemplate("{{ messages[0].content }}<|im_start|>assistant\n<think>\n", "test")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The sum"}]
    response = await server.client.post(MESSAGES, json=asked() | {"messages": messages})
    assert response.status_code == 400
    assert "reasons before it answers" in response.json()["error"]["message"]


async def test_an_answer_that_fills_the_context():
    async with scripted("x" * 100, max_context=80) as server:
        answer = await whole(server)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 80
        assert (await whole(server, max_tokens=2))["stop_reason"] == "max_tokens"
