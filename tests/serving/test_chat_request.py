"""Validation: exact ranges, no coercion, and the field's name in every refusal."""

from __future__ import annotations

import json

import pytest

from models import SamplingParams
from serving.chat_request import parse_chat_request
from serving.errors import ApiError
from serving.generation_request import seeded

HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields):
    return parse_chat_request(json.dumps({"messages": HELLO, **fields}).encode())


def tool(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


def refused(**fields) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(**fields)
    assert error.value.status == 400
    json.dumps(error.value.body, allow_nan=False)
    return error.value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b'{"a":', "not valid JSON"),
        (b"\xff", "not valid JSON in UTF-8"),
        (b'"text"', "should be a JSON object, found str"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', "NaN is not a number"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":Infinity}', "Infinity is not a number"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":1e309}', "temperature"),
    ],
)
def test_bodies_that_are_no_request(body, message):
    with pytest.raises(ApiError, match=message) as error:
        parse_chat_request(body)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([None], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "robot", "content": "a"}], "messages.0.role"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages.0.content.0.image_url"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages.0.content.0.type"),
    ],
)
def test_messages_that_are_refused(messages, param):
    assert refused(messages=messages).param == param


def test_messages_must_be_there():
    with pytest.raises(ApiError) as error:
        parse_chat_request(b"{}")
    assert (error.value.param, error.value.message) == ("messages", "'messages' is required")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "0.7", True]),
        ("top_p", [0, 1.1, True]),
        ("top_k", [-1, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, 2.1]),
        ("presence_penalty", [-2.1, 2.1, "1"]),
        ("frequency_penalty", [-2.1, 2.1, False]),
        ("max_tokens", [0, -1, 1.0, True, "5"]),
        ("max_completion_tokens", [0, -5]),
        ("seed", [1.5, True, 2**63]),
        ("n", [0, 9, True]),
        ("stream", [1, "true"]),
        ("logprobs", [1]),
        ("logit_bias", [[1], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": True}]),
        ("stop", [5, "", ["a", ""], ["a", "b", "c", "d", "e"]]),
        ("tools", [[{"type": "function"}], "x", [{"type": "search"}], [tool("now"), tool("now")], [tool("a b")]]),
        ("tool_choice", ["required", "x", 5, {}, {"type": "function", "function": {"name": "now"}}]),
        ("parallel_tool_calls", [1]),
        ("response_format", [{"type": "json"}, {"type": "json_schema"}, {}, "json"]),
        ("stream_options", [5]),
        ("model", [5]),
        (
            "context_mode",
            ["", "first", "Last", "last0", "last-1", "last 4", "last1.5", "last\u0664", "last4\n", 4, True],
        ),
        ("context_tokens", ["1", 5, [1, True], [1.0], ["1"], [[1]]]),
    ],
)
def test_values_that_are_refused(field, values):
    for value in values:
        assert refused(**{field: value}).param.split(".")[0] == field, value


@pytest.mark.parametrize(
    ("field", "value", "param", "message"),
    [
        ("stop", ["a"] * 5, "stop", "at most 4 items"),
        ("stop", ["a", 5], "stop.1", "valid string, found 5"),
        ("stop", ["a", ""], "stop.1", "at least 1 character, found ''"),
        ("stop", 5, "stop", "valid string, found 5"),
        ("messages", None, "messages", "valid list, found null"),
    ],
)
def test_the_message_is_about_the_type_that_the_value_has(field, value, param, message):
    error = refused(**{field: value})
    assert (error.param, message in error.message) == (param, True), error.message


def test_top_logprobs_needs_logprobs():
    assert refused(top_logprobs=2).param == "top_logprobs"
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert parse(logprobs=True, top_logprobs=20).top_logprobs == 20


def test_what_is_accepted():
    request = parse(
        temperature=0, top_p=1, max_tokens=None, stop="x", n=1, tools=[], response_format={"type": "text"}, new_field=1
    )
    assert (request.temperature, request.stops, request.limit) == (0, ("x",), None)
    assert parse(messages=[{"role": "user", "content": ""}])
    assert parse(messages=[{"role": "assistant", "content": None}, *HELLO])


def test_the_newer_limit_wins():
    assert parse(max_tokens=5, max_completion_tokens=7).limit == 7


def test_sampling_takes_the_models_defaults_for_what_is_not_said():
    default = SamplingParams(temperature=0.7, top_k=20)
    sampling = parse(top_k=5, logit_bias={"3": -100}, seed=-1).sampling(default)
    assert sampling == SamplingParams(temperature=0.7, top_k=5, logit_bias={3: -100}, seed=-1)
    assert parse(temperature=0).sampling(default).temperature == 0


def test_thinking_settings_reach_the_template():
    request = parse(enable_thinking=True, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert request.template_settings == {"enable_thinking": False, "x": 1}


def test_tools_go_to_the_template_as_they_came():
    tools = [tool("now", description=None, parameters={"type": "object", "properties": {}}, strict=True)]
    assert parse(tools=tools).template_settings == {"tools": tools}
    assert parse(tools=tools, tool_choice="none").template_settings == {}


def test_a_demanded_call_is_begun():
    named = {"type": "function", "function": {"name": "now"}}
    request = parse(tools=[tool("then"), tool("now")], tool_choice=named)
    assert request.opening == '<tool_call>\n{"name": "now", "arguments":'
    assert parse(tools=[tool("now")], tool_choice="required").opening == '<tool_call>\n{"name": "'
    assert parse(tools=[tool("now")], tool_choice="auto").opening == ""
    assert refused(tools=[tool("then")], tool_choice=named).param == "tool_choice"


@pytest.mark.parametrize(("sent", "meant"), [('{"a": 1}', {"a": 1}), ("", {}), ({"a": 1}, {"a": 1})])
def test_earlier_calls_have_their_arguments_as_objects(sent, meant):
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": sent}}
    request = parse(messages=[{"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert request.messages[0].tool_calls[0].function.arguments == meant


def test_the_originals_frames_are_for_one_choice():
    assert parse(n=8, stream_options={"include_usage": True}).n == 8
    assert refused(n=2, stream_options={"include_tokens": True}).param == "n"


def test_seeds_of_choices_differ_and_follow_from_the_requests():
    seeds = [[seeded(SamplingParams(seed=seed), index).seed for index in range(8)] for seed in (-1, 0, 1, 2**63 - 1)]
    assert [first for first, *_ in seeds] == [-1, 0, 1, 2**63 - 1]
    assert len({seed % 2**64 for row in seeds for seed in row}) == 32
    assert seeded(SamplingParams(), 3) == SamplingParams()


def test_what_context_modes_there_are_is_said():
    error = refused(context_mode="first")
    assert "'full', 'last', 'none', or 'last' with a number such as 'last4', found 'first'" in error.message


@pytest.mark.parametrize(
    ("roles", "mode", "kept"),
    [
        ("suaua", None, [0, 1, 2, 3, 4]),
        ("suaua", "full", [0, 1, 2, 3, 4]),
        ("suaua", "last", [0, 4]),
        ("suaua", "none", [0, 4]),
        ("suaua", "last1", [0, 4]),
        ("suaua", "last3", [0, 2, 3, 4]),
        ("suaua", "last4", [0, 1, 2, 3, 4]),
        ("suaua", "last5", [0, 1, 2, 3, 4]),
        ("suaua", "last999999", [0, 1, 2, 3, 4]),
        ("duaua", "last2", [0, 3, 4]),
        ("uaua", "last2", [2, 3]),
        ("uasua", "last", [2, 4]),
        ("uasua", "last3", [2, 3, 4]),
        ("susua", "last3", [0, 2, 3, 4]),
        ("s", "last", [0]),
        ("u", "none", [0]),
    ],
)
def test_what_the_context_mode_keeps(roles, mode, kept):
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
    found = parse(messages=messages, context_mode=mode).kept_messages
    assert [place for place, _ in found] == kept
    assert [message.content for _, message in found] == [str(place) for place in kept]


@pytest.mark.parametrize(("roles", "kept"), [("sua", [0, 1]), ("ua", [0]), ("uaua", [2]), ("a", [])])
def test_an_answer_that_is_begun_is_not_the_last_message(roles, kept):
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
    found = parse(messages=messages, context_mode="last", continue_final_message=True)
    assert [place for place, _ in found.kept_messages] == kept
    assert found.begun_answer == messages[-1]["content"]
