"""What guessing tokens from the text so far (n-gram speculation) gains, and whether it changes a text.

Claims: an answer is the same with and without guesses, to the last token; text that repeats comes faster; where nothing
is found to guess, a token takes as long as before; but where guesses are wrong, every step is paid for with all of
them, and four make a token take about twice as long, eight about three times. Documented: repetitive text 181.1 ->
126.6 ms per token (1.43 times as fast, 0.625 of eight guesses right), free text 182.6 -> 181.8, but slower than without
guesses where the answer is kept to the last bit; on x86 1.30 times with 0.75 right, 1.64 with 0.92. Cost: five minutes
on 2 cores, 3 GiB of memory.

    python -m experiments.speculation

How many guesses are right is counted on a trained model's own answers. What that gains is timed on the 2B shape, which
is made to say one token again and again, so that any share of the guesses can be right. Writes results/speculation/.
`--model DIR` asks a real checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from random import Random
from statistics import median
from typing import Any
from unittest import mock

import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import models
from experiments.bench import spread
from experiments.bench_batch import random_ids, request
from experiments.bench_steps import config_of
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.sources import GUESSES as SOURCE
from experiments.sources import SETTINGS
from experiments.tiny_data import conversations
from experiments.tiny_tasks import Message, greeting, outside, repeating
from models import LoadedModel, Switches
from models.batch import Batch, BatchLimits
from models.compilation import enable_persistent_cache
from models.freed_memory import keep_freed_memory
from models.generation import Generation, Request
from models.inference import Inference
from models.quantisation import SCHEMES
from models.weights import random_network

TEXT, TIME = "text", "time"
COPIED, AGAIN, FREE = "repeats the question", "asked again", "free"
KINDS = (COPIED, AGAIN, FREE)
LONGEST = 96  # tokens of an answer
PROMPT = 32  # tokens of a timed prompt
QUANT = "q4"
SPEC_K, FAST_K = 4, 8  # guesses: the original's default, and those of its measurements on the board
NOTHING = -1.0  # a timed text in which nothing is found to guess
REPETITIVE, TEXT_X86, PICTURES_X86 = 0.625, 0.75, 0.92  # documented shares of right guesses
SHARES = (NOTHING, 0.0, 0.25, REPETITIVE, TEXT_X86, PICTURES_X86, 1.0)
PUBLISHED = (
    (0.625, 1.43, "8B on the board, up to 8"),
    (0.75, 1.30, "2B on x86, text"),
    (0.92, 1.64, "2B on x86, pictures"),
)
BOARD = "RK3588, 8B q4, 8 guesses from n-grams, checked by the fast products (FAST)"
X86 = "x86, 2B by its 25 ms per token, --spec-k 4 as recommended there"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What answers, and what is timed."""
    parser.add_argument("--model", nargs="+", default=["tiny-vl"], help="trained models or folders")
    parser.add_argument("--quant", choices=SCHEMES, default=QUANT, help="format of the weights of what answers")
    parser.add_argument("--questions", type=int, default=40, help="of each kind")
    parser.add_argument("--guesses", type=int, nargs="+", default=[SPEC_K, FAST_K], help="tokens guessed at most")
    parser.add_argument("--shape", default="qwen3-vl-2b", help="the shape that is timed, in q4 with random weights")
    parser.add_argument("--tokens", type=int, default=64, help="of a timed answer")
    parser.add_argument("--repeats", type=int, default=3)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Answers with and without guesses in turn; timed ones in the opposite order in every second repeat."""
    answered = [
        {"part": TEXT, "model": model, "kind": kind, "guesses": guesses}
        for model in options.model
        for kind in KINDS
        for guesses in (0, *options.guesses)
    ]
    arms = [(0, NOTHING), *((guesses, share) for guesses in options.guesses for share in SHARES)]
    timed = [
        {"part": TIME, "guesses": guesses, "share": share, "repeat": repeat}
        for repeat in range(options.repeats)
        for guesses, share in (arms if repeat % 2 == 0 else reversed(arms))
    ]
    return answered + timed


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """Models, and the timed shape, each opened when it is first needed; what is timed has been compiled before."""

    @cache
    def opened(model: str) -> LoadedModel:
        return models.load(model, options.quant)

    @cache
    def timed() -> Inference:
        inference = repeating_inference(options.shape)
        for guesses in (0, *options.guesses):
            inference.compile(PROMPT + options.tokens, 0, BatchLimits(draft=guesses).decoded_rows)
        return inference

    def measure(cell: Cell) -> list[Sample]:
        limits = BatchLimits(draft=cell["guesses"], reuse=False)
        if cell["part"] == TIME:
            inference = timed()
            ids = random_ids(inference.config, PROMPT, options.seed)
            batch = Batch(inference, PROMPT + options.tokens, limits)
            return [answer(batch, request(ids, options.tokens), made_up(cell["share"]))]
        model = opened(cell["model"])
        source = questions(cell["kind"], Random(f"{options.seed} {cell['kind']}"))
        return [
            answer(model.batch(limits), model.request(model.prompt(messages), max_tokens=LONGEST))
            for messages in islice(source, options.questions)
        ]

    yield measure


def questions(kind: str, random: Random) -> Iterator[list[Message]]:
    """Conversations that end with a question. Answers to free ones are not in them; to one that is asked again the
    wanted answer is."""
    tasks = {"": repeating} if kind == COPIED else {"told": greeting(True), "declined": outside(True)}
    for messages in conversations({name: (task, 1.0) for name, task in tasks.items()}, random, evaluation=True):
        yield [*messages, messages[-2]] if kind == AGAIN else messages[:-1]


def repeating_inference(shape: str) -> Inference:
    """The steps of a shape with random weights that says its last token again and again: what the layers add to the
    embedding of a token is multiplied by 0, which takes as long as any other number."""
    enable_persistent_cache()
    keep_freed_memory()
    config, switches = config_of(shape), Switches()
    network = random_network(config, "float32", switches, scheme=SCHEMES[QUANT])
    for layer in network.layers:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.scale.set_value(jnp.zeros_like(matrix.scale.get_value()))
    return Inference(network, config, switches, "int8")


Draft = Callable[[Generation, int], list[int]]
SEARCH: Draft = Generation.draft  # what the engine itself does


def made_up(share: float) -> Draft:
    """Guesses of which this share is right, for an answer that says its last token again; or none. In each step the
    first ones are right, as many as bring the share of all steps next to it. What is made up takes the place of what
    was found, so that searching is timed too."""
    owed = 0.0

    def draft(generation: Generation, most: int) -> list[int]:
        nonlocal owed
        SEARCH(generation, most)
        room = 0 if share == NOTHING else min(most, generation.limit - generation.generated - 1)
        owed += share * room
        right = round(owed)
        owed -= right
        return [generation.token ^ (number >= right) for number in range(room)]

    return draft


def answer(batch: Batch, asked: Request, draft: Draft = SEARCH) -> Sample:
    """A greedy answer alone in a batch: its tokens, the decode steps that it took, the tokens guessed, and the
    milliseconds from its first token to its last. `draft` guesses."""
    said, start = list[int](), 0.0
    with guesses_noted(draft) as noted:
        for step in batch.answer(asked):
            said.append(step.token_id)
            start = start or time.perf_counter()
    ms = 1e3 * (time.perf_counter() - start)
    return {"tokens": said, "steps": len(noted), "guessed": sum(noted), "ms": ms}


@contextmanager
def guesses_noted(draft: Draft) -> Iterator[list[int]]:
    """Lets `draft` guess, and notes how many tokens in each decode step of one request."""
    noted: list[int] = []

    def note(generation: Generation, most: int) -> list[int]:
        guessed = draft(generation, most)
        noted.append(len(guessed))
        return guessed

    with mock.patch.object(Generation, "draft", note):
        yield noted


def accepted(sample: Sample) -> int:
    """Guesses that were right: every step brings one token besides, and the first token none."""
    return len(sample["tokens"]) - 1 - sample["steps"]


def share_accepted(samples: Sequence[Sample]) -> float | None:
    """Right guesses over all guesses; None without any."""
    guessed = sum(sample["guessed"] for sample in samples)
    return sum(map(accepted, samples)) / guessed if guessed else None


def tokens_per_step(samples: Sequence[Sample]) -> float:
    """Tokens that a decode step brings on average."""
    return sum(len(sample["tokens"]) - 1 for sample in samples) / max(sum(sample["steps"] for sample in samples), 1)


def same(samples: Sequence[Sample], model: str, kind: str, guesses: int) -> list[bool]:
    """Of each question whether the answer is the one without guesses."""
    pairs = zip(
        of(samples, part=TEXT, model=model, kind=kind, guesses=guesses),
        of(samples, part=TEXT, model=model, kind=kind, guesses=0),
        strict=False,
    )
    return [guessed["tokens"] == alone["tokens"] for guessed, alone in pairs]


def gains(samples: Sequence[Sample], guesses: int, share: float) -> list[float]:
    """Times as fast as without guesses, in the same repeat."""
    alone = {sample["cell"]["repeat"]: sample["ms"] for sample in of(samples, part=TIME, guesses=0)}
    found = of(samples, part=TIME, guesses=guesses, share=share)
    return [alone[sample["cell"]["repeat"]] / sample["ms"] for sample in found if sample["cell"]["repeat"] in alone]


def share_name(share: float) -> str:
    """A column that tells how guesses are made up."""
    return "no guesses found" if share == NOTHING else f"{share:g} of them right"


def percent(share: float | None) -> str:
    """For a table; nothing without guesses."""
    return "" if share is None else f"{share:.1%}"


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """What is guessed right, and what that gains."""
    lines = [
        f"{options.questions} held-out questions of each kind, greedy, up to {LONGEST} tokens. Where no share of right "
        "guesses stands, nothing was found to guess. Nothing of this is timed.",
        "",
        "| model | text | guesses | same answers | guesses right | tokens per step |",
        "|" + "---|" * 6,
    ]
    for model in options.model:
        for kind in KINDS:
            for guesses in options.guesses:
                told = of(samples, part=TEXT, model=model, kind=kind, guesses=guesses)
                equal = same(samples, model, kind, guesses)
                cells = [model, kind, str(guesses), f"{sum(equal)} of {len(equal)}", percent(share_accepted(told))]
                lines.append(f"| {' | '.join(cells)} | {tokens_per_step(told):.2f} |")
    lines += [
        "",
        f"{options.shape} {QUANT}, random weights, an answer of {options.tokens} tokens that repeats, guesses made up: "
        f"median (lowest..highest) of {options.repeats} repeats. All steps are compiled before the first answer is "
        "timed; nothing else is warmed up.",
        "",
        "| guesses, at most | how | right | ms per token | times as fast |",
        "|" + "---|" * 5,
    ]
    for guesses in (0, *options.guesses):
        for share in SHARES if guesses else (NOTHING,):
            told = of(samples, part=TIME, guesses=guesses, share=share)
            times = [sample["ms"] / (len(sample["tokens"]) - 1) for sample in told]
            cells = [str(guesses), share_name(share) if guesses else "", percent(share_accepted(told)), spread(times)]
            lines.append(f"| {' | '.join(cells)} | {spread(gains(samples, guesses, share), 2)} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Gain by the share of right guesses, and that share by kind of text."""
    figure, (gain, share) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, guesses in enumerate(options.guesses):
        told = [
            (share_accepted(of(samples, part=TIME, guesses=guesses, share=left)), gains(samples, guesses, left))
            for left in SHARES
            if left != NOTHING
        ]
        at = [right for right, _ in told]
        style = {"marker": "os^Dv"[number % 5], "ls": ("-", "--", ":")[number % 3], "color": COLOURS[number]}
        gain.plot(at, [median(values) for _, values in told], label=f"here, up to {guesses} guesses", **style)
    for place, (right, times, name) in enumerate(PUBLISHED):
        gain.plot(right, times, "xP*"[place], ms=9, color="black", ls="", label=f"documented: {times}, {name}")
    gain.axhline(1, color="grey", lw=0.8)
    gain.set(xlabel="share of the guesses that are right", ylabel="times as fast", title=f"{options.shape} {QUANT}")
    gain.legend(fontsize=7)
    plot_shares(share, samples, options)
    return figure


def plot_shares(axes: Axes, samples: Sequence[Sample], options: argparse.Namespace) -> None:
    """Right guesses of the first model by kind of text."""
    model = options.model[0]
    for number, guesses in enumerate(options.guesses):
        told = [of(samples, part=TEXT, model=model, kind=kind, guesses=guesses) for kind in KINDS]
        at = [place + 0.4 * (number - 0.5 * (len(options.guesses) - 1)) for place in range(len(KINDS))]
        style = {"color": COLOURS[number], "hatch": ("", "//", "..")[number % 3], "label": f"up to {guesses} guesses"}
        shares = [share_accepted(each) for each in told]
        drawn = axes.bar(at, [share or 0 for share in shares], 0.36, **style)
        names = [
            "no guesses" if share is None else f"{tokens_per_step(each):.2f} tokens\nper step"
            for share, each in zip(shares, told, strict=True)
        ]
        axes.bar_label(drawn, labels=names, fontsize=7)
    axes.axhline(PUBLISHED[0][0], color="grey", ls="--", lw=1, label="documented, repetitive text: 0.625")
    axes.set(xticks=range(len(KINDS)), xticklabels=KINDS, ylim=(0, 1.15), ylabel="share of the guesses that are right")
    axes.set_title(f"{model}, its own answers")
    axes.legend(fontsize=7)


def _gains(share: float, guesses: int) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: gains(samples, guesses, share)


def _right(samples: Sequence[Sample]) -> list[float]:
    """Share of right guesses in each kind of repetitive text, of each model."""
    asked = of(samples, part=TEXT, guesses=FAST_K)
    groups = dict.fromkeys((sample["cell"]["model"], sample["cell"]["kind"]) for sample in asked)
    shares = [share_accepted(of(asked, model=model, kind=kind)) for model, kind in groups if kind != FREE]
    return [share for share in shares if share is not None]


def _same(samples: Sequence[Sample]) -> list[Any]:
    """For every model, kind of text and number of guesses, the share of answers that are the same."""
    asked = [sample["cell"] for sample in of(samples, part=TEXT) if sample["cell"]["guesses"]]
    groups = dict.fromkeys((cell["model"], cell["kind"], cell["guesses"]) for cell in asked)
    found = [same(samples, *group) for group in groups]
    return [sum(equal) / len(equal) for equal in found if equal]


TIMED = (
    "timed on the 2B shape with random weights, which says one token again and again and is given made-up guesses, "
    "against a documented 8B model and its own text"
)
WRONG = 0.0  # of the guesses right


def _wrong_figure(guesses: int) -> Documented:
    return Documented(
        f"guessing where all of {guesses} guesses are wrong, times as fast",
        "none published; elsewhere, on a text that is not described, 2.4 times as slow",
        None,
        "times",
        f"{SETTINGS} (2.4 times as slow)",
        "x86, 8B, speculation switched on",
        _gains(WRONG, guesses),
        why=f"no document tells how many guesses were right; {TIMED}",
    )


FIGURES = (
    Documented(
        "guessing on repetitive text, times as fast",
        "181.1 / 126.6 = 1.43",
        1.43,
        "times",
        SOURCE,
        f"{BOARD}, 0.625 of the guesses right",
        _gains(REPETITIVE, FAST_K),
        lambda values: median(values) >= 0.9 * 1.43,
        f"with as many guesses right as documented, at least nine tenths of the documented gain; {TIMED}",
    ),
    Documented(
        "guessing on free text, times as fast",
        "182.6 / 181.8 = 1.00",
        1.0,
        "times",
        SOURCE,
        f"{BOARD}; how much was guessed is not stated",
        _gains(NOTHING, FAST_K),
        lambda values: 0.95 <= median(values) <= 1.05,
        "the same time within 5 %, because nothing is guessed: in the free answers of the small model the search finds "
        "no guess at all, so that only the search is timed; where guesses are found and wrong, the next figures tell. "
        f"Also {TIMED}",
    ),
    *(_wrong_figure(guesses) for guesses in (SPEC_K, FAST_K)),
    Documented(
        "guessing with the answer kept to the last bit, times as fast",
        "188.9 / 249.4 = 0.76 (exact checks), 181.1 / 265.9 = 0.68 (replayed)",
        0.76,
        "times",
        SOURCE,
        "RK3588, 8B q4, 8 guesses, 0.62 of them right; checked by the products of single tokens, or generated again",
        _gains(REPETITIVE, FAST_K),
        lambda values: median(values) < 1,
        "documented as slower than without guesses, because several tokens at once are multiplied in another order "
        f"than one; here the order is the same, so that the fast way is exact; {TIMED}",
    ),
    Documented(
        "guessing on text, x86, times as fast",
        "25.3 / 19.5 = 1.30",
        1.30,
        "times",
        SETTINGS,
        f"{X86}, 0.75 of them right",
        _gains(TEXT_X86, SPEC_K),
        lambda values: median(values) >= 0.9 * 1.30,
        "with as many of four guesses right as documented, at least nine tenths of the documented gain; timed on the "
        "2B shape with random weights, which says one token again and again and is given made-up guesses",
    ),
    Documented(
        "guessing on a text about pictures, x86, times as fast",
        "28.8 / 17.6 = 1.64",
        1.64,
        "times",
        SETTINGS,
        f"{X86}, 0.92 of them right",
        _gains(PICTURES_X86, SPEC_K),
        lambda values: median(values) >= 0.9 * 1.64,
        "likewise, made up as with text: what a text is about changes no step, only how many guesses are right",
    ),
    Documented(
        "guesses that are right, repetitive text",
        "0.625",
        0.625,
        "of the guesses",
        SOURCE,
        f"{BOARD}, eight equal lines",
        _right,
        lambda values: median(values) > 0.5,
        "answers of a trained model that repeat the question or an earlier answer; more than half of the guesses",
    ),
    Documented(
        "answers that are the same with guesses",
        "39 of 39 and 167 of 167 tokens",
        1.0,
        "of all",
        SOURCE,
        f"{BOARD}, repetitive and free text, greedy",
        _same,
        lambda values: set(values) == {1.0},
        "every answer of every kind of text, token by token",
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__], {"questions": 3, "guesses": [SPEC_K, FAST_K], "shape": "tiny-vl", "tokens": 24, "repeats": 2}
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
