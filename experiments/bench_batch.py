"""Requests computed together, and what need not be computed again: seconds against one request after the other.

Claims: eight requests at once take less time together than one after the other, for short answers too, and no more than
llama.cpp takes with eight slots; a stream stalls for no longer than two steps and a chunk while a long prompt arrives;
the second turn of a conversation begins at once, and so does the answer about a picture that has been seen. Cost: about
twenty minutes for the 2B shape in q4 with llama.cpp, on 2 cores.

    python -m experiments.bench_batch --vs llama.cpp

Prints a table and writes results/bench_batch/.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from experiments.bench import (
    OURS,
    THEIRS,
    Program,
    Sample,
    llama_model_file,
    note,
    parse,
    parser,
    ratios,
    select,
    spread,
    take_turns,
    write_results,
)
from experiments.bench_steps import config_of, open_inference
from experiments.llama_cpp import LlamaCpp, LlamaModel
from models.batch import Batch, BatchLimits
from models.cache import CacheType
from models.config import ModelConfig
from models.generation import Generation, Request, Step
from models.images import VisionInput
from models.sampling import SamplingParams
from models.text_stream import NoText

ROWS = 8
QUICK = {"answers": [4, 8], "conversation": 64, "arriving": 64, "patches": 64}
ROOM = 64  # tokens beyond what a measurement needs


def random_ids(config: ModelConfig, length: int, seed: int) -> np.ndarray:
    """Token ids int32 `[length]`, none of them a placeholder of a picture."""
    placeholders = [token for token in (config.image_token, config.video_token) if token is not None]
    return np.random.default_rng(seed).integers(0, min([config.text.vocab, *placeholders]), length).astype(np.int32)


def request(ids: np.ndarray, tokens: int, visuals: Sequence[VisionInput] = ()) -> Request:
    """A greedy request for exactly `tokens` tokens."""
    return Request(ids, visuals, tokens, frozenset(), SamplingParams(), NoText())


@dataclass(frozen=True)
class Sizes:
    """How long what is measured is, in tokens; a picture in patches."""

    prompt: int
    answers: tuple[int, ...]
    conversation: int
    arriving: int
    patches: int
    budget: int

    @property
    def context(self) -> int:
        """The longest sequence."""
        return ROOM + max(self.prompt + max(self.answers), 2 * self.conversation, self.arriving, self.patches)


class Batches:
    """One model with batches of different limits."""

    def __init__(self, model: str, quant: str, kv: CacheType, sizes: Sizes) -> None:
        self.inference = open_inference(model, quant, kv)
        self.sizes = sizes
        self._seeds = itertools.count()  # no prompt comes twice

    def _batch(self, **limits: Any) -> Batch:
        return Batch(self.inference, self.sizes.context, BatchLimits(prefill_budget=self.sizes.budget, **limits))

    def _ids(self, length: int) -> np.ndarray:
        """A prompt that has not been seen before."""
        return random_ids(self.inference.config, length, next(self._seeds))

    def answer(self, prompt: int, tokens: int, rows: int) -> dict[str, Any]:
        """Seconds for eight requests that come at once, `rows` of them computed together."""
        batch = self._batch(rows=rows, slots=rows, reuse=False)
        waiting = [request(self._ids(prompt), tokens) for _ in range(ROWS)]
        start = time.perf_counter()
        while waiting or batch.running:
            while waiting and not batch.full:
                batch.join(waiting.pop())
            batch.step()
        return {"seconds": time.perf_counter() - start}

    def stall(self, arriving: int) -> dict[str, Any]:
        """Milliseconds between the tokens of a stream: alone, and while a prompt of `arriving` tokens comes in."""
        batch = self._batch(rows=2, slots=2, reuse=False)
        stream = batch.join(request(self._ids(self.sizes.prompt), self.sizes.context - self.sizes.prompt))
        gaps(batch, stream, until=lambda: True)
        alone, _ = gaps(batch, stream, until=lambda: stream.generated >= 12)
        late = batch.join(request(self._ids(arriving), 1))
        during, chunks = gaps(batch, stream, until=lambda: late not in batch.running)
        return {"alone_ms": alone, "during_ms": during, "chunk_ms": chunks}

    def turns(self, conversation: int) -> dict[str, Any]:
        """Milliseconds to the first token of a conversation's first turn, and of its second."""
        batch = self._batch(slots=2)
        first, second = self._ids(conversation), self._ids(self.sizes.prompt)
        before, said = first_token(batch, request(first, 8))
        after, _ = first_token(batch, request(np.concatenate([first, said, second]), 1))
        return {"first_ms": before, "second_ms": after}

    def picture(self, patches: int) -> dict[str, Any]:
        """Milliseconds to the first token of a question about a picture, and of another question about it. What comes
        before the picture is the same, as the beginning of a chat template is."""
        config, side = self.inference.config, int(patches**0.5)
        random = np.random.default_rng(next(self._seeds))
        values = random.standard_normal((side * side, config.vision.patch_values), np.float32)
        picture = VisionInput(values, (1, side, side), "image")
        batch = self._batch(slots=2, image_cache_bytes=2**28)
        pads = np.full(picture.tokens(config.vision.merge), config.image_token, np.int32)
        times, beginning = [], self._ids(8)
        for _ in range(2):
            ids = np.concatenate([beginning, pads, self._ids(self.sizes.prompt)])
            times.append(first_token(batch, request(ids, 1, [picture]))[0])
        return {"first_ms": times[0], "second_ms": times[1]}


def gaps(batch: Batch, stream: Generation, until: Callable[[], bool]) -> tuple[list[float], list[float]]:
    """Milliseconds between the tokens of `stream`, up to the first one for which `until` holds, and those of every
    other step. The first gap begins with the call, which should come right after a token."""
    moments, others = [time.perf_counter()], []
    while True:
        start = time.perf_counter()
        items = batch.step()
        now = time.perf_counter()
        if any(generation is stream and isinstance(item, Step) for generation, item in items):
            moments.append(now)
            if until():
                return [1e3 * (after - before) for before, after in itertools.pairwise(moments)], others
        else:
            others.append(1e3 * (now - start))


def first_token(batch: Batch, asked: Request) -> tuple[float, np.ndarray]:
    """Milliseconds to the first token, and the tokens of the answer, int32 `[tokens]`."""
    start, first, said = time.perf_counter(), 0.0, []
    for step in batch.answer(asked):
        first = first or 1e3 * (time.perf_counter() - start)
        said.append(step.token_id)
    return first, np.array(said, np.int32)


def measure(options: argparse.Namespace) -> Iterator[Sample]:
    """All samples, each with the name of its part."""
    [quant] = options.quant
    sizes = Sizes(
        options.prompt,
        tuple(options.answers),
        options.conversation,
        options.arriving,
        options.patches,
        options.prefill_budget,
    )
    ours = {OURS: Program(Batches, (options.model, quant, options.kv, sizes))}
    with llama_model_file() as file:
        programs = dict(ours)
        if options.vs == THEIRS:
            room = options.prompt + max(options.answers) + ROOM
            model = LlamaModel(config_of(options.model), quant, file)
            programs[THEIRS] = Program(LlamaCpp, (model, options.vs_kv, options.threads, (), ROWS, room))
        turns = [
            {"prompt": options.prompt, "tokens": tokens, "rows": rows}
            for tokens in options.answers
            for rows in (1, ROWS)
        ]
        for sample in take_turns(programs, turns, "answer", options):
            yield {"part": "answers"} | sample
    parts = [("stall", {"arriving": options.arriving}), ("turns", {"conversation": options.conversation})]
    if config_of(options.model).vision is not None:
        parts.append(("picture", {"patches": options.patches}))
    for part, turn in parts:
        for sample in take_turns(ours, [turn], part, options):
            yield {"part": part} | sample


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """What was measured, a row per claim."""
    lines = [
        f"{note(options)}{ROWS} requests come at once, with prompts of {options.prompt} random tokens.",
        "",
        "| what | together or again | one by one or first | ratio | llama.cpp together | ratio to llama.cpp |",
        "|" + "---|" * 6,
    ]
    for tokens in options.answers:
        chosen = select(samples, part="answers", tokens=tokens)
        ours = {rows: seconds(select(chosen, program=OURS, rows=rows)) for rows in (1, ROWS)}
        theirs = seconds(select(chosen, program=THEIRS, rows=ROWS))
        cells = [
            f"{tokens} tokens each, s",
            spread(ours[ROWS], 2),
            spread(ours[1], 2),
            spread(ratios(ours[ROWS], ours[1]), 2),
            spread(theirs, 2) if theirs else "",
            spread(ratios(ours[ROWS], theirs), 2) if theirs else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for part, what in (("turns", "first token of the second turn, ms"), ("picture", "first token, picture seen, ms")):
        chosen = select(samples, part=part)
        if chosen:
            after, before = ([sample[name] for sample in chosen] for name in ("second_ms", "first_ms"))
            cells = [what, spread(after, 0), spread(before, 0), spread(ratios(after, before), 3)]
            lines.append(f"| {' | '.join(cells)} | | |")
    return "\n".join([*lines, "", *stall_lines(select(samples, part="stall"), options)]) + "\n"


def seconds(samples: Sequence[Sample]) -> list[float]:
    """Their seconds."""
    return [sample["seconds"] for sample in samples]


def stall_lines(samples: Sequence[Sample], options: argparse.Namespace) -> list[str]:
    """The longest stall of a stream against what it may be."""
    longest = [max(sample["during_ms"]) for sample in samples]
    allowed = [2 * median(sample["alone_ms"]) + max(sample["chunk_ms"]) for sample in samples]
    return [
        f"While a prompt of {options.arriving} tokens arrives (budget {options.prefill_budget}), the longest gap "
        f"between two tokens of a running stream is {spread(longest, 0)} ms; two steps and the longest chunk are "
        f"{spread(allowed, 0)} ms."
    ]


def main(arguments: Sequence[str]) -> None:
    """Measures as the command line says, prints the table and writes the results."""
    made = parser("bench_batch", __doc__.split("\n")[0])
    made.add_argument("--prompt", type=int, default=24, help="tokens of each prompt")
    made.add_argument("--answers", type=int, nargs="+", default=[24, 200], help="tokens of each answer")
    made.add_argument("--conversation", type=int, default=1000, help="tokens of a first turn")
    made.add_argument("--arriving", type=int, default=512, help="tokens of the prompt that arrives")
    made.add_argument("--patches", type=int, default=1024, help="of the picture")
    made.add_argument("--prefill-budget", type=int, default=256, help="as the server's")
    options = parse(made, arguments, QUICK)
    write_results("bench_batch", options, arguments, measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
