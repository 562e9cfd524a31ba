"""A model whose answers and pace a test decides: the parts around the engine are the product's own, only the network is
not there. It has the interface of `models.LoadedModel`, and its batch that of `models.Batch`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from models import BatchLimits, PrefillProgress, Prompt, Request, SamplingParams, Step
from models.chat_template import default_chat_template
from models.generation import check_room
from models.grammar import Grammar, GrammarCompiler
from models.image_cache import ImageCache
from models.images import ImageProcessor
from models.prompt import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, PromptBuilder
from models.sampling import check_bias
from models.slots import Slot, SlotTable
from models.text_stream import TextStream
from models.tokenizer import BYTE_OF_CHARACTER, Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
END = 256 + CONTROL.index("<|im_end|>")
VOCAB = 256 + len(CONTROL)

_template = cache(default_chat_template)  # compiled once for all models


@cache
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
    cache_type: str = "float32"
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
        self._prompts = PromptBuilder(self.tokenizer, _template(), processor, config, self.max_context)
        self._grammars = GrammarCompiler(self.tokenizer, VOCAB, {END})
        self._answers: dict[bytes, bytes] = {}

    @property
    def takes_tools(self) -> bool:
        return self._prompts.template.takes_tools

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

    @property
    def bytes_per_slot(self) -> int:
        return 2**20

    def compile_grammar(self, grammar: str) -> Grammar:
        return self._grammars.compile(grammar)

    def request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        stop: tuple[str, ...],
        sampling: SamplingParams,
        grammar: Grammar | None,
        owner: str,
    ) -> Request:
        pieces, ends = TextStream(self.tokenizer, stop), frozenset([END])
        return Request(prompt.token_ids, prompt.visuals, max_tokens, ends, sampling, pieces, grammar, owner)

    def batch(self, limits: BatchLimits) -> ScriptedBatch:
        return ScriptedBatch(self, limits)

    def items(self, request: Request) -> Iterator[Any]:
        """What a request brings, one after the other."""
        self.threads.add(threading.get_ident())
        self.sampling.append(request.sampling)
        prompt = Prompt(request.token_ids, tuple(request.visuals))
        tokens = self._tokens(prompt, request.sampling, request.grammar)
        return self._items(tokens, request.max_tokens, request.pieces, request.sampling)

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


@dataclass(eq=False)
class ScriptedGeneration:
    """One request in the batch."""

    items: Iterator[Any]
    slot: Slot
    length: int
    reused: int


class ScriptedBatch:
    """Takes one item from each request per step. Nothing is kept in its slots but keys."""

    def __init__(self, model: ScriptedModel, limits: BatchLimits) -> None:
        self.limits = limits
        self.images = ImageCache(0)
        self.disk = None
        self.slots = SlotTable(
            limits.slots, model.max_context, reuse=limits.reuse, row_by_row=True, largest_chunk=limits.largest_chunk
        )
        self.running: list[ScriptedGeneration] = []
        self._model = model

    @property
    def full(self) -> bool:
        return len(self.running) == self.limits.rows

    def join(self, request: Request) -> ScriptedGeneration:
        slot = self.slots.take(request.token_ids.astype(np.int64), request.owner).slot
        reused = slot.held
        slot.take_in(request.token_ids[slot.held :].astype(np.int64))
        items = self._model.items(request)
        self.running.append(ScriptedGeneration(items, slot, len(request.token_ids), reused))
        return self.running[-1]

    def leave(self, generation: ScriptedGeneration) -> None:
        if generation in self.running:
            self.running.remove(generation)
            self.slots.release(generation.slot)
            generation.items.close()

    def abandon(self) -> None:
        for generation in list(self.running):
            self.leave(generation)

    close = abandon

    def step(self) -> list[tuple[ScriptedGeneration, Any]]:
        items = []
        for generation in list(self.running):
            try:
                item = next(generation.items)
            except Exception as error:
                self.leave(generation)
                item = error
            items.append((generation, item))
            if isinstance(item, Step) and item.finish_reason is not None:
                self.leave(generation)
        return items
