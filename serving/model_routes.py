"""The routes that need the model: chat, completions, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from quart import Blueprint, Response, g, jsonify

from serving import chat, completions, messages, sse, tokens
from serving.chat_request import parse_chat_request
from serving.completions import parse_completion_request
from serving.engine import Engine
from serving.errors import ApiError
from serving.job import Job
from serving.json_body import Bodies, Parsed
from serving.messages_request import parse_count_request, parse_messages_request
from serving.settings import Settings
from serving.tokens import parse_tokenize_request


def model_routes(
    engine: Engine, settings: Settings, workers: ThreadPoolExecutor, parser: ThreadPoolExecutor
) -> Blueprint:
    """The routes around an engine; `workers` build prompts, `parser` takes large bodies apart."""
    blueprint = Blueprint("model", __name__)
    bodies = Bodies(settings, parser)
    engine.metrics.watch_bodies(lambda: bodies.held)
    counter = tokens.TokenCounter(engine, workers)
    ping_seconds = settings.ping_seconds or None

    async def read(parse: Callable[[bytes], Parsed], check: Callable[[], None] = engine.check_room) -> Parsed:
        """The request, unless `check` finds that it would be refused: then not even its body is taken in."""
        check()
        return await bodies.read(parse)

    def admit(model: str | None) -> Job:
        """A place for this request, given back however its task ends, even before its stream has begun."""
        check_model(model, settings)
        job = engine.admit(owner=g.owner)
        asyncio.current_task().add_done_callback(lambda _: engine.release(job))
        return job

    @blueprint.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        """A chat completion, streamed or whole."""
        asked = await read(parse_chat_request)
        job, events = admit(asked.model), settings.kestrel_events
        exchange = await chat.begin(engine, asked, settings.model_id, job, workers, events=events)
        if asked.stream:
            return _streamed(chat.stream(exchange, ping_seconds))
        return jsonify(await chat.whole(exchange))

    @blueprint.post("/v1/completions")
    async def text_completions() -> Response:
        """What follows on prompts that are taken as they are."""
        asked = await read(parse_completion_request)
        completion = await completions.begin(engine, asked, settings.model_id, admit(asked.model), workers)
        if asked.stream:
            return _streamed(completions.stream(completion, ping_seconds))
        return jsonify(await completions.whole(completion))

    @blueprint.post("/v1/messages")
    async def anthropic_messages() -> Response:
        """A chat in the form of Anthropic's API."""
        asked = await read(parse_messages_request)
        exchange = await chat.begin(engine, asked, settings.model_id, admit(asked.model), workers)
        return (
            _streamed(messages.stream(exchange, ping_seconds))
            if asked.stream
            else jsonify(await messages.whole(exchange))
        )

    @blueprint.post("/v1/messages/count_tokens")
    async def count_tokens() -> Response:
        """How many tokens the prompt of such a chat has."""
        asked = await read(parse_count_request, engine.check_ready)
        check_model(asked.model, settings)
        return jsonify({"input_tokens": (await counter.answer(asked))["count"]})

    @blueprint.post("/tokenize")
    async def tokenize() -> Response:
        """The token ids of a text or a conversation."""
        asked = await read(parse_tokenize_request, engine.check_ready)
        check_model(asked.model, settings)
        return jsonify(await counter.answer(asked))

    return blueprint


def check_model(model: str | None, settings: Settings) -> None:
    """Refuses a model that is not the one that is served."""
    if model not in (None, settings.model_id):
        message = f"the model '{model:.80}' is not served here; '{settings.model_id}' is"
        raise ApiError(404, message, param="model", code="model_not_found")


def _streamed(frames: AsyncIterator[bytes]) -> Response:
    response = Response(frames, headers=sse.HEADERS)
    response.timeout = None  # Quart would cut a stream off after a minute
    return response
