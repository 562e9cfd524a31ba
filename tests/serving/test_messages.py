"""POST /v1/messages: Anthropic's client gets what OpenAI's gets, streamed and whole."""

from __future__ import annotations

import json

import anthropic
import pytest

from .chat_client import COMPLETIONS, body
from .conftest import Server, scripted_server
from .scripted_model import ScriptedModel
from .test_media import data_url, png

MESSAGES = "/v1/messages"
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


def asked(text: str = "?", **fields) -> dict:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


def scripted(answer: str, **options):
    """A server whose model always answers the same."""
    return scripted_server(ScriptedModel(answer=lambda _: answer, **options))


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
        ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
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
        ({"system": [5]}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.source"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [LOOK]}, "tool_choice"),
        ({"tools": [LOOK, LOOK]}, "tools.1.function.name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ],
)
async def test_what_is_refused(server, fields, param):
    response = await server.client.post(MESSAGES, json=asked() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert server.engine.active == server.engine.queued == 0


async def test_a_failure_in_mid_stream(server):
    server.model.faults = {2: RuntimeError("the scripted fault")}
    *_, error = await events(server, messages=[{"role": "user", "content": "abc"}])
    assert error == {"type": "error", "error": {"type": "api_error", "message": "the engine failed on this request"}}


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
