"""The fields of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API, and the same request as a chat
completion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from serving.chat_request import ChatRequest, checked_chat_request
from serving.errors import ApiError, bad_request
from serving.generation_request import Count, StopText, TopK
from serving.json_body import MOST_MESSAGES, Strict, read_fields
from serving.tools import MOST_TOOLS, FunctionName

Choice = Literal["auto", "any", "tool", "none"]
Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# What the fields of a chat completion are called here, where messages do not matter.
NAMES = {
    r"^tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"^tools\.(\d+)\.function": r"tools.\1",
    r"^response_format": "output_config.format",
    r"\.image_url\.url$": ".source.data",
}


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
    top_k: TopK | None = None


class TranslatedRequest(ChatRequest):
    """The same request as a chat completion. `origins` tells of places in its messages where they were in what the
    client has sent."""

    origins: dict[str, str]

    def as_sent(self, error: ApiError) -> ApiError:
        """The error under the names that the client has used."""
        return _as_sent(error, self.origins)


def _as_sent(error: ApiError, origins: dict[str, str]) -> ApiError:
    if error.param is None:
        return error
    param = error.param
    known = [place for place in origins if f"{param}.".startswith(f"{place}.")]
    if known:
        longest = max(known, key=len)
        param = origins[longest] + param.removeprefix(longest)
    for pattern, name in NAMES.items():
        param = re.sub(pattern, name, param)
    return error.renamed(param)


def parse_messages_request(body: bytes) -> TranslatedRequest:
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
    return _translated(request, generation)


def parse_count_request(body: bytes) -> TranslatedRequest:
    """The same for a request to count tokens.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    return _translated(read_fields(CountTokensRequest, body), {})


@dataclass(frozen=True)
class _Message:
    """A message of a chat completion, and where in the client's request places in it were."""

    values: dict[str, Any]
    origins: dict[str, str]


def _translated(request: CountTokensRequest, generation: dict[str, Any]) -> TranslatedRequest:
    origins: dict[str, str] = {}
    values = _prompt_fields(request, origins) | generation
    try:
        return checked_chat_request(values | {"origins": origins}, TranslatedRequest)
    except ApiError as error:
        raise _as_sent(error, origins) from None


def _prompt_fields(request: CountTokensRequest, origins: dict[str, str]) -> dict[str, Any]:
    """What the prompt follows from, under the names of a chat completion; fills in `origins`."""
    translated = []
    if request.system is not None:
        content = _texts(request.system, "system")
        translated.append(_Message({"role": "system", "content": content}, {"content": "system"}))
    for index, turn in enumerate(request.messages):
        translated += _messages(turn, f"messages.{index}.content")
    for index, message in enumerate(translated):
        origins |= {f"messages.{index}.{place}": origin for place, origin in message.origins.items()}
    messages = [message.values for message in translated]
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
        if choice.type == "tool" and choice.name is None:
            raise bad_request("'tool_choice.name' is required", "tool_choice.name")
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


def _messages(turn: Turn, place: str) -> list[_Message]:
    """A turn as messages: the results of calls are messages of their own."""
    if isinstance(turn.content, str):
        return [_Message({"role": turn.role, "content": turn.content}, {"content": place})]
    if not turn.content:
        raise bad_request(f"'{place}' should be a text or a list of blocks, found []", place)
    if turn.role == "system":
        return [_Message({"role": "system", "content": _texts(turn.content, place)}, {"content": place})]
    read = _assistant if turn.role == "assistant" else _user
    return read(turn.content, place)


def _user(blocks: list[dict[str, Any]], place: str) -> list[_Message]:
    messages, parts, origins = [], [], {"content": place}
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        if block.get("type") != "tool_result":
            origins[f"content.{len(parts)}"] = where
            parts.append(_content_part(block, where))
            continue
        content = block.get("content") or ""
        if isinstance(content, list):
            content = [_content_part(part, f"{where}.content.{number}") for number, part in enumerate(content)]
        elif not isinstance(content, str):
            raise bad_request(f"'{where}.content' should be a text or a list of blocks", f"{where}.content")
        values = {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": content}
        messages.append(_Message(values, {"content": f"{where}.content"}))
    return messages + ([_Message({"role": "user", "content": parts}, origins)] if parts else [])


def _assistant(blocks: list[dict[str, Any]], place: str) -> list[_Message]:
    text, reasoning, calls, origins = "", "", [], {"content": place}
    for index, block in enumerate(blocks):
        where = f"{place}.{index}"
        kind = block.get("type")
        if kind == "text":
            text += _text(block, "text", where)
        elif kind == "thinking":
            reasoning += _text(block, "thinking", where)
        elif kind == "tool_use":
            function = {"name": _text(block, "name", where), "arguments": _object(block, "input", where)}
            origins[f"tool_calls.{len(calls)}.function.arguments"] = f"{where}.input"
            calls.append({"id": _text(block, "id", where), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            known = "'text', 'thinking', 'redacted_thinking' or 'tool_use'"
            raise bad_request(f"'{where}.type' should be {known}, found {kind!r:.80}", f"{where}.type")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return [_Message(message | ({"tool_calls": calls} if calls else {}), origins)]


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
