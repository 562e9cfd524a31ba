"""Tools as requests bring them: what the model may call, what it has called, and which call is demanded."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from serving.errors import bad_request
from serving.json_body import DEEPEST_NESTING, Strict, deeper_than
from serving.tool_calls import OPEN

MOST_TOOLS = 128
# A call, as Qwen's templates ask for it, is these around a name and an object, then the closing tag.
BEFORE_NAME, AFTER_NAME, END = f'{OPEN}\n{{"name": "', '", "arguments":', "}\n"
BETWEEN = "\n"  # calls
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]


class Function(Strict):
    """A function that the model may call. It goes to the template as it came."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; there is one type of them."""

    type: Literal["function"]
    function: Function


def _object_of(arguments: Any) -> Any:
    """Arguments as an object, which templates need, out of the JSON text in which OpenAI's clients send them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ValueError("should be the JSON text of an object") from None
    if deeper_than(value, DEEPEST_NESTING):
        raise ValueError(f"is nested deeper than {DEEPEST_NESTING} levels")
    return value


class CalledFunction(Strict):
    """What the assistant has called in an earlier turn."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object_of, json_schema_input_type=str | dict[str, Any])]


class SentCall(Strict):
    """A call in an assistant message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


def check_tools(tools: list[Tool]) -> None:
    """Refuses names that are there twice, since a call could not be told apart."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad_request(f"'tools.{index}.function.name': '{name}' is there twice", f"tools.{index}.function.name")


def opening_of(choice: Any, tools: list[Tool]) -> str:
    """The beginning of the call that `tool_choice` demands; empty if it demands none.

    The prompt ends with it, so that the model can only go on with the call.

    Raises:
        ApiError: 400 for a choice that does not exist.
    """
    if choice in (None, "none", "auto"):
        return ""
    names = [tool.function.name for tool in tools]
    if choice == "required":
        if not tools:
            raise bad_request("'tool_choice': a call is required, but there are no 'tools'", "tool_choice")
        return BEFORE_NAME
    name = named_of(choice)
    if name is None:
        known = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise bad_request(f"'tool_choice' should be {known}, found {choice!r:.80}", "tool_choice")
    if name not in names:
        raise bad_request(f"'tool_choice' names {name!r:.80}, which is not among the 'tools'", "tool_choice")
    return BEFORE_NAME + name + AFTER_NAME


def named_of(choice: Any) -> str | None:
    """The name of the function that `tool_choice` names; None if it has another form."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
