"""The JSON objects of OpenAI's chat completions API, and the original engine's two extra stream objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models import Prompt, Step
from models.tokenizer import Tokenizer
from serving.job import Job

LOWEST_LOGPROB = -9999.0  # OpenAI's own stand-in for minus infinity, which JSON does not have


def chunk(job: Job, model: str, delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """One stream object with one choice; `choice` may bring `index`, `finish_reason` and `logprobs`."""
    entry = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | choice
    return _envelope(job, "chat.completion.chunk", model) | {"choices": [entry]}


def usage_chunk(job: Job, model: str, numbers: dict[str, int]) -> dict[str, Any]:
    """The stream object that carries usage and no choice."""
    return _envelope(job, "chat.completion.chunk", model) | {"choices": [], "usage": numbers}


def completion(job: Job, model: str, choices: list[dict[str, Any]], numbers: dict[str, int]) -> dict[str, Any]:
    """The whole answer of a request that does not stream."""
    return _envelope(job, "chat.completion", model) | {"choices": choices, "usage": numbers}


def _envelope(job: Job, kind: str, model: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": model}


def usage(job: Job, prompt: Prompt, steps: Sequence[Step]) -> dict[str, Any]:
    """Token counts; the end token counts as generated, since it took a step."""
    return usage_of(job, len(prompt.token_ids), len(steps))


def usage_of(job: Job, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The same from the counts themselves."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.reused_tokens},
    }


def logprobs(steps: Sequence[Step], tokenizer: Tokenizer) -> dict[str, Any]:
    """The log-probabilities of tokens."""
    content = [
        _token(step.token_id, step.logprob, tokenizer)
        | {"top_logprobs": [_token(token, logprob, tokenizer) for token, logprob in step.top_logprobs]}
        for step in shown(steps, tokenizer)
    ]
    return {"content": content, "refusal": None}


def shown(steps: Sequence[Step], tokenizer: Tokenizer) -> list[Step]:
    """The steps without those of control tokens, which have no text."""
    return [step for step in steps if step.token_id not in tokenizer.control_ids]


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """One token may be a part of a character, so its bytes are told too."""
    return {
        "token": token_text(token_id, tokenizer),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text, with U+FFFD for a part of a character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def finite(logprob: float) -> float:
    """A log-probability as JSON has it, also one that is not a number."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def metrics(job: Job, prompt: Prompt, last_user_tokens: int, steps: Sequence[Step]) -> dict[str, Any]:
    """The original's `chat.completion.metrics`: times in milliseconds from the moment the engine took the request up.

    Waiting in the queue is excluded, as in the original; encoding pictures is included, unlike there. With one token
    `tpot_ms` is `ttft_ms`.
    """
    timing, count = job.timing, len(steps)
    first, total = (1e3 * (moment - timing.started) for moment in (timing.first_token, timing.last_token))
    return {
        "prompt_tokens": len(prompt.token_ids),
        "last_user_tokens": last_user_tokens,
        "n_tokens": count,
        "ttft_ms": round(first, 1),
        "tpot_ms": round((total - first) / (count - 1) if count > 1 else first, 1),
        "total_ms": round(total, 1),
        "prefill_ms": round(1e3 * (timing.prefilled - timing.started), 1),
        "tok_s": round(count * 1e3 / total, 2) if total else 0.0,
    }


def metrics_frame(numbers: dict[str, Any]) -> dict[str, Any]:
    """The original's stream object with a request's times. Not part of OpenAI's API."""
    return {"object": "chat.completion.metrics", "metrics": numbers}


def history(prompt: Prompt, steps: Sequence[Step]) -> list[int]:
    """Every token id of the conversation, the answer's included."""
    return [*prompt.token_ids.tolist(), *(step.token_id for step in steps)]


def tokens_frame(tokens: list[int]) -> dict[str, Any]:
    """The original's stream object with the conversation's ids. Not part of OpenAI's API."""
    return {"object": "chat.completion.tokens", "tokens": tokens}
