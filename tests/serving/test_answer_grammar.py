"""Answers that are held to a grammar, over HTTP, with a model that does what it likes where the grammar lets it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import openai
import pytest
from jsonschema_rs import is_valid
from pydantic import BaseModel, ConfigDict, Field

from models import Prompt, SamplingParams
from models.chat_template import ChatTemplate
from models.grammar import Grammar

from .chat_client import COMPLETIONS, ask, body
from .conftest import Server, scripted_server
from .scripted_model import ScriptedModel


class Contrary(ScriptedModel):
    """Writes what is scripted until the grammar forbids it, then anything that it allows, drawn with the seed."""

    def _tokens(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None) -> Iterator[int]:
        if grammar is None:
            yield from super()._tokens(prompt, sampling, grammar)
            return
        script, draw, matcher = list(self._answer(prompt)), random.Random(sampling.seed), grammar.start()
        while True:
            allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()
            token = script.pop(0) if script and script[0] in allowed else draw.choice(allowed)
            script = script if token < 256 else []
            yield token
            matcher.take(token)


def contrary(script: str = ""):
    return scripted_server(Contrary(answer=lambda _: script))


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=8)]
    founded: Annotated[int, Field(ge=1, le=9999)]
    kind: Literal["town", "harbour"]


def schema_format(schema: dict, **fields) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


CITY = schema_format(City.model_json_schema())
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "deep": {"enum": ["</tool_call>", '"{']}},
    "required": ["x", "deep"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": ARGUMENTS}}
STRICT_LOOK = {"type": "function", "function": LOOK["function"] | {"strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED_LOOK = {"type": "function", "function": {"name": "look"}}


async def answers(server: Server, count: int = 4, **fields) -> list[dict]:
    """The choices of a request for several answers with different seeds."""
    request = body("?", n=count, seed=3, temperature=1, **fields)
    response = await server.client.post(COMPLETIONS, json=request)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def error(server: Server, **fields) -> dict:
    """What is wrong with a request; nothing may have been computed for it."""
    response = await server.client.post(COMPLETIONS, json=body("?", **fields))
    assert (response.status_code, server.model.begun) == (400, 0), response.text
    return response.json()["error"]


def calls_of(choice: dict) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("strict", [None, False, True])
async def test_every_answer_is_json_of_the_schema_streamed_and_whole(strict):
    wanted = schema_format(City.model_json_schema(), strict=strict)
    async with contrary("Here is a city:") as server:
        choices = await answers(server, response_format=wanted)
        assert len({choice["message"]["content"] for choice in choices}) == 4
        for choice in choices:
            City.model_validate_json(choice["message"]["content"], strict=True)
            assert choice["finish_reason"] == "stop"
        streamed = await ask(server, "?", seed=3, response_format=wanted)
        assert streamed == choices[0]["message"]["content"]


async def test_json_mode_gives_an_object():
    async with contrary('["no", "list"]') as server:
        for choice in await answers(server, response_format={"type": "json_object"}):
            assert isinstance(json.loads(choice["message"]["content"]), dict)


async def test_text_is_not_constrained():
    async with contrary("Here is a city:") as server:
        assert await ask(server, "?", response_format={"type": "text"}) == "Here is a city:"
        assert await ask(server, "?", response_format=None) == "Here is a city:"


async def test_an_answer_that_is_cut_off_says_so():
    async with contrary() as server:
        [choice] = await answers(server, 1, response_format=CITY, max_tokens=5)
        assert choice["finish_reason"] == "length"


async def test_the_parse_helpers_of_openai():
    async with (
        contrary("no") as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        request = {"model": "scripted", "messages": body("?")["messages"], "seed": 1, "response_format": City}
        whole = await client.chat.completions.parse(**request)
        async with client.chat.completions.stream(**request) as stream:
            streamed = await stream.get_final_completion()
        assert isinstance(whole.choices[0].message.parsed, City)
        assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**request, max_tokens=3)


NESTED = {"type": "integer"}
for _ in range(70):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ({"type": "strin"}, "response_format", "Invalid type: strin"),
        ({"not": {}}, "response_format", 'Unimplemented keys: ["not"]'),
        ({"enum": ["x" * 70_000]}, "response_format", "65536 characters"),
        (False, "response_format.json_schema.schema", "dictionary"),
        (NESTED, None, "nested deeper than 64"),
    ],
)
async def test_schemas_that_no_answer_can_be_held_to(schema, param, message):
    async with contrary() as server:
        wrong = await error(server, response_format=schema_format(schema))
        assert wrong["param"] == param
        assert message in wrong["message"]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_a_schema_of_a_strict_tool_that_no_call_can_be_held_to(choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    async with contrary() as server:
        wrong = await error(server, tools=[NOW, tool], tool_choice=choice)
        assert wrong["param"] == "tools.1.function.parameters"
        assert 'Unimplemented keys: ["not"]' in wrong["message"]


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "json"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        (schema_format({}, name="a b"), "response_format.json_schema.name"),
        (schema_format({}, strict="yes"), "response_format.json_schema.strict"),
        ("json", "response_format"),
    ],
)
async def test_formats_that_do_not_exist(format_, param):
    async with contrary() as server:
        assert (await error(server, response_format=format_))["param"] == param


async def test_no_connection_is_made_for_a_reference():
    async with contrary() as server, scripted_server() as other:
        schema = {"$ref": f"{other.url}/health", "$schema": f"{other.url}/health"}
        before = other.engine.metrics.totals()
        assert (await error(server, response_format=schema_format(schema)))["param"] == "response_format"
        assert other.engine.metrics.totals() == before
        assert other.engine.total_requests == 0


async def test_a_grammar_that_becomes_too_much_work_fails_alone():
    async with contrary() as server:
        wanted = schema_format({"type": "string", "pattern": "^(a?){1000}a{1000}$"})
        response = await server.client.post(COMPLETIONS, json=body("?", response_format=wanted))
        assert response.status_code == 400
        assert "grammar cannot be followed" in response.json()["error"]["message"]
        assert "grammar cannot be followed" in await ask(server, "?", response_format=wanted)
        City.model_validate_json(await ask(server, "?", response_format=CITY))


@pytest.mark.parametrize("choice", ["required", NAMED_LOOK])
@pytest.mark.parametrize("parallel", [None, False])
async def test_a_demanded_call_is_made_and_its_arguments_fit(choice, parallel):
    async with contrary("I would rather not.") as server:
        fields = {"tools": [NOW, LOOK], "tool_choice": choice, "parallel_tool_calls": parallel}
        found = await answers(server, 6, **fields)
        for answer in found:
            assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
            for name, arguments in calls_of(answer):
                assert arguments == {} if name == "now" else is_valid(ARGUMENTS, arguments)
        names = [[name for name, _ in calls_of(answer)] for answer in found]
        assert {name for several in names for name in several} == (
            {"now", "look"} if choice == "required" else {"look"}
        )
        assert all(len(several) == 1 for several in names) == (parallel is False or choice != "required")


async def test_a_schema_of_a_tool_that_is_not_strict_is_followed_as_far_as_the_grammar_goes():
    vague = ARGUMENTS | {"not": {}, "format": "form"}
    tool = {"type": "function", "function": {"name": "look", "parameters": vague}}
    async with contrary() as server:
        for answer in await answers(server, tools=[tool], tool_choice="required", parallel_tool_calls=False):
            [(name, arguments)] = calls_of(answer)
            assert name == "look"
            assert is_valid(ARGUMENTS, arguments)


async def test_a_strict_tool_that_the_model_may_call():
    """Text is free; a call that is begun becomes a valid one, and after it text is free again."""
    script = 'I look. <tool_call>\n{"name": "look", "arguments": {"y": 5}}\n</tool_call>'
    async with contrary(script) as server:
        for answer in await answers(server, 3, tools=[NOW, STRICT_LOOK], max_tokens=3000):
            assert answer["message"]["content"].startswith("I look.")
            name, arguments = calls_of(answer)[0]
            assert name == "look"
            assert is_valid(ARGUMENTS, arguments)
        [answer] = await answers(server, 1, tools=[NOW, LOOK])
        assert calls_of(answer) == [("look", {"y": 5})], "which is not strict"
    script = "<think>\nno</think>\n\nNo call."
    async with contrary(script) as server:
        [answer] = await answers(server, 1, tools=[STRICT_LOOK], max_tokens=len(script))
        assert answer["message"] == {
            "role": "assistant",
            "content": "No call.",
            "refusal": None,
            "reasoning_content": "no",
        }


@pytest.mark.parametrize("script", ['<tool_call>\n{"name": "look"', '{"name'])
async def test_an_answer_in_json_or_a_call(script):
    async with contrary(script) as server:
        for answer in await answers(server, tools=[LOOK], response_format=CITY, parallel_tool_calls=False):
            if script.startswith("<"):
                [(_, arguments)] = calls_of(answer)
                assert is_valid(ARGUMENTS, arguments)
            else:
                City.model_validate_json(answer["message"]["content"], strict=True)
        for answer in await answers(server, tools=[LOOK], response_format=CITY, tool_choice="none"):
            City.model_validate_json(answer["message"]["content"], strict=True)


OPENED = "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(("template", "thinking"), [(OPENED, None), (None, True), (None, None)])
async def test_reasoning_comes_before_the_json_where_it_is_on(template, thinking):
    """The template opens it, or the client asks for it; otherwise the model has to answer at once."""
    script = ("" if template else "<think>") + 'Is it {"a" or 5?\n</think>\n\n'
    async with contrary(script) as server:
        if template:
            server.model._prompts.template = ChatTemplate(template, "one that opens the reasoning")
        for answer in await answers(server, response_format=CITY, enable_thinking=thinking):
            City.model_validate_json(answer["message"]["content"], strict=True)
            reasoned = answer["message"].get("reasoning_content")
            assert reasoned == ('Is it {"a" or 5?' if template or thinking else None)


async def test_an_answer_that_the_client_has_begun_is_not_json():
    async with contrary() as server:
        messages = [*body("?")["messages"], {"role": "assistant", "content": "{"}]
        response = await server.client.post(
            COMPLETIONS, json={"messages": messages, "continue_final_message": True, "response_format": CITY}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_a_demanded_call_and_json_in_the_form_of_anthropic():
    async with contrary() as server:
        wanted = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
        answer = await server.client.post("/v1/messages", json=body("?", max_tokens=900, output_config=wanted))
        City.model_validate_json(answer.json()["content"][0]["text"], strict=True)
        tool = {"name": "look", "input_schema": ARGUMENTS}
        request = body(
            "?", max_tokens=900, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}
        )
        answer = await server.client.post("/v1/messages", json=request)
        assert is_valid(ARGUMENTS, answer.json()["content"][0]["input"])
