"""Tools over HTTP: what the model is told, what the client gets, streamed and whole, and the conversation after."""

from __future__ import annotations

import json

import openai
import pytest

from models.chat_template import ChatTemplate

from .chat_client import COMPLETIONS, body, frames
from .conftest import Server, scripted, scripted_server
from .scripted_model import ScriptedModel

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
TOOLS = [NOW, LOOK]
TRICKY = {"at": '"</tool_call>" {é😀', "deep": [{"x": None}]}
TRICKY_TEXT = json.dumps(TRICKY, ensure_ascii=False)
LOOK_CALL = f'<tool_call>\n{{"name": "look", "arguments": {TRICKY_TEXT}}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


async def both(server: Server, **fields) -> list[tuple[dict, str]]:
    """The message and finish reason of the same request, streamed and whole."""
    request = body("?", **{"tools": TOOLS, **fields})
    stream = await server.client.post(COMPLETIONS, json=request | {"stream": True})
    assert stream.status_code == 200, stream.text
    choices = [frame["choices"][0] for frame in frames(stream.text)]
    whole = (await server.client.post(COMPLETIONS, json=request)).json()["choices"][0]
    streamed = joined([choice["delta"] for choice in choices])
    return [(streamed, choices[-1]["finish_reason"]), (without_ids(whole["message"]), whole["finish_reason"])]


def joined(deltas: list[dict]) -> dict:
    """The message that deltas add up to, as clients join them; checks the form of calls."""
    message: dict = {"role": deltas[0]["role"], "content": None, "refusal": None}
    calls: list[dict] = []
    for delta in deltas[1:]:
        assert len(delta) <= 1
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                assert list(part) == ["index", "id", "type", "function"]
                assert part["function"]["arguments"] == ""
                assert part["id"].startswith("call_")
                calls.append({"type": part["type"], "function": dict(part["function"])})
            else:
                assert part == {"index": len(calls) - 1, "function": {"arguments": part["function"]["arguments"]}}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message


def without_ids(message: dict) -> dict:
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return message


def call(name: str, arguments: dict) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        ("hello", "hello", [], "stop"),
        (NOW_CALL, None, [call("now", {})], "tool_calls"),
        (f"I look.\n{LOOK_CALL}\n{NOW_CALL}", "I look.", [call("look", TRICKY), call("now", {})], "tool_calls"),
        ("<tool_call>\n{now}\n</tool_call>", "\n{now}\n", [], "stop"),
    ],
)
async def test_calls_streamed_and_whole(answer, content, calls, reason):
    """One byte at a time: tags never show, several calls are counted, what is no call is content."""
    message = {"role": "assistant", "content": content, "refusal": None} | ({"tool_calls": calls} if calls else {})
    async with scripted(answer) as server:
        assert await both(server) == [(message, reason)] * 2


async def test_only_one_call_if_the_client_wants_no_more():
    async with scripted(f"{NOW_CALL}\n{NOW_CALL}") as server:
        for message, reason in await both(server, parallel_tool_calls=False):
            assert (message["tool_calls"], reason) == ([call("now", {})], "tool_calls")


async def test_an_answer_that_is_cut_off_in_a_call():
    async with scripted(NOW_CALL) as server:
        for message, reason in await both(server, max_tokens=20):
            assert ("tool_calls" in message, reason) == (False, "length")


async def test_without_tools_an_answer_is_text():
    """Also with tools that may not be called, of which the model is not told."""
    async with scripted(NOW_CALL) as server:
        shown = {"role": "assistant", "content": NOW_CALL, "refusal": None}
        for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
            assert await both(server, **fields) == [(shown, "stop")] * 2
        assert len(set(await prompts(server, {"tools": []}, {"tool_choice": "none"}))) == 1
        assert "now" in (await prompts(server, {}))[0]


async def prompts(server: Server, *requests: dict) -> list[str]:
    """What the model gets to read."""
    texts = []
    for fields in requests:
        request = body("?", **{"tools": TOOLS, "stream_options": {"include_tokens": True}, "max_tokens": 1, **fields})
        answer = (await server.client.post(COMPLETIONS, json=request)).json()
        texts.append(server.model.tokenizer.decode(answer["history_tokens"][: answer["usage"]["prompt_tokens"]]))
    return texts


@pytest.mark.parametrize(
    ("choice", "opening", "rest"),
    [
        ("required", '<tool_call>\n{"name": "', 'now", "arguments": {}}\n</tool_call>'),
        (
            {"type": "function", "function": {"name": "now"}},
            '<tool_call>\n{"name": "now", "arguments":',
            " {}}\n</tool_call>",
        ),
    ],
)
async def test_a_demanded_call_is_begun_for_the_model(choice, opening, rest):
    async with scripted(rest) as server:
        message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call("now", {})]}
        assert await both(server, tool_choice=choice) == [(message, "tool_calls")] * 2
        assert (await prompts(server, {"tool_choice": choice}))[0].endswith("assistant\n" + opening)


async def test_a_conversation_with_calls_and_their_results():
    """Arguments reach the template as an object, whether they came as one or as text."""
    async with scripted("It is noon.") as server:
        seen = []
        for arguments in (TRICKY, json.dumps(TRICKY)):
            messages = [
                {"role": "user", "content": "Look!"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "a red circle"},
                {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
            ]
            seen += await prompts(server, {"messages": messages})
    assert seen[0] == seen[1]
    assert LOOK_CALL in seen[0]
    assert "<tool_response>\na red circle\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in seen[0]


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{% set tools = [] %}{{ messages[0].content, tools }}"]
)
@pytest.mark.parametrize("text", ["?", "do it now", json.dumps(TOOLS)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_template_without_tools_is_not_asked_for_calls(source, text, stream):
    """Whatever the user writes about them."""
    async with scripted("hello") as server:
        server.model._prompts.template = ChatTemplate(source, "a template")
        for choice in ("auto", "required"):
            request = body(text, tools=TOOLS, tool_choice=choice, stream=stream)
            response = await server.client.post(COMPLETIONS, json=request)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools"
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            assert (await server.client.post(COMPLETIONS, json=body(text, **fields))).status_code == 200


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{% if tools %}{{ tools | length }}{% endif %}",
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ messages[0].content }}{{ tools }}",
        "{% macro listed(tools) %}{{ tools }}{% endmacro %}{{ listed(tools) }}{{ messages[0].content }}",
    ],
)
async def test_a_template_that_does_not_write_the_names_of_tools_may_have_them(source):
    async with scripted(NOW_CALL) as server:
        server.model._prompts.template = ChatTemplate(source, "a template")
        response = await server.client.post(COMPLETIONS, json=body("?", tools=TOOLS))
        assert response.status_code == 200
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_openai_helper_collects_calls():
    request = {"model": "scripted", "messages": body("?")["messages"], "tools": TOOLS}
    async with (
        scripted(f"I look.\n{LOOK_CALL}\n{NOW_CALL}") as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        async with client.chat.completions.stream(**request) as stream:
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**request)
    for choice in (final.choices[0], whole.choices[0]):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        found = [(entry.function.name, json.loads(entry.function.arguments)) for entry in choice.message.tool_calls]
        assert found == [("look", TRICKY), ("now", {})]
        assert len({entry.id for entry in choice.message.tool_calls}) == 2


THINKING = "<think>\nwhy?\n\nbecause <tool_call>\n</think>\n\n"


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_is_never_content(opened):
    """Whether the model opens it or the template does; calls after it are calls, tags in it are not."""
    async with scripted((THINKING.removeprefix("<think>") if opened else THINKING) + f"So.\n{NOW_CALL}") as server:
        if opened:
            server.model._prompts.template = ChatTemplate(
                "{{ tools }}<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n",
                "one",
            )
        message = {"role": "assistant", "content": "So.", "refusal": None}
        message |= {"reasoning_content": "why?\n\nbecause <tool_call>", "tool_calls": [call("now", {})]}
        assert await both(server) == [(message, "tool_calls")] * 2
        demanded = await server.client.post(COMPLETIONS, json=body("?", tools=TOOLS, tool_choice="required"))
        assert demanded.status_code == (400 if opened else 200)


async def test_reasoning_that_fills_the_answer():
    async with scripted(THINKING) as server:
        for message, reason in await both(server, tools=None, max_tokens=10):
            assert message == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "wh"}
            assert reason == "length"


async def test_logprobs_of_held_back_text_are_told_once():
    answer = f"<think>a</think>b{NOW_CALL}"
    async with scripted(answer) as server:
        response = await server.client.post(COMPLETIONS, json=body("?", tools=TOOLS, stream=True, logprobs=True))
        told = [frame["choices"][0]["logprobs"] or {"content": []} for frame in frames(response.text)]
        assert "".join(entry["token"] for part in told for entry in part["content"]) == answer


async def test_a_call_in_the_making_is_no_silence():
    """Comments come while nothing else does."""
    async with scripted_server(ScriptedModel(answer=lambda _: NOW_CALL, pace=0.01), ping_seconds=0.05) as server:
        response = await server.client.post(COMPLETIONS, json=body("?", tools=TOOLS, stream=True))
        assert response.text.count(": waiting\n\n") >= 2
        assert joined([frame["choices"][0]["delta"] for frame in frames(response.text)])["tool_calls"]
