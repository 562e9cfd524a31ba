"""A stand-in for `LoadedModel` whose pace and faults a test decides. The server around it is the real one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models import PrefillProgress, Prompt, PromptError, SamplingParams, Step


class ByteTokenizer:
    """One token per byte."""

    control_ids = frozenset({256})

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == 256 else bytes([token_id])


class PacedModel:
    """Answers with the last message's words, one per step. A message may hold commands: `slow` takes `step_seconds` per
    word, `prefill` does so before the first, `fail` raises at the second word, `refuse` is an error of the user."""

    name = "paced"
    max_context = 1000
    default_sampling = SamplingParams()

    def __init__(self, step_seconds: float = 0.02) -> None:
        self.tokenizer = ByteTokenizer()
        self.step_seconds = step_seconds
        self.steps = 0
        self.prompts = 0

    def check_sampling(self, sampling: SamplingParams) -> None:
        pass

    def prompt(self, messages: list[dict[str, Any]], **settings: Any) -> Prompt:
        self.prompts += 1
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if "refuse" in text:
            raise PromptError("the conversation is refused")
        return Prompt(np.frombuffer(text.encode(), np.uint8).astype(np.int32), ())

    def stream(
        self, prompt: Prompt, *, max_tokens: int, stop: Sequence[str], sampling: SamplingParams
    ) -> Iterator[PrefillProgress | Step]:
        words = bytes(prompt.token_ids.astype(np.uint8)).decode().split()[:max_tokens]
        pause = self.step_seconds if "slow" in words else 0.0
        for chunk in range(10 if "prefill" in words else 1):
            time.sleep(self.step_seconds if "prefill" in words else 0.0)
            yield PrefillProgress(chunk + 1, 10)
        for index, word in enumerate(words):
            time.sleep(pause)
            if word == "fail" and index > 0:
                raise RuntimeError("the scripted fault")
            self.steps += 1
            last = index == len(words) - 1
            yield Step(ord(word[0]), f"{word} ", -0.5, 1.0, (), "stop" if last else None)
