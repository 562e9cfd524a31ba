"""The OpenAPI document of the server, GET /openapi.json. What requests may be comes from the models that check them;
what is written here is how the answers look."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serving.admin import project_version
from serving.chat_request import ChatRequest
from serving.completions import CompletionRequest
from serving.messages_request import CountTokensRequest, MessagesRequest
from serving.settings import Settings
from serving.tokens import TokenizeText

Schema = dict[str, Any]

ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "The server has an API key, and the request does not.",
    403: "Without an API key: the name of the server is not one of its own, or only programs on its machine may ask.",
    404: "The model is not served here.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The body is not declared as plain JSON.",
    429: "Too many requests wait.",
    500: "The computation of this request failed.",
    503: "The model is loading, the server is shutting down, the engine has failed, or memory is short.",
}
QUESTION = {"messages": [{"role": "user", "content": "Count from 1 to 5"}]}
EXAMPLES = {
    "ChatRequest": QUESTION,
    "CompletionRequest": {"prompt": "Count from 1 to 5", "max_tokens": 20},
    "MessagesRequest": QUESTION | {"max_tokens": 20},
    "CountTokensRequest": QUESTION,
    "TokenizeText": {"prompt": "Count from 1 to 5"},
}
FOR_TEXT = (400, 401, 404, 408, 413, 415, 429, 500, 503)
KEYS = [{"bearer": []}, {"key": []}]


def document(settings: Settings) -> Schema:
    """The document of a server with these settings."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "kestrel-jax", "version": project_version(), "description": "One model, over OpenAI's API."},
        "paths": _paths(settings.model_id),
        "components": {
            "schemas": _requests(settings.model_id) | _answers(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": KEYS if settings.api_keys else [],
    }


def _paths(model_id: str) -> Schema:
    name = {"name": "model", "in": "path", "required": True, "schema": _one_of(model_id)}
    return {
        "/v1/chat/completions": {
            "post": _text("A chat completion, streamed or whole", "ChatRequest", "ChatCompletion"),
        },
        "/v1/completions": {
            "post": _text("What follows on prompts that are taken as they are", "CompletionRequest", "Completion"),
        },
        "/v1/messages": {
            "post": _text(
                "A chat in the form of Anthropic's API", "MessagesRequest", "AnthropicMessage", "AnthropicError"
            ),
        },
        "/v1/messages/count_tokens": {
            "post": _operation("The length of its prompt", _json("Length"), FOR_TEXT, error="AnthropicError")
            | _body("CountTokensRequest")
        },
        "/tokenize": {
            "post": _operation("The token ids of a text or a conversation", _json("Tokens"), FOR_TEXT)
            | _body("TokenizeText", "ChatRequest")
        },
        "/v1/models": {"get": _operation("The one model that is served", _json("Models"), (401,))},
        "/v1/models/{model}": {
            "get": _operation("The same, by its name", _json("Model"), (401, 404)) | {"parameters": [name]}
        },
        "/health": {
            "get": _operation("Whether requests are taken, and what is under way", _json("Health"), ())
            | {"security": []}
            | {
                "responses": {code: _answer(text, _json("Health")) for code, text in HEALTH.items()}
                | {"403": _error(403, "Error")}
            }
        },
        "/metrics": {"get": _operation("What happens inside, for Prometheus", _plain("text/plain"), (401,))},
        "/admin/status": {"get": _operation("What the server is and does", _json("Status"), (401,))},
        "/admin/shutdown": {"post": _operation("Does what SIGTERM does", _json("Shutdown"), (401,), success="202")},
        "/openapi.json": {"get": _operation("This document", _json("Document"), (401,))},
        "/": {"get": _operation("A chat page for people", _plain("text/html"), ()) | {"security": []}},
    }


HEALTH = {"200": "Requests are taken.", "503": "The model is loading, the server shutting down, or the engine failed."}


def _operation(
    summary: str, content: Schema, errors: tuple[int, ...], *, success: str = "200", error: str = "Error"
) -> Schema:
    responses = {success: _answer("As asked.", content)}
    refusals = {str(code): _error(code, error) for code in sorted({*errors, 403})}
    return {"summary": summary, "responses": responses | refusals}


EVENT = {
    "type": "object",
    "description": "Each event where `stream` is true. `data` is JSON, in the end of a completion `[DONE]`.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def _text(summary: str, request: str, answer: str, error: str = "Error") -> Schema:
    """An operation that generates text: one object, or a stream of frames."""
    content = _json(answer) | {"text/event-stream": {"schema": EVENT}}
    return _operation(summary, content, FOR_TEXT, error=error) | _body(request)


def _body(*names: str) -> Schema:
    """A request of one of these forms."""
    schema = {"anyOf": [_ref(name) for name in names]} if len(names) > 1 else _ref(names[0])
    content = {"schema": schema, "example": EXAMPLES[names[0]]}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _answer(description: str, content: Schema) -> Schema:
    return {"description": description, "content": content}


def _error(code: int, name: str) -> Schema:
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return _answer(ERRORS[code], _json(name)) | ({"headers": retry} if code in (429, 503) else {})


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _plain(kind: str) -> Schema:
    return {kind: {"schema": {"type": "string"}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


@cache
def _requests(model_id: str) -> Schema:
    """The schemas of all requests, by the names of the models that check them. What these leave open, because functions
    check it whose errors say more, is described here."""
    models: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, MessagesRequest, CountTokensRequest)
    wanted = [(model, "validation") for model in (*models, TokenizeText)]
    _, made = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    schemas = made["$defs"]
    for (name, field), described in _open_fields().items():
        schemas[name]["properties"][field] |= described
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] |= _or_null(_one_of(model_id))
    return schemas


def _open_fields() -> dict[tuple[str, str], Schema]:
    """What the fields look like whose type the models leave open."""
    ids = _list(COUNT)
    url = _object(url=TEXT) | {"additionalProperties": True}
    part = {
        "anyOf": [
            _object(type=_one_of("text"), text=TEXT),
            _object(type=_one_of("image_url"), image_url=url),
            _object(type=_one_of("video_url"), video_url=url),
            _object({"fps": NUMBER}, type=_one_of("video_frames"), video_frames=_list(TEXT)),
        ]
    }
    named = _object(type=_one_of("function"), function=_object(name=TEXT))
    prompt = {"anyOf": [TEXT, _list(TEXT) | FILLED, ids | FILLED, _list(ids | FILLED) | FILLED]}
    return {
        ("CompletionRequest", "prompt"): prompt,
        ("Message", "content"): {"anyOf": [TEXT, _list(part) | FILLED, NULL]},
        ("ChatRequest", "tool_choice"): {"anyOf": [_one_of("none", "auto", "required"), named, NULL]},
    }


def _object(optional: Schema | None = None, /, **properties: Schema) -> Schema:
    """An object that has these properties, may have the `optional` ones, and no others."""
    every = properties | (optional or {})
    return {"type": "object", "properties": every, "required": list(properties), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


TEXT, NUMBER, NULL, ANY = {"type": "string"}, {"type": "number"}, {"type": "null"}, {"type": "object"}
COUNT = {"type": "integer", "minimum": 0}
FILLED = {"minItems": 1}
STATES = _one_of("loading", "ok", "draining", "error")


@cache
def _answers() -> Schema:
    """The schemas of all answers."""
    return _chat_answers() | _text_answers() | _other_answers()


def _chat_answers() -> Schema:
    token = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
    call = _object(id=TEXT, type=_one_of("function"), function=_object(name=TEXT, arguments=TEXT))
    said = {"reasoning_content": TEXT, "tool_calls": _list(call)}
    message = _object(said, role=_one_of("assistant"), content=_or_null(TEXT), refusal=NULL)
    choice = _object(
        index=COUNT,
        message=message,
        logprobs=_or_null(_object(content=_list(_object(**token, top_logprobs=_list(_object(**token)))), refusal=NULL)),
        finish_reason=_one_of("stop", "length", "tool_calls"),
    )
    counts = ("prompt_tokens", "last_user_tokens", "n_tokens")
    times = ("ttft_ms", "tpot_ms", "total_ms", "prefill_ms", "tok_s")
    metrics = _object({"context_tokens": COUNT}, **dict.fromkeys(counts, COUNT), **dict.fromkeys(times, NUMBER))
    return {
        "ChatCompletion": _object(
            {"metrics": metrics, "history_tokens": _list(COUNT)},
            **_envelope("chat.completion"),
            choices=_list(choice),
            usage=_ref("Usage"),
        ),
        "Usage": _object(
            prompt_tokens=COUNT,
            completion_tokens=COUNT,
            total_tokens=COUNT,
            prompt_tokens_details=_object(cached_tokens=COUNT),
        ),
    }


def _envelope(kind: str) -> Schema:
    return {"id": TEXT, "object": _one_of(kind), "created": COUNT, "model": TEXT}


def _text_answers() -> Schema:
    logprobs = _object(
        tokens=_list(TEXT),
        token_logprobs=_list(NUMBER),
        top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
        text_offset=_list(COUNT),
    )
    reason = _one_of("stop", "length")
    choice = _object(text=TEXT, index=COUNT, logprobs=_or_null(logprobs), finish_reason=reason)
    return {
        "Completion": _object(**_envelope("text_completion"), choices=_list(choice), usage=_ref("Usage")),
        "AnthropicMessage": _object(
            id=TEXT,
            type=_one_of("message"),
            role=_one_of("assistant"),
            model=TEXT,
            content=_list(ANY),
            stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
            stop_sequence=_or_null(TEXT),
            usage=_object(input_tokens=COUNT, output_tokens=COUNT),
        ),
        "Length": _object(input_tokens=COUNT),
        "Tokens": _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT)),
    }


def _other_answers() -> Schema:
    error = _object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))
    model = _object(id=TEXT, object=_one_of("model"), created=COUNT, owned_by=TEXT)
    counters = {"type": "object", "additionalProperties": COUNT}
    numbers = ("queued", "active", "total_requests", "max_seq", "max_queued")
    return {
        "Error": _object(error=error),
        "AnthropicError": _object(type=_one_of("error"), error=error, request_id=_or_null(TEXT)),
        "Model": model,
        "Models": _object(object=_one_of("list"), data=_list(_ref("Model"))),
        "Health": _object(
            {"disk_cache": _object(files=COUNT, bytes=COUNT, queries=COUNT, hits=COUNT, read_tokens=COUNT)},
            status=STATES,
            model=TEXT,
            busy={"type": "boolean"},
            **dict.fromkeys(numbers, COUNT),
            slots=_object(total=COUNT, running=COUNT, kept_tokens=COUNT),
        ),
        "Status": _object(
            status=STATES,
            problem=_or_null(TEXT),
            version=TEXT,
            uptime_s=NUMBER,
            model=TEXT,
            kernels=_or_null(TEXT),
            counters=counters,
            memory=_object(resident_mb=COUNT, available_mb=COUNT),
            settings=ANY,
        ),
        "Shutdown": _object(status=_one_of("draining"), active=COUNT, queued=COUNT),
        "Document": ANY,
    }
