"""LangChain's ChatOpenAI: whole, streamed, with tools and with structured output."""

from __future__ import annotations

import json

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from .conftest import Server, scripted_server
from .scripted_model import ScriptedModel

TEXT = "hello 😀\u2028 wörld"


def chat(server: Server, **settings) -> ChatOpenAI:
    return ChatOpenAI(
        model="scripted", base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20, **settings
    )


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


async def test_langchain_whole(server):
    answer = await chat(server, temperature=0.5, seed=1).ainvoke([SystemMessage("Be kind."), HumanMessage(TEXT)])
    assert answer.content == TEXT
    assert answer.usage_metadata["output_tokens"] == len(TEXT.encode()) + 1
    assert answer.response_metadata["finish_reason"] == "stop"


async def test_langchain_streamed(server):
    pieces = [chunk async for chunk in chat(server, stream_usage=True).astream([HumanMessage(TEXT)])]
    assert "".join(piece.content for piece in pieces) == TEXT
    assert len(pieces) > 5
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["output_tokens"] == len(TEXT.encode()) + 1


async def test_langchain_calls_tools():
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    async with scripted_server(ScriptedModel(answer=lambda messages: f"<tool_call>\n{call}\n</tool_call>")) as server:
        model = chat(server).bind_tools([weather])
        answer = await model.ainvoke([HumanMessage("How is the weather in Oslo?")])
        [asked] = answer.tool_calls
        assert (asked["name"], asked["args"]) == ("weather", {"city": "Oslo"})
        streamed = [chunk async for chunk in model.astream([HumanMessage("And now?")])]
        whole = streamed[0]
        for chunk in streamed[1:]:
            whole += chunk
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"city": "Oslo"})]


async def test_langchain_gives_a_tools_answer_back(server):
    model = chat(server).bind_tools([weather])
    messages = [
        HumanMessage("How is the weather in Oslo?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function"} | CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny in Oslo"},
    ]
    assert (await model.ainvoke(messages)).content == "How is the weather in Oslo?"


CALLED = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


async def test_langchain_structured_output():
    async with scripted_server(ScriptedModel(answer=lambda messages: '{"name": "Ada", "age": 36}')) as server:
        model = chat(server).with_structured_output(Person, method="json_schema")
        assert await model.ainvoke([HumanMessage("Who are you?")]) == Person(name="Ada", age=36)
