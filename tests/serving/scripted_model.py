"""A model whose answers and pace a test decides: the parts around the engine are the product's own, only the network is
not there. It has the interface of `models.LoadedModel`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from models import PrefillProgress, Prompt, SamplingParams, Step
from models.chat_template import default_chat_template
from models.generation import check_room
from models.grammar import Grammar, GrammarCompiler
from models.images import ImageProcessor
from models.prompt import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, PromptBuilder
from models.sampling import check_bias
from models.text_stream import TextStream
from models.tokenizer import BYTE_OF_CHARACTER, Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
END = 256 + CONTROL.index("<|im_end|>")
VOCAB = 256 + len(CONTROL)


def byte_tokenizer() -> Tokenizer:
    """Token id = byte, and the control tokens after them: every character of several bytes is split."""
    definition = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(CONTROL)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": BYTE_OF_CHARACTER, "merges": []},
    }
    return Tokenizer(json.dumps(definition), "the byte vocabulary")


def say_what_the_user_said(messages: list[dict[str, Any]]) -> str:
    """The text of the last user turn."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "nothing")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass
class ScriptedModel:
    """Answers with `answer(messages)`, one byte per step.

    A unit of work is a prefill chunk or a token; each takes `pace` seconds, and `chunks` come before the first token.
    Nothing moves while `gate` is clear; the unit of number `hold_at`, counted over all requests, clears it. `faults`
    are raised in the step of that number (0 is the prefill). `begun` counts units, `steps` tokens that were finished,
    `prepared` conversations, and `dropped` generations that were closed before their end.
    """

    answer: Callable[[list[dict[str, Any]]], str | bytes] = say_what_the_user_said
    pace: float = 0.0
    chunks: int = 1
    max_context: int = 4096
    top: tuple[tuple[int, float], ...] = ((65, -0.5), (66, float("-inf")))
    faults: dict[int, BaseException] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    hold_at: int | None = None
    name: str = "scripted"
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    begun: int = 0
    steps: int = 0
    prepared: int = 0
    dropped: int = 0
    sampling: list[SamplingParams] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()
        self.tokenizer = byte_tokenizer()
        config = SimpleNamespace(vision=SimpleNamespace(merge=2))
        processor = ImageProcessor.from_folder(None, max_image_tokens=64)
        self._prompts = PromptBuilder(self.tokenizer, default_chat_template(), processor, config)
        self._grammars = GrammarCompiler(self.tokenizer, VOCAB, {END})
        self._answers: dict[bytes, bytes] = {}

    def prompt(self, messages: list[dict[str, Any]], **settings: Any) -> Prompt:
        self.prepared += 1
        prompt = self._prompts.build(messages, **settings)
        check_room(len(prompt.token_ids), self.max_context)
        answer = self.answer(messages)
        self._answers[prompt.token_ids.tobytes()] = answer.encode() if isinstance(answer, str) else answer
        return prompt

    def _answer(self, prompt: Prompt) -> bytes:
        """What follows on a prompt: what was decided for the conversation that it begins with, else for its text."""
        ids = prompt.token_ids.tobytes()
        for begun, answer in reversed(self._answers.items()):
            if ids.startswith(begun):
                return answer
        return self.answer([{"role": "user", "content": self.tokenizer.decode(prompt.token_ids.tolist())}]).encode()

    def check_sampling(self, sampling: SamplingParams) -> None:
        check_bias(sampling.logit_bias, VOCAB)

    def compile_grammar(self, grammar: str) -> Grammar:
        return self._grammars.compile(grammar)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        stop: tuple[str, ...],
        sampling: SamplingParams,
        grammar: Grammar | None = None,
    ) -> Iterator[PrefillProgress | Step]:
        self.threads.add(threading.get_ident())
        self.sampling.append(sampling)
        return self._items(
            self._tokens(prompt, sampling, grammar), max_tokens, TextStream(self.tokenizer, stop), sampling
        )

    def _tokens(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None) -> Iterator[int]:
        """The answer as it is scripted, whatever the grammar says."""
        yield from [*self._answer(prompt), END]

    def _items(
        self, tokens: Iterator[int], max_tokens: int, pieces: TextStream, sampling: SamplingParams
    ) -> Iterator[Any]:
        ended = False
        try:
            for chunk in range(self.chunks):
                self._work(0)
                yield PrefillProgress(chunk + 1, self.chunks)
            for number, token in enumerate(tokens, start=1):
                self._work(number)
                self.steps += 1
                step = self._step(token, pieces, number >= max_tokens, sampling)
                ended = step.finish_reason is not None
                yield step
                if ended:
                    return
        finally:
            self.dropped += not ended

    def _work(self, number: int) -> None:
        self.begun += 1
        if self.begun == self.hold_at:
            self.gate.clear()
        self.gate.wait()
        if self.pace:
            time.sleep(self.pace)
        if number in self.faults:
            raise self.faults.pop(number)

    def _step(self, token: int, pieces: TextStream, last: bool, sampling: SamplingParams) -> Step:
        text = "" if token == END else pieces.push(token)
        reason = "stop" if token == END or pieces.stopped else "length" if last else None
        if reason and not pieces.stopped:
            text += pieces.finish()
        return Step(token, text, -0.25, 1.0, self.top[: sampling.top_logprobs], reason)
