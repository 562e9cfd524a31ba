"""POST /v1/chat/completions after validation: admission, prompt, generation, and the answer as a stream or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from models import LoadedModel, Prompt, Step
from models.generation import check_room
from models.tokenizer import Tokenizer
from serving import reasoning, replies, tool_calls
from serving.answer import Answer
from serving.answer_grammar import compile_answer_grammar
from serving.chat_request import ChatRequest
from serving.engine import Engine
from serving.errors import ApiError, bad_request
from serving.generation_request import check_token_ids, checked_sampling, prompt_errors, seeded
from serving.job import Job, Work
from serving.media import conversation
from serving.streaming import choice_steps, event_stream
from serving.tool_calls import ToolCallParser


@dataclass(frozen=True)
class Prepared:
    """What a request has become on its way to the engine: what to run for each choice, all with one prompt.
    `in_reasoning` tells that its template opens the reasoning; `last_user_tokens` counts the text of the last user
    turn, if metrics were asked for; `matched` those of the request's `context_tokens` with which the prompt begins,
    None if there were none."""

    work: list[Work]
    in_reasoning: bool
    last_user_tokens: int
    matched: int | None


@dataclass
class Choice:
    """One of the answers to a request, so far."""

    index: int
    answer: Answer
    steps: list[Step] = field(default_factory=list)
    unreported: list[Step] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        """Why the answer has ended."""
        return self.answer.finish_reason(self.steps[-1].finish_reason)

    def take(self, step: Step) -> list[dict[str, Any]]:
        """Notes a generated token; the deltas that it brings."""
        self.steps.append(step)
        self.unreported.append(step)
        deltas = self.answer.push(step.text)
        return deltas if step.finish_reason is None else [*deltas, *self.answer.finish()]


@dataclass
class Exchange:
    """One admitted request and its answers so far. Belongs to its handler alone. `events` adds the original's metrics
    and tokens whatever the request says."""

    engine: Engine
    job: Job
    request: ChatRequest
    prepared: Prepared
    model_id: str
    choices: list[Choice]
    events: bool

    @property
    def prompt(self) -> Prompt:
        """What the answers follow on."""
        return self.prepared.work[0].prompt

    @property
    def steps(self) -> list[Step]:
        """The tokens of all choices."""
        return [step for choice in self.choices for step in choice.steps]

    def chunk(self, choice: Choice, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A stream object. Where usage is asked for, every one has the field, null in all but the last."""
        usage = {"usage": None} if self.request.asks("include_usage") else {}
        return replies.chunk(self.job, self.model_id, delta, index=choice.index, **fields) | usage

    def role_chunk(self, choice: Choice) -> dict[str, Any]:
        """The stream object with which a choice begins."""
        return self.chunk(choice, {"role": "assistant", "content": ""})

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of the tokens not yet reported, if the client wants them; each is told once."""
        steps, choice.unreported = choice.unreported, []
        return replies.logprobs(steps, self.engine.model.tokenizer) if self.request.logprobs and steps else None

    def extras(self) -> dict[str, Any]:
        """The original's metrics and tokens, where they are asked for. They describe one answer, not several."""
        if len(self.choices) > 1:
            return {}
        extras: dict[str, Any] = {}
        if self.events or self.request.asks("include_metrics"):
            metrics = replies.metrics(self.job, self.prompt, self.prepared.last_user_tokens, self.steps)
            matched = self.prepared.matched
            extras["metrics"] = metrics if matched is None else metrics | {"context_tokens": matched}
        if self.events or self.request.asks("include_tokens"):
            extras["history_tokens"] = replies.history(self.prompt, self.steps)
        return extras


async def begin(
    engine: Engine, request: ChatRequest, model_id: str, job: Job, workers: ThreadPoolExecutor, *, events: bool = False
) -> Exchange:
    """Builds the prompt of an admitted request on a worker thread, and queues it. `events`: see `Exchange`.

    Raises:
        ApiError: 400 for a conversation or picture that cannot be used, or a prompt longer than the context.
    """
    preparing = partial(prepare, engine.model, request, metrics=events or request.asks("include_metrics"))
    prepared = await asyncio.get_running_loop().run_in_executor(workers, preparing)
    engine.submit(job, prepared.work)
    choices = [Choice(index, _answer(request, prepared)) for index in range(len(prepared.work))]
    request.messages.clear()  # with pictures of megabytes, which nobody needs while the answer takes its time
    return Exchange(engine, job, request, prepared, model_id, choices, events)


def _answer(request: ChatRequest, prepared: Prepared) -> Answer:
    calls = None
    if request.callable_tools:
        calls = ToolCallParser(only_one=request.parallel_tool_calls is False)
        calls.push(request.opening)
    return Answer(in_reasoning=prepared.in_reasoning, calls=calls)


def prepare(model: LoadedModel, request: ChatRequest, *, metrics: bool = False) -> Prepared:
    """What to run for a request, and with `metrics` what only these tell. Takes time: pictures are decoded, schemas
    compiled.

    Raises:
        ApiError: 400 for a conversation, picture or schema that cannot be used, or a prompt longer than the context.
    """
    with _named_as_sent(request):
        sampling = checked_sampling(request, model)
        read = _read(model, request)
        prompt, in_reasoning = read.prompt, read.in_reasoning
        room = model.max_context - len(prompt.token_ids)
        limit = min(request.limit or room, room)
        grammar = compile_answer_grammar(model, request, in_reasoning=in_reasoning)
        work = [Work(prompt, limit, request.stops, seeded(sampling, index), grammar) for index in range(request.n or 1)]
        matched = _matched(request.context_tokens, prompt)
        last_user_tokens = _last_user_tokens(model.tokenizer, read.messages) if metrics else 0
        return Prepared(work, in_reasoning, last_user_tokens, matched)


def prompt_of(model: LoadedModel, request: ChatRequest) -> Prompt:
    """The prompt of a request, whose answer is of no interest.

    Raises:
        ApiError: as `prepare`, but schemas are not looked at.
    """
    with _named_as_sent(request):
        return _read(model, request).prompt


@contextmanager
def _named_as_sent(request: ChatRequest) -> Iterator[None]:
    """Has errors name the fields as the client sent them."""
    try:
        yield
    except ApiError as error:
        raise request.as_sent(error) from None


@dataclass
class _Read:
    """A conversation as the model sees it; `in_reasoning` tells that the end of the prompt has begun a reasoning."""

    messages: list[dict[str, Any]]
    prompt: Prompt
    in_reasoning: bool


def _read(model: LoadedModel, request: ChatRequest) -> _Read:
    with prompt_errors("messages"):
        if request.callable_tools and not model.takes_tools:
            raise bad_request("the chat template of this model has no place for 'tools'", "tools")
        check_token_ids(request.context_tokens or [], model.tokenizer, "context_tokens")
        messages = conversation(request)
        prompt = model.prompt(messages, **request.template_settings)
        in_reasoning = _turn_opened(prompt, model.tokenizer).endswith(reasoning.OPEN)
        _check_opening(request, in_reasoning)
        prompt = _opened(prompt, request, model.tokenizer)
        check_room(len(prompt.token_ids), model.max_context)
    return _Read(messages, prompt, in_reasoning)


def _matched(ids: list[int] | None, prompt: Prompt) -> int | None:
    """How many `context_tokens` the prompt begins with: all of them, or none; None if the client sent none.

    The original puts these ids before the last user turn, whatever the messages before it say. Here the messages alone
    decide, because ids that spell anything else could hold control tokens, which no client may write. To know that
    they are the same, the whole prompt has to be encoded, so that they change nothing and save nothing.
    """
    if ids is None:
        return None
    same = not prompt.visuals and prompt.token_ids[: len(ids)].tolist() == ids  # pads look alike for all pictures
    return len(ids) if same else 0


def _turn_opened(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """What the template has written of the assistant's turn: the text after the last control token."""
    ids = prompt.token_ids.tolist()
    start = next((index for index in range(len(ids), 0, -1) if ids[index - 1] in tokenizer.control_ids), 0)
    return tokenizer.decode(ids[start:]).rstrip()


def _check_opening(request: ChatRequest, in_reasoning: bool) -> None:
    """Refuses an answer that is begun where reasoning comes first."""
    if request.opening and in_reasoning:
        message = "'tool_choice': this model reasons before it answers, so a call can be allowed but not demanded"
        raise bad_request(message, "tool_choice")
    if request.begun_answer and in_reasoning:
        message = "this model reasons before it answers, so its answer cannot be begun for it: end with a user message"
        raise bad_request(message, "messages")


def _opened(prompt: Prompt, request: ChatRequest, tokenizer: Tokenizer) -> Prompt:
    """The prompt with the beginning of the answer: a text, and a call, whose tag is one token where the vocabulary has
    it."""
    ids, opening = tokenizer.encode_text(request.begun_answer), request.opening
    if opening and any(token.text == tool_calls.OPEN for token in tokenizer.added):
        ids.append(tokenizer.id_of(tool_calls.OPEN))
        opening = opening.removeprefix(tool_calls.OPEN)
    ids += tokenizer.encode_text(opening)
    return Prompt(np.concatenate([prompt.token_ids, np.array(ids, np.int32)]), prompt.visuals)


def _last_user_tokens(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> int:
    """Text tokens of the last user turn."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(len(tokenizer.encode_text(text)) for text in texts)


def stream(exchange: Exchange, ping_seconds: float | None) -> AsyncIterator[bytes]:
    """The answer as server-sent events: the role at once, a frame per piece, the finish, and so for every choice; then
    what was asked for. `ping_seconds` of silence bring a comment."""
    return event_stream(
        exchange.job,
        exchange.choices,
        [exchange.role_chunk(exchange.choices[0])],
        partial(_step_frames, exchange),
        partial(_closing_frames, exchange),
        ping_seconds,
    )


def _step_frames(exchange: Exchange, choice: Choice, step: Step) -> list[dict[str, Any]]:
    """The deltas of a token; a choice begins with its role, of which the first has been told, and ends with why."""
    frames = [] if choice.steps or choice.index == 0 else [exchange.role_chunk(choice)]
    frames += [exchange.chunk(choice, delta, logprobs=exchange.logprobs(choice)) for delta in choice.take(step)]
    if step.finish_reason is not None:
        end = {"finish_reason": choice.finish_reason, "logprobs": exchange.logprobs(choice)}
        frames.append(exchange.chunk(choice, {}, **end))
    return frames


def _closing_frames(exchange: Exchange) -> list[dict[str, Any]]:
    """The original's metrics and tokens; usage last, as clients keep what the last chunk says of it."""
    extras, frames = exchange.extras(), []
    if "metrics" in extras:
        frames.append(replies.metrics_frame(extras["metrics"]))
    if "history_tokens" in extras:
        frames.append(replies.tokens_frame(extras["history_tokens"]))
    if exchange.request.asks("include_usage"):
        usage = replies.usage(exchange.job, exchange.prompt, exchange.steps)
        frames.append(replies.usage_chunk(exchange.job, exchange.model_id, usage))
    return frames


async def whole(exchange: Exchange) -> dict[str, Any]:
    """The answer as one object.

    Raises:
        ApiError: the request failed.
    """
    async for choice, step in choice_steps(exchange.job, exchange.choices):
        choice.take(step)
    choices = [
        {
            "index": choice.index,
            "message": choice.answer.message(),
            "logprobs": exchange.logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        for choice in exchange.choices
    ]
    usage = replies.usage(exchange.job, exchange.prompt, exchange.steps)
    return replies.completion(exchange.job, exchange.model_id, choices, usage) | exchange.extras()
