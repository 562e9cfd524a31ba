"""POST /v1/completions after validation: prompts that are taken as they are, and the text that follows on each."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from models import Prompt, Step
from models.generation import check_room
from models.prompt import IMAGE_PAD, VIDEO_PAD
from models.sampling import MAX_TOP_LOGPROBS
from models.tokenizer import Tokenizer
from serving import replies
from serving.engine import Engine
from serving.errors import bad_request
from serving.generation_request import (
    GenerationRequest,
    check_bias_names,
    check_token_ids,
    checked_sampling,
    prompt_errors,
    seeded,
)
from serving.job import Job, Work
from serving.json_body import read_fields
from serving.streaming import choice_steps, event_stream

DEFAULT_TOKENS = 16  # OpenAI's
MOST_TEXTS = 32  # prompts times choices


class CompletionRequest(GenerationRequest):
    """A valid request; `prompt` is checked by `prompts_of`, because its errors should say which one is wrong."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int:
        """How many of the best tokens are reported with every token."""
        return self.logprobs or 0

    @cached_property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return prompts_of(self.prompt)


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Reads and checks a request body.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    request = read_fields(CompletionRequest, body)
    check_bias_names(request)
    choices = request.n or 1
    if len(request.prompts) * choices > MOST_TEXTS:
        raise bad_request(f"'prompt': prompts times 'n' may be up to {MOST_TEXTS}", "prompt")
    if request.suffix:
        raise bad_request("'suffix' is not supported: the models served here write on from a prompt", "suffix")
    if request.best_of not in (None, choices):
        raise bad_request("'best_of' may only be what 'n' is: all answers are returned", "best_of")
    if request.echo and request.logprobs is not None:
        raise bad_request("'logprobs' with 'echo' is not supported: prompts are not scored", "logprobs")
    return request


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids.

    Raises:
        ApiError: 400 for anything else.
    """
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    several = isinstance(prompt, list) and bool(prompt)
    if several and (all(isinstance(entry, str) for entry in prompt) or all(map(_is_ids, prompt))):
        return prompt
    raise bad_request("'prompt' should be a text, token ids, or a list of texts or of lists of token ids", "prompt")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def token_ids(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt. Unlike in a chat, what looks like a control token is one: there is no template to keep.

    Raises:
        ApiError: 400 for an id that the vocabulary does not have.
    """
    if isinstance(prompt, list):
        check_token_ids(prompt, tokenizer, "prompt")
        return prompt
    names = {token.text: token.token_id for token in tokenizer.added}
    tokens = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    ids: list[int] = []
    for piece in re.split(f"({tokens})", prompt):
        ids += [names[piece]] if piece in names else tokenizer.encode_text(piece)
    return ids


@dataclass
class Text:
    """One text that is being written, and the prompt it follows on. `shown` counts its characters, for offsets."""

    index: int
    prompt: Prompt
    echo: str
    tokenizer: Tokenizer
    steps: list[Step] = field(default_factory=list)
    unreported: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, step: Step) -> None:
        """Notes a generated token."""
        self.steps.append(step)
        self.unreported.append(step)

    def logprobs(self) -> dict[str, Any] | None:
        """The log-probabilities of the tokens not yet reported, in the form of the old API."""
        steps, self.unreported = replies.shown(self.unreported, self.tokenizer), []
        entries: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for step in steps:
            best: dict[str, float] = {}
            for token, logprob in [(step.token_id, step.logprob), *step.top_logprobs]:  # different ones may look alike
                best.setdefault(replies.token_text(token, self.tokenizer), replies.finite(logprob))
            entries["tokens"].append(replies.token_text(step.token_id, self.tokenizer))
            entries["token_logprobs"].append(replies.finite(step.logprob))
            entries["top_logprobs"].append(best)
            entries["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(self.tokenizer.token_bytes(step.token_id)))
        return entries


@dataclass
class Completion:
    """One admitted request and its texts so far. Belongs to its handler alone."""

    job: Job
    request: CompletionRequest
    model_id: str
    texts: list[Text]

    def object(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The whole answer, or one stream object: their form is the same."""
        job_id = f"cmpl-{self.job.id.removeprefix('chatcmpl-')}"
        head = {"id": job_id, "object": "text_completion", "created": self.job.created, "model": self.model_id}
        return head | {"choices": choices} | fields

    def choice(self, text: Text, shown: str, finish_reason: str | None) -> dict[str, Any]:
        """One entry of `choices`, which reports the tokens not yet reported."""
        logprobs = None if self.request.logprobs is None else text.logprobs()
        return {"text": shown, "index": text.index, "logprobs": logprobs, "finish_reason": finish_reason}

    def usage(self) -> dict[str, Any]:
        """Token counts of all texts, where every prompt counts once."""
        prompts = {id(text.prompt): len(text.prompt.token_ids) for text in self.texts}
        return replies.usage_of(self.job, sum(prompts.values()), sum(len(text.steps) for text in self.texts))


async def begin(
    engine: Engine, request: CompletionRequest, model_id: str, job: Job, workers: ThreadPoolExecutor
) -> Completion:
    """Encodes the prompts of an admitted request on a worker thread, and queues it.

    Raises:
        ApiError: 400 for a prompt that is empty, longer than the context, or not in the vocabulary.
    """
    work = await asyncio.get_running_loop().run_in_executor(workers, _prepare, engine, request)
    engine.submit(job, work)
    tokenizer, choices = engine.model.tokenizer, request.n or 1
    texts = []
    for index, part in enumerate(work):
        asked = request.prompts[index // choices]
        echo = "" if not request.echo else asked if isinstance(asked, str) else tokenizer.decode(asked)
        texts.append(Text(index, part.prompt, echo, tokenizer))
    return Completion(job, request, model_id, texts)


def _prepare(engine: Engine, request: CompletionRequest) -> list[Work]:
    model = engine.model
    sampling = checked_sampling(request, model)
    work = []
    for asked in request.prompts:
        with prompt_errors("prompt"):
            if isinstance(asked, str):
                model.tokenizer.check_length(asked, model.max_context)
            ids = token_ids(asked, model.tokenizer)
            _check_no_pictures(ids, model.tokenizer)
            check_room(len(ids), model.max_context)
        limit = min(request.max_tokens or DEFAULT_TOKENS, model.max_context - len(ids))
        prompt = Prompt(np.array(ids, np.int32), ())
        work += [Work(prompt, limit, request.stops, seeded(sampling, index)) for index in range(request.n or 1)]
    return work


def _check_no_pictures(ids: list[int], tokenizer: Tokenizer) -> None:
    """Refuses the tokens in whose place a chat has a picture."""
    pads = {token.token_id: token.text for token in tokenizer.added if token.text in (IMAGE_PAD, VIDEO_PAD)}
    found = next((pads[token] for token in ids if token in pads), None)
    if found is not None:
        raise bad_request(f"'prompt' has {found}, but no picture can come with it; a chat takes pictures", "prompt")


def stream(completion: Completion, ping_seconds: float | None) -> AsyncIterator[bytes]:
    """The texts as server-sent events, one after the other, each ended by its finish; usage where it is asked for."""
    return event_stream(
        completion.job,
        completion.texts,
        [],
        partial(_step_frames, completion),
        partial(_closing_frames, completion),
        ping_seconds,
    )


def _step_frames(completion: Completion, text: Text, step: Step) -> list[dict[str, Any]]:
    shown = step.text if text.steps else text.echo + step.text
    text.take(step)
    if not shown and step.finish_reason is None:
        return []
    usage = {"usage": None} if completion.request.asks("include_usage") else {}
    return [completion.object([completion.choice(text, shown, step.finish_reason)], **usage)]


def _closing_frames(completion: Completion) -> list[dict[str, Any]]:
    asked = completion.request.asks("include_usage")
    return [completion.object([], usage=completion.usage())] if asked else []


async def whole(completion: Completion) -> dict[str, Any]:
    """The texts as one object.

    Raises:
        ApiError: the request failed.
    """
    async for text, step in choice_steps(completion.job, completion.texts):
        text.take(step)
    choices = []
    for text in completion.texts:
        shown = text.echo + "".join(step.text for step in text.steps)
        choices.append(completion.choice(text, shown, text.steps[-1].finish_reason))
    return completion.object(choices, usage=completion.usage())
