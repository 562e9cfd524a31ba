"""The fields of POST /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from models.sampling import MAX_TOP_LOGPROBS
from serving.content_parts import check_content
from serving.errors import ApiError, bad_request
from serving.generation_request import Count, GenerationRequest, StreamOptions, check_bias_names
from serving.json_body import MOST_MESSAGES, Strict, checked_fields, parse_json
from serving.tools import MOST_TOOLS, SentCall, Tool, check_tools, opening_of

TEMPLATE_NAMES = {"self", "messages", "added", "tools", "add_generation_prompt"}  # what the server itself passes
Role = Literal["system", "developer", "user", "assistant", "tool"]
CONTEXT_MODE = re.compile("full|none|last([1-9][0-9]{0,5})?")


def _known_mode(mode: str) -> str:
    if not CONTEXT_MODE.fullmatch(mode):
        raise ValueError("should be 'full', 'last', 'none', or 'last' with a number such as 'last4'")
    return mode


class Message(Strict):
    """One turn; `content` is checked by `check_content`, because its errors should name the part."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Role
    content: Any = None
    tool_calls: Annotated[list[SentCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class ChatStreamOptions(StreamOptions):
    """The original's two frames besides."""

    include_metrics: bool | None = None
    include_tokens: bool | None = None


class AnswerSchema(Strict):
    """A JSON Schema for the answer. Whether it is `strict` or not, the answer is held to it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None


class ChatRequest(GenerationRequest):
    """A valid request. None means that the client did not say."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    stream_options: ChatStreamOptions | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    response_format: ResponseFormat | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_mode: Annotated[str, AfterValidator(_known_mode)] | None = None
    context_tokens: Annotated[list[int], Field(fail_fast=True)] | None = None
    continue_final_message: bool | None = None

    def as_sent(self, error: ApiError) -> ApiError:
        """The error under the names that the client has used; others than here where the request was translated."""
        return error

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; the newer field wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def kept_messages(self) -> list[tuple[int, Message]]:
        """The messages that `context_mode` lets the model see, with their places in the request: all of them, or the
        first system message and the last one or several. An answer that the client has begun is none of them."""
        messages = list(enumerate(self.messages[:-1] if self.begun_answer else self.messages))
        if self.context_mode in (None, "full") or not messages:
            return messages
        window = messages[-int(CONTEXT_MODE.fullmatch(self.context_mode)[1] or 1) :]
        system = next((entry for entry in messages if entry[1].role in ("system", "developer")), window[0])
        return window if system[0] >= window[0][0] else [system, *window]

    @property
    def begun_answer(self) -> str:
        """The text with which the answer begins, in the request's last message; empty if the client has begun none."""
        return self.messages[-1].content if self.continue_final_message else ""

    @property
    def alternatives(self) -> int:
        """How many of the best tokens are reported with every token."""
        return self.top_logprobs or 0

    @property
    def template_settings(self) -> dict[str, Any]:
        """What goes to the chat template; `chat_template_kwargs` wins over the field of the same name."""
        own = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        tools = {"tools": self.callable_tools} if self.callable_tools else {}
        return own | (self.chat_template_kwargs or {}) | tools

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """What the model may call, as the client wrote it."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the answer; None if it may be any text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return wanted.json_schema.schema_ if wanted.type == "json_schema" else {"type": "object"}

    @property
    def opening(self) -> str:
        """The beginning of the call that the client demands; empty if it demands none."""
        return opening_of(self.tool_choice, self.tools or [])


Chat = TypeVar("Chat", bound=ChatRequest)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Reads and checks a request body.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    return checked_chat_request(parse_json(body))


def checked_chat_request(values: dict[str, Any], kind: type[Chat] = ChatRequest) -> Chat:
    """The same for what has been read."""
    request = checked_fields(kind, values)
    for index, message in enumerate(request.messages):
        check_content(message.content, f"messages.{index}.content", optional=message.role == "assistant")
    check_bias_names(request)
    _check_supported(request)
    return request


def _check_supported(request: ChatRequest) -> None:
    """Refuses what would otherwise be silently ignored."""
    if (request.n or 1) > 1 and (request.asks("include_metrics") or request.asks("include_tokens")):
        raise bad_request("'n' must be 1 with 'include_metrics' or 'include_tokens'", "n")
    if request.functions:
        raise bad_request("'functions' are not supported; 'tools' are", "functions")
    check_tools(request.tools or [])
    opening_of(request.tool_choice, request.tools or [])
    last = request.messages[-1]
    is_begun = last.role == "assistant" and isinstance(last.content, str) and last.content and not last.tool_calls
    if request.continue_final_message and not is_begun:
        message = "'continue_final_message': the last message should be the assistant's, a text without calls"
        raise bad_request(message, "continue_final_message")
    reserved = TEMPLATE_NAMES & set(request.chat_template_kwargs or ())
    if reserved:
        raise bad_request(f"'chat_template_kwargs' may not set {sorted(reserved)}", "chat_template_kwargs")
    _check_response_format(request)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")


def _check_response_format(request: ChatRequest) -> None:
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
        raise bad_request("'response_format.json_schema' is required", "response_format.json_schema")
    if request.answer_schema is not None and request.continue_final_message:
        raise bad_request("'response_format': an answer that the client has begun may not be JSON", "response_format")
