"""Two requests that drive one inference state in turn, without a lock: what each of their clients is sent.

Claims: whatever of the state is shared (the cache, its length, the logits), answers become mixtures of both requests;
with a lock, which lets one request run to its end before the next, they are those of each request alone. Documented as
a thought experiment: mixed garbage, or a crash out of bounds. Cost: a minute on 2 cores.

    python -m experiments.shared_state

The server cannot be brought to do this, because one thread owns its state. So the serialized loop is built again here,
in a sandbox, on the same network: a state is a cache with one slot, the number of tokens in it, and the logits of the
last one, as in the original. A request clears the state, takes in its prompt, then chooses a token and takes it in,
again and again; after each of these turns the other request may have one. Writes results/shared_state/.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.engines import KERNELS, EngineSteps
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.tiny_tasks import LARGEST_COUNT, LONGEST_SPAN, WORDS, user

CONTEXT = 512  # tokens for which the cache has room: far more than is written
AHEAD = 6  # turns of the first request before the second comes: its prompt and five tokens
SERIALIZED = "everything, one after the other (a lock)"
SEPARATE = "nothing, in turn"
CACHE = "the cache, in turn"
LENGTH = "the cache and its length, in turn"
EVERYTHING = "cache, length and logits, in turn (no lock)"
SHARED: dict[str, tuple[str, ...]] = {
    SERIALIZED: ("cache", "length", "logits"),
    SEPARATE: (),
    CACHE: ("cache",),
    LENGTH: ("cache", "length"),
    EVERYTHING: ("cache", "length", "logits"),
}
MIXED = (CACHE, LENGTH, EVERYTHING)
SOURCE = "article 14-2, section 3"
BOARD = "thought experiment, not run: two HTTP workers drive one inference state without its lock"


@dataclass
class Part:
    """A part of an inference state, which may belong to several."""

    value: Any = None


@dataclass(frozen=True)
class State:
    """What a step reads and writes: the cache of every layer with one slot, the tokens that it holds, and the logits
    `[vocab]` after the last of them."""

    cache: Part
    length: Part
    logits: Part

    def sharing(self, names: Collection[str]) -> State:
        """Another state, of which these parts are this one's; the others are its own."""
        own = {name: Part(None) for name in ("cache", "length", "logits") if name not in names}
        return replace(self, **own)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and how much is asked of it."""
    parser.add_argument("--model", default="tiny-vl", help="a trained model or folder")
    parser.add_argument("--pairs", type=int, default=20, help="of requests")
    parser.add_argument("--tokens", type=int, default=48, help="at most, of an answer")


def cells(options: argparse.Namespace) -> list[Cell]:
    """What is shared, in turn within a pair."""
    return [{"pair": pair, "shared": shared} for pair in range(options.pairs) for shared in SHARED]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """One model, q4, whose rows are the same to the last bit however a prompt is cut."""
    steps = EngineSteps(options.model, KERNELS, 1, CONTEXT)

    def measure(cell: Cell) -> list[Sample]:
        questions = pair_of(options.seed, cell["pair"])
        return [two_requests(steps, questions, cell["shared"], options.tokens)]

    yield measure


def pair_of(seed: int, number: int) -> tuple[str, str]:
    """Two questions whose answers have nothing in common; who comes first alternates."""
    random = Random(f"{seed} {number}")
    start = random.randint(1, LARGEST_COUNT - LONGEST_SPAN)
    count, repeat = f"Count from {start} to {start + LONGEST_SPAN - 1}.", f"Repeat: {' '.join(random.sample(WORDS, 6))}"
    return (count, repeat) if number % 2 == 0 else (repeat, count)


def two_requests(steps: EngineSteps, questions: Sequence[str], shared: str, most: int) -> Sample:
    """What two requests are answered with up to `most` tokens each, what their prompts are, and how far the cache was
    written, against the room that the longer one needs."""
    one = State(Part(), Part(), Part())
    states = (one, one.sharing(SHARED[shared]))
    for state in states:
        if state.cache.value is None:
            state.cache.value = steps.new_cache()
    prompts = [steps.model.prompt([user(question)]).token_ids.tolist() for question in questions]
    answers: tuple[list[int], list[int]] = ([], [])
    lengths: list[int] = []
    running = [
        serve(steps, state, prompt, answer, most, lengths)
        for state, prompt, answer in zip(states, prompts, answers, strict=True)
    ]
    take_turns(*running, ahead=None if shared == SERIALIZED else AHEAD)
    return {
        "questions": list(questions),
        "prompts": prompts,
        "answers": list(answers),
        "texts": [steps.model.tokenizer.decode(answer) for answer in answers],
        "written": max(lengths),
        "needed": max(map(len, prompts)) + most,
    }


def serve(
    steps: EngineSteps, state: State, prompt: Sequence[int], answer: list[int], most: int, lengths: list[int]
) -> Iterator[None]:
    """One request as the serialized loop runs it, greedy, with an end to each turn. `answer` gets its tokens, `lengths`
    what the cache holds after each turn."""
    state.length.value = 0
    for token in prompt:
        forward(steps, state, token)
    lengths.append(state.length.value)
    yield
    while len(answer) < most:
        token = int(np.argmax(state.logits.value))
        if token in steps.model.end_tokens:
            return
        answer.append(token)
        forward(steps, state, token)
        lengths.append(state.length.value)
        yield


def forward(steps: EngineSteps, state: State, token: int) -> None:
    """Takes a token into the cache."""
    held = np.array([state.length.value], np.int32)
    logits, state.cache.value, _ = steps.take(state.cache.value, np.array([[token]]), np.zeros(1, np.int32), held)
    state.logits.value = logits[0]
    state.length.value += 1


def take_turns(first: Iterator[None], second: Iterator[None], ahead: int | None) -> None:
    """Runs the first for `ahead` turns (None: to its end), then both in turn until both have ended."""
    deque(itertools.islice(first, ahead), maxlen=0)
    deque(itertools.zip_longest(second, first), maxlen=0)


@dataclass(frozen=True)
class Answer:
    """One answer beside the one that the same request gets when requests are serialized. Counts of tokens: up to where
    they part, and after that those that only the other request has, in its prompt or its answer, and the rest."""

    same: bool
    before: int
    foreign: int
    rest: int


def compared(sample: Sample, serialized: Sample) -> list[Answer]:
    """Both answers of a pair."""
    found = []
    for own, other in ((0, 1), (1, 0)):
        tokens, right = sample["answers"][own], serialized["answers"][own]
        before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, right, strict=False)))
        only = {*sample["prompts"][other], *serialized["answers"][other]} - {*sample["prompts"][own], *right}
        foreign = sum(token in only for token in tokens[before:])
        found.append(Answer(tokens == right, before, foreign, len(tokens) - before - foreign))
    return found


def pairs(samples: Sequence[Sample], shared: str) -> list[list[Answer]]:
    """The answers of every pair, compared."""
    serialized = {sample["cell"]["pair"]: sample for sample in of(samples, shared=SERIALIZED)}
    return [compared(sample, serialized[sample["cell"]["pair"]]) for sample in of(samples, shared=shared)]


def past_the_end(samples: Sequence[Sample], shared: str) -> list[float]:
    """By how many tokens the cache was written further than either request needs."""
    return [float(sample["written"] - sample["needed"]) for sample in of(samples, shared=shared)]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per way of sharing; then what the clients of two pairs were sent."""
    lines = [
        f"{options.pairs} pairs of requests to {options.model} q4, greedy, at most {options.tokens} tokens; the second "
        f"comes when the first has been sent {AHEAD - 1}. Tokens after an answer has left the serialized one are the "
        "other's if only the other request has them in its prompt or in its serialized answer.",
        "",
        "No time is taken, so that there is neither warm-up nor compile time to tell.",
        "",
        "| shared | answers as serialized | tokens before they differ | after that: the other's | after that: rest "
        "| pairs that write past the room of either |",
        "|" + "---|" * 6,
    ]
    for shared in SHARED:
        answers = [answer for pair in pairs(samples, shared) for answer in pair]
        row = [shared, f"{sum(answer.same for answer in answers)} of {len(answers)}"]
        row += [str(sum(getattr(answer, name) for answer in answers)) for name in ("before", "foreign", "rest")]
        row.append(f"{sum(past > 0 for past in past_the_end(samples, shared))} of {len(answers) // 2}")
        lines.append(f"| {' | '.join(row)} |")
    for pair in range(min(2, options.pairs)):
        lines += ["", *examples(of(samples, pair=pair))]
    return "\n".join(lines) + "\n"


def examples(samples: Sequence[Sample]) -> list[str]:
    """What the clients of one pair were sent."""
    lines = [f"| shared | {' | '.join(map(shown, samples[0]['questions']))} |", "|---|---|---|"]
    return lines + [f"| {s['cell']['shared']} | {' | '.join(map(shown, s['texts']))} |" for s in samples]


def shown(text: str) -> str:
    """A text in a cell of a table."""
    return f"`{' '.join(text.split()).replace('|', '¦').replace('`', chr(39))}`"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """What the answers consist of, by what is shared; and what the clients of two pairs were sent."""
    figure, (bars, texts) = plt.subplots(1, 2, figsize=(15, 6), layout="constrained", width_ratios=(4, 6))
    for number, (name, label) in enumerate(
        (("before", "as serialized, up to the first difference"), ("foreign", "the other request's"), ("rest", "rest"))
    ):
        left = [share(samples, shared, *("before", "foreign", "rest")[:number]) for shared in SHARED]
        width = [share(samples, shared, name) for shared in SHARED]
        hatch = ("", "//", "..")[number]
        bars.barh(range(len(SHARED)), width, 0.6, left, color=COLOURS[number], hatch=hatch, label=label)
    bars.axvline(1, color="grey", ls="--", lw=1, label="documented for a lock: all")
    names = [f"{shared}\n(documented: mixed)" if shared == EVERYTHING else shared for shared in SHARED]
    bars.set_yticks(range(len(SHARED)), names, fontsize=8)
    bars.invert_yaxis()
    bars.set(xlabel="share of the tokens sent", xlim=(0, 1.05), title="what two requests share")
    bars.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    texts.axis("off")
    texts.text(0, 1, printable("\n".join(told(samples))), va="top", family="monospace", fontsize=9)
    texts.set(title="what the clients A and B of two pairs were sent", xlim=(0, 1), ylim=(0, 1))
    return figure


PLAIN = str.maketrans({"、": ",", "，": ",", "。": ".", "：": ":", "！": "!", "？": "?"})


def printable(text: str) -> str:
    """A text with what fonts of plots have: Chinese punctuation as the like of it, other such characters as a question
    mark. The table has them as they are."""
    return text.translate(PLAIN).encode("ascii", "replace").decode()


def told(samples: Sequence[Sample]) -> list[str]:
    """The questions of the first two pairs, and what each client was sent, in lines."""
    lines = []
    for pair in range(2):
        found = of(samples, pair=pair)
        lines += [
            f"{name}: {text}" for sample in found[:1] for name, text in zip("AB", sample["questions"], strict=True)
        ]
        for sample in found:
            lines.append(f"  {sample['cell']['shared']}")
            lines += [f"    {name}: {cut(text)}" for name, text in zip("AB", sample["texts"], strict=True)]
    return lines


def cut(text: str, most: int = 72) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def share(samples: Sequence[Sample], shared: str, *names: str) -> float:
    """Tokens of these kinds over all tokens sent."""
    answers = [answer for pair in pairs(samples, shared) for answer in pair]
    every = sum(answer.before + answer.foreign + answer.rest for answer in answers)
    return sum(getattr(answer, name) for answer in answers for name in names) / every


def _of_each_pair(read: Callable[[list[Answer]], int], *ways: str) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: [float(read(pair)) for shared in ways for pair in pairs(samples, shared)]


def _changed(pair: list[Answer]) -> int:
    return sum(not answer.same for answer in pair)


def _mixed(pair: list[Answer]) -> int:
    return sum(answer.foreign > 0 for answer in pair)


def _share_past_the_end(samples: Sequence[Sample]) -> list[float]:
    """Of the pairs that share at least a length."""
    past = [past > 0 for shared in (LENGTH, EVERYTHING) for past in past_the_end(samples, shared)]
    return [sum(past) / len(past)] if past else []


FIGURES = (
    Documented(
        "answers that change where two requests drive one state",
        "states overwrite each other",
        None,
        "of 2",
        SOURCE,
        BOARD,
        _of_each_pair(_changed, EVERYTHING),
        lambda values: min(values) >= 1,
        "answers that are not the serialized ones, of each pair, with everything shared; at least one in every pair",
    ),
    Documented(
        "answers with tokens of the other request",
        "garbage mixed of two prompts",
        None,
        "of 2",
        SOURCE,
        BOARD,
        _of_each_pair(_mixed, EVERYTHING),
        lambda values: median(values) >= 1,
        "answers with tokens that only the other request has, of each pair, everything shared; median at least one",
    ),
    Documented(
        "answers that change where only the cache is shared",
        "overwriting keys and values is enough",
        None,
        "of 2",
        SOURCE,
        BOARD,
        _of_each_pair(_changed, CACHE),
        lambda values: median(values) >= 1,
        "each request has its own length and logits; median over the pairs at least one",
    ),
    Documented(
        "pairs that write past the room of either request",
        "even a crash out of bounds",
        None,
        "of all pairs",
        SOURCE,
        BOARD,
        _share_past_the_end,
        lambda values: max(values) > 0,
        "a shared length grows by the tokens of both, so a cache with room for the longer request is overrun in some "
        "pair; the sandbox has more room, so nothing is damaged",
    ),
    Documented(
        "answers that change where a lock serializes requests",
        "no races on the state",
        None,
        "of 2",
        "article 14-2, section 1",
        "the original without --batch-max",
        _of_each_pair(_changed, SEPARATE),
        lambda values: max(values) == 0,
        "answers of one state with a lock against those of two states that share nothing; none may differ",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"pairs": 2, "tokens": 24})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
