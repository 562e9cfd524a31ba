"""POST /v1/chat/completions after validation: admission, prompt, generation, and the answer as a stream or whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from models import ContextLengthError, KestrelError, Prompt, Step
from serving import replies, sse
from serving.chat_request import ChatRequest
from serving.engine import Engine
from serving.errors import ApiError, bad_request
from serving.job import Job, Work
from serving.media import conversation

log = logging.getLogger("kestrel.chat")


@dataclass
class Exchange:
    """One admitted request and its answer so far. Belongs to its handler alone."""

    engine: Engine
    job: Job
    request: ChatRequest
    prompt: Prompt
    last_user_tokens: int
    model_id: str
    steps: list[Step] = field(default_factory=list)
    unreported: list[Step] = field(default_factory=list)

    def take(self, step: Step) -> None:
        """Notes a generated token."""
        self.steps.append(step)
        self.unreported.append(step)

    def asks(self, option: str) -> bool:
        """Whether the client has set this stream option."""
        return bool(getattr(self.request.stream_options, option, None))

    def chunk(self, delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
        """A stream object. Where usage is asked for, every one has the field, null in all but the last."""
        usage = {"usage": None} if self.asks("include_usage") else {}
        return replies.chunk(self.job, self.model_id, delta, **choice) | usage

    def logprobs(self) -> dict[str, Any] | None:
        """The log-probabilities of the tokens not yet reported, if the client wants them; each is told once."""
        steps, self.unreported = self.unreported, []
        return replies.logprobs(steps, self.engine.model.tokenizer) if self.request.logprobs else None

    def metrics(self) -> dict[str, Any]:
        """The request's times, in the original's form."""
        return replies.metrics(self.job, self.prompt, self.last_user_tokens, self.steps)


async def begin(engine: Engine, request: ChatRequest, model_id: str, job: Job, workers: ThreadPoolExecutor) -> Exchange:
    """Builds the prompt of an admitted request on a worker thread, and queues it.

    Raises:
        ApiError: 400 for a conversation or picture that cannot be used, or a prompt longer than the context.
    """
    prompt, last_user_tokens, work = await asyncio.get_running_loop().run_in_executor(
        workers, _prepare, engine, request
    )
    engine.submit(job, work)
    return Exchange(engine, job, request, prompt, last_user_tokens, model_id)


def _prepare(engine: Engine, request: ChatRequest) -> tuple[Prompt, int, Work]:
    model = engine.model
    sampling = request.sampling(model.default_sampling)
    try:
        model.check_sampling(sampling)
    except KestrelError as error:
        raise bad_request(str(error), "logit_bias") from None
    try:
        messages = conversation(request)
        prompt = model.prompt(messages, **request.template_settings)
    except ContextLengthError as error:
        raise bad_request(str(error), "messages", "context_length_exceeded") from None
    except KestrelError as error:
        raise bad_request(str(error), "messages") from None
    room = model.max_context - len(prompt.token_ids)
    work = Work(prompt, min(request.limit or room, room), request.stops, sampling)
    return prompt, _last_user_tokens(engine, messages), work


def _last_user_tokens(engine: Engine, messages: list[dict[str, Any]]) -> int:
    """Text tokens of the last user turn."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(len(engine.model.tokenizer.encode_text(text)) for text in texts)


async def stream(exchange: Exchange, events: bool, ping_seconds: float | None) -> AsyncIterator[bytes]:
    """The answer as server-sent events: the role at once, a frame per piece of text, the finish, then what was asked
    for, then `[DONE]`. A failure is told in a frame, because the status has been sent. `events` adds the original's
    frames whatever the request says; `ping_seconds` of silence bring a comment."""
    yield sse.event(exchange.chunk({"role": "assistant", "content": ""}))
    try:
        async for step in exchange.job.events(ping_seconds):
            if step is None:
                yield sse.PING
                continue
            exchange.take(step)
            if step.text:
                yield sse.event(exchange.chunk({"content": step.text}, logprobs=exchange.logprobs()))
            # A queue that is never empty would never let the event loop see that the client has left.
            await asyncio.sleep(0)
        for frame in _closing_frames(exchange, events):
            yield sse.event(frame)
    except ApiError as error:
        yield sse.event(error.body)
    except Exception:
        log.exception("the stream of request %s failed", exchange.job.id)
        yield sse.event(ApiError(500, "the server failed on this request", code="internal_error").body)
    yield sse.DONE


def _closing_frames(exchange: Exchange, events: bool) -> list[dict[str, Any]]:
    """The finish; the original's metrics and tokens; usage last, as clients keep what the last chunk says of it."""
    held = exchange.logprobs() if any(step.text == "" for step in exchange.unreported) else None
    frames = [exchange.chunk({}, finish_reason=exchange.steps[-1].finish_reason, logprobs=held)]
    if events or exchange.asks("include_metrics"):
        frames.append(replies.metrics_frame(exchange.metrics()))
    if events or exchange.asks("include_tokens"):
        frames.append(replies.tokens_frame(replies.history(exchange.prompt, exchange.steps)))
    if exchange.asks("include_usage"):
        usage = replies.usage(exchange.prompt, exchange.steps)
        frames.append(replies.usage_chunk(exchange.job, exchange.model_id, usage))
    return frames


async def whole(exchange: Exchange, events: bool) -> dict[str, Any]:
    """The answer as one object.

    Raises:
        ApiError: the request failed.
    """
    async for step in exchange.job.events():
        exchange.take(step)
    answer = replies.completion(
        exchange.job,
        exchange.model_id,
        "".join(step.text for step in exchange.steps),
        exchange.steps[-1].finish_reason,
        exchange.logprobs(),
        replies.usage(exchange.prompt, exchange.steps),
    )
    if events or exchange.asks("include_metrics"):
        answer["metrics"] = exchange.metrics()
    if events or exchange.asks("include_tokens"):
        answer["history_tokens"] = replies.history(exchange.prompt, exchange.steps)
    return answer
