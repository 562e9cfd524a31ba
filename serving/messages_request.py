"""The fields of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API, and the same request as a chat
completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serving.chat_request import ChatRequest, checked_chat_request
from serving.errors import bad_request
from serving.generation_request import Count, StopText
from serving.json_body import MOST_MESSAGES, Strict, read_fields
from serving.tools import MOST_TOOLS, FunctionName

Choice = Literal["auto", "any", "tool", "none"]
Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Turn(Strict):
    """One turn: a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolDefinition(Strict):
    """A function that the model may call. Those of other types run on Anthropic's machines."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """Whether the model should call."""

    type: Choice
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the template should let the model think; how long, nothing limits."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Strict):
    """The JSON schema that the answer should fit."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """How the answer should look."""

    format: OutputFormat | None = None


class CountTokensRequest(Strict):
    """A valid request for the length of a prompt. None means that the client did not say."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """A valid request for an answer."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=4)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


def parse_messages_request(body: bytes) -> ChatRequest:
    """Reads and checks a request body, and says it as a chat completion.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    request = read_fields(MessagesRequest, body)
    generation = {
        "stream": request.stream,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    return checked_chat_request(_prompt_fields(request) | generation)


def parse_count_request(body: bytes) -> ChatRequest:
    """The same for a request to count tokens.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    return checked_chat_request(_prompt_fields(read_fields(CountTokensRequest, body)))


def _prompt_fields(request: CountTokensRequest) -> dict[str, Any]:
    """What the prompt follows from, under the names of a chat completion."""
    messages = [] if request.system is None else [{"role": "system", "content": _texts(request.system, "system")}]
    for index, turn in enumerate(request.messages):
        messages += _messages(turn, f"messages.{index}.content")
    fields = {"messages": messages, "model": request.model, **_tool_fields(request)}
    if request.thinking is not None:
        fields["enable_thinking"] = request.thinking.type != "disabled"
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [
            {"type": "function", "function": _function(tool.model_dump(exclude_unset=True))} for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool under the names that templates know."""
    names = {"input_schema": "parameters"}
    return {names.get(name, name): value for name, value in tool.items() if name != "type"}


def _texts(content: str | list[dict[str, Any]], place: str) -> str | list[dict[str, Any]]:
    """What a system message says."""
    if isinstance(content, str):
        return content
    return [_content_part(block, f"{place}.{index}") for index, block in enumerate(content)]


def _messages(turn: Turn, place: str) -> list[dict[str, Any]]:
    """A turn as messages: the results of calls are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if not turn.content:
        raise bad_request(f"'{place}' should be a text or a list of blocks, found []", place)
    if turn.role == "system":
        return [{"role": "system", "content": _texts(turn.content, place)}]
    read = _assistant if turn.role == "assistant" else _user
    return read(turn.content, place)


def _user(blocks: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    messages, parts = [], []
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        if block.get("type") != "tool_result":
            parts.append(_content_part(block, where))
            continue
        content = block.get("content") or ""
        if isinstance(content, list):
            content = [_content_part(part, f"{where}.content.{number}") for number, part in enumerate(content)]
        elif not isinstance(content, str):
            raise bad_request(f"'{where}.content' should be a text or a list of blocks", f"{where}.content")
        messages.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": content})
    return messages + ([{"role": "user", "content": parts}] if parts else [])


def _assistant(blocks: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    text, reasoning, calls = "", "", []
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        kind = block.get("type")
        if kind == "text":
            text += _text(block, "text", where)
        elif kind == "thinking":
            reasoning += _text(block, "thinking", where)
        elif kind == "tool_use":
            function = {"name": _text(block, "name", where), "arguments": _object(block, "input", where)}
            calls.append({"id": _text(block, "id", where), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            known = "'text', 'thinking', 'redacted_thinking' or 'tool_use'"
            raise bad_request(f"'{where}.type' should be {known}, found {kind!r:.80}", f"{where}.type")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return [message | ({"tool_calls": calls} if calls else {})]


def _content_part(block: Any, place: str) -> dict[str, Any]:
    """A text or a picture as a part of a chat message."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", place)}
    if kind != "image":
        raise bad_request(f"'{place}.type' should be 'text' or 'image', found {kind!r:.80}", f"{place}.type")
    source = _object(block, "source", place)
    if source.get("type") != "base64":
        message = f"'{place}.source.type' should be 'base64': pictures at other addresses are not fetched"
        raise bad_request(message, f"{place}.source.type")
    data = _text(source, "data", f"{place}.source")
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}}


def _text(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"'{place}.{name}' should be a text, found {value!r:.80}", f"{place}.{name}")
    return value


def _object(block: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    value = block.get(name)
    if not isinstance(value, dict):
        raise bad_request(f"'{place}.{name}' should be an object, found {value!r:.80}", f"{place}.{name}")
    return value
