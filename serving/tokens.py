"""POST /tokenize: the token ids of a text or a conversation, as vLLM gives them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import Field

from models import LoadedModel
from serving import chat
from serving.chat_request import ChatRequest, checked_chat_request
from serving.completions import token_ids
from serving.engine import Engine
from serving.errors import ApiError, bad_request
from serving.generation_request import prompt_errors
from serving.json_body import Strict, checked_fields, parse_json

LONGEST_TEXT = 2**20  # characters
MOST_AT_ONCE = 16  # conversations may bring pictures, which take memory


class TokenizeText(Strict):
    """A text, taken as it is."""

    prompt: Annotated[str, Field(max_length=LONGEST_TEXT)]
    model: str | None = None


def parse_tokenize_request(body: bytes) -> TokenizeText | ChatRequest:
    """Reads and checks a request body: a text, or a conversation with the fields of a chat completion.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    values = parse_json(body)
    if ("prompt" in values) == ("messages" in values):
        raise bad_request("the body should have either 'prompt' or 'messages'", "prompt")
    return checked_fields(TokenizeText, values) if "prompt" in values else checked_chat_request(values)


class TokenCounter:
    """Answers without the engine's thread, but not for more than a few clients at once."""

    def __init__(self, engine: Engine, workers: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._workers = workers
        self._waiting = 0

    async def answer(self, request: TokenizeText | ChatRequest) -> dict[str, Any]:
        """The ids, their number, and the most that prompt and answer may have together.

        Raises:
            ApiError: 503 unless requests are taken, 429 for too many at once, 400 for what cannot be a prompt.
        """
        self._engine.check_ready()
        if self._waiting >= MOST_AT_ONCE:
            raise ApiError(
                429, f"{MOST_AT_ONCE} texts are being tokenized; retry later", code="queue_full", retry_after=1
            )
        self._waiting += 1
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._workers, _ids, self._engine.model, request)
        finally:
            self._waiting -= 1
        return {"count": len(ids), "max_model_len": self._engine.model.max_context, "tokens": ids}


def _ids(model: LoadedModel, request: TokenizeText | ChatRequest) -> list[int]:
    if isinstance(request, TokenizeText):
        with prompt_errors("prompt"):
            return token_ids(request.prompt, model.tokenizer)
    return chat.prompt_of(model, request).token_ids.tolist()
