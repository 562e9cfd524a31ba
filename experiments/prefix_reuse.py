"""What reuse of an earlier prompt's keys and values gains, by what two prompts have in common, and what it changes.

Claims: where a prompt begins like an earlier one, the first token comes sooner, by as much as is not computed again;
where it does not, nothing is lost; and every answer is the one without reuse, to the last character. Documented: 4.99
times as fast with 231 of 253 tokens reused, 6.2 times for the second turn of 300 tokens, 12.8 times at 4K, 13.1 times
after a restart at 8K; but texts that differ from about the 60th token on. Cost: six minutes on 2 cores, 7 GiB of
memory.

    python -m experiments.prefix_reuse

Two servers with the same random weights, one of which reuses (`--prefix-cache-mb 0` turns it off in the other), are
asked in turns over HTTP. Both keep encoded pictures, so that only keys and values make the difference. Writes
results/prefix_reuse/. `--model DIR` serves a real checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments.bench import spread
from experiments.bench_steps import config_of
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.http_client import as_sent, fetch
from experiments.latency import moments, streamed, text_of, total_ms, ttft_ms
from experiments.served import started_server
from experiments.server_process import Server
from experiments.sources import BASELINE, SETTINGS, TECHNICAL
from experiments.tiny_tasks import Message, assistant, user

NEXT, LONG, SYSTEM, PICTURE, OTHER = "next", "long", "system", "picture", "other-picture"
AGAIN, NOTHING, RESTART = "again", "nothing", "restart"
KINDS = {
    NEXT: "next turn",
    LONG: "next turn, long",
    SYSTEM: "same system prompt",
    PICTURE: "same picture, another question",
    OTHER: "another picture of the same size",
    AGAIN: "same prompt again",
    NOTHING: "nothing shared",
    RESTART: "next turn after a restart",
}
TEMPLATE = 8  # tokens that a template puts around one message, about
ADDED = 21  # tokens of a next turn's question, with which it is about the documented 29 tokens longer
RULES, QUESTION = 223, 17  # tokens with which 231 of a prompt's 253 are its system prompt's
SIDE = 256  # pixels of a picture
BEFORE = 8  # tokens of the answer that comes before
WORDS = "the a one two three red green blue circle square is are in on and what name count day colour".split()
PUBLISHED = {NEXT: 5882 / 952, LONG: 12.8, SYSTEM: 4.99, RESTART: 13.1}  # times as fast
BELOW = 0.25  # of a row of the plot
TICKS = (1, 2, 5, 10, 20, 50)
ENOUGH = 0.9  # of the documented gain
X86 = "x86, 8B, 16 threads"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, how long conversations are, and how often all is asked."""
    parser.add_argument(
        "--model", default="qwen3-vl-2b", help="a preset, whose weights are random, or a model or folder"
    )
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="what comes after what")
    parser.add_argument("--short", type=int, default=300, help="tokens of a conversation's first turn, about")
    parser.add_argument("--long", type=int, default=1024, help="likewise of a long one")
    parser.add_argument("--answer", type=int, default=72, help="tokens of the answers that are compared")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=1, help="repeats that restart a server with --disk-kv")


def kinds_of(options: argparse.Namespace) -> list[str]:
    """The kinds that a model can be asked."""
    sees = config_of(options.model).vision is not None
    return [kind for kind in options.kind if sees or kind not in (PICTURE, OTHER)]


def cells(options: argparse.Namespace) -> list[Cell]:
    """With and without reuse in turn, in the opposite order in every second repeat."""
    return [
        {"kind": kind, "repeat": repeat, "reuse": reuse}
        for repeat in range(options.repeats)
        for kind in kinds_of(options)
        if kind != RESTART or repeat < options.restarts
        for reuse in ((True, False) if repeat % 2 == 0 else (False, True))
    ]


@dataclass(frozen=True)
class Exchange:
    """What is asked before, and what then: `after` on its own, or as a conversation that goes on."""

    before: list[Message]
    after: list[Message]
    goes_on: bool = False

    def asked(self, answer: str) -> list[Message]:
        """The conversation that is measured, after `answer` to the one before."""
        return [*self.before, assistant(answer), *self.after] if self.goes_on else self.after


def exchange(kind: str, random: Random, write: Callable[[int], str], options: argparse.Namespace) -> Exchange:
    """An exchange of a kind; `write` gives a text of about so many tokens, never the same."""
    if kind in (NEXT, LONG, RESTART):
        first = write((options.short if kind == NEXT else options.long) - TEMPLATE)
        return Exchange([user(first)], [user(write(ADDED))], goes_on=True)
    if kind == SYSTEM:
        rules = {"role": "system", "content": write(RULES)}
        return Exchange([rules, user(write(QUESTION))], [rules, user(write(QUESTION))])
    if kind in (PICTURE, OTHER):
        first, second = noise(random), noise(random)
        return Exchange([about(first, write(QUESTION))], [about(first if kind == PICTURE else second, write(QUESTION))])
    said = [[user(write(RULES))] for _ in range(2)]
    return Exchange(said[0], said[0] if kind == AGAIN else said[1])


def noise(random: Random) -> Image.Image:
    """A picture that is like no other."""
    values = np.frombuffer(random.randbytes(3 * SIDE * SIDE), np.uint8)
    return Image.fromarray(values.reshape(SIDE, SIDE, 3))


def about(picture: Image.Image, question: str) -> Message:
    """A question about a picture."""
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A server that reuses and one that does not; a third one is started, and again, for every restart."""
    with (
        started_server(options.model, options.quant) as reusing,
        started_server(options.model, options.quant, "--prefix-cache-mb", "0") as other,
    ):
        per_word = tokens_per_word(other)
        for server in (reusing, other):
            ask(server, [user("Hello")], 2)

        def measure(cell: Cell) -> list[Sample]:
            random = Random(f"{options.seed} {cell['kind']} {cell['repeat']}")
            told = exchange(cell["kind"], random, lambda tokens: words(random, tokens / per_word), options)
            if cell["kind"] == RESTART and cell["reuse"]:
                return [restarted(told, options)]
            server = reusing if cell["reuse"] else other
            before = ask(server, told.before, BEFORE)
            return [{"before": before, "after": ask(server, told.asked(text_of(before)), options.answer)}]

        yield measure


def words(random: Random, count: float) -> str:
    """A text of so many words."""
    return " ".join(random.choices(WORDS, k=max(1, round(count))))


def tokens_per_word(server: Server) -> float:
    """How many tokens of the server's vocabulary a word takes."""
    body = json.dumps({"prompt": " ".join(WORDS)}).encode()
    status, told = asyncio.run(fetch(server, "POST", "/tokenize", body))
    if status != 200:
        raise RuntimeError(f"the server counted no tokens: {told}")
    return told["count"] / len(WORDS)


def ask(server: Server, messages: Sequence[Message], tokens: int) -> Sample:
    """A greedy answer as it streams, with the server's count of tokens."""
    body = {"messages": [as_sent(message) for message in messages], "max_tokens": tokens, "temperature": 0}
    return streamed(server, body | {"stream_options": {"include_usage": True}})


def restarted(told: Exchange, options: argparse.Namespace) -> Sample:
    """An exchange in whose middle the server ends and starts again."""
    with tempfile.TemporaryDirectory(prefix="disk_kv_") as folder:
        keeping = options.model, options.quant, "--disk-kv", folder
        with started_server(*keeping) as server:
            before = ask(server, told.before, BEFORE)
        with started_server(*keeping) as server:
            ask(server, [user("Hello")], 2)
            return {"before": before, "after": ask(server, told.asked(text_of(before)), options.answer)}


def first_ms(sample: Sample) -> float:
    """Time to the first token of the second answer; to its end where it has no text."""
    return ttft_ms(sample["after"]) if moments(sample["after"]) else total_ms(sample["after"])


def prompt_tokens(sample: Sample) -> int:
    """Tokens of the second prompt."""
    return sample["after"]["usage"]["prompt_tokens"]


def reused_tokens(sample: Sample) -> int:
    """Those of them that were not computed again."""
    return sample["after"]["usage"]["prompt_tokens_details"]["cached_tokens"]


def pairs(samples: Sequence[Sample], kind: str) -> list[tuple[Sample, Sample]]:
    """Of every repeat the sample with reuse and the one without."""
    without = {sample["cell"]["repeat"]: sample for sample in of(samples, kind=kind, reuse=False)}
    found = of(samples, kind=kind, reuse=True)
    return [(sample, without[sample["cell"]["repeat"]]) for sample in found if sample["cell"]["repeat"] in without]


def gains(samples: Sequence[Sample], kind: str) -> list[float]:
    """Times as fast to the first token with reuse, in the same repeat."""
    return [first_ms(other) / first_ms(reusing) for reusing, other in pairs(samples, kind)]


def same(samples: Sequence[Sample], kind: str) -> list[bool]:
    """Of every repeat whether both answers are those without reuse."""
    return [
        all(text_of(reusing[part]) == text_of(other[part]) for part in ("before", "after"))
        for reusing, other in pairs(samples, kind)
    ]


def asked_kinds(samples: Sequence[Sample]) -> list[str]:
    """The kinds that were asked both ways."""
    return [kind for kind in KINDS if pairs(samples, kind)]


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per kind."""
    lines = [
        f"{options.model} {options.quant}, two servers asked in turns, greedy, streamed; answers of up to "
        f"{options.answer} tokens. Milliseconds from sending a request to the first token, median (lowest..highest) of "
        "the repeats; ratios are taken within a repeat. A server compiles before it takes requests, and answers a "
        "short one before the first that is timed.",
        "",
        "| asked after | n | tokens of the prompt | reused | without reuse, ms | with, ms | times as fast "
        "| documented | same answers |",
        "|" + "---|" * 9,
    ]
    for kind in asked_kinds(samples):
        found = pairs(samples, kind)
        reusing, others = ([pair[place] for pair in found] for place in (0, 1))
        cells = [KINDS[kind], str(len(found)), span(map(prompt_tokens, reusing)), span(map(reused_tokens, reusing))]
        cells += [spread([first_ms(sample) for sample in each]) for each in (others, reusing)]
        cells += [spread(gains(samples, kind), 2), f"{PUBLISHED[kind]:.3g}" if kind in PUBLISHED else ""]
        lines.append(f"| {' | '.join(cells)} | {sum(same(samples, kind))} of {len(found)} |")
    return "\n".join(lines) + "\n"


def span(counts: Iterator[int]) -> str:
    """One number, or from where to where."""
    found = sorted(set(counts))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]}..{found[-1]}"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Times to the first token and gains, by kind."""
    kinds = asked_kinds(samples)
    figure, (times, faster) = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for number, (label, reuse) in enumerate((("without reuse", False), ("with reuse", True))):
        marker, colour = "os"[number], COLOURS[number]
        for place, kind in enumerate(kinds):
            ms, at = [first_ms(sample) for sample in of(samples, kind=kind, reuse=reuse)], place + 0.3 * (number - 0.5)
            times.plot(ms, [at] * len(ms), marker, ms=4, mfc="none", color=colour)
            times.plot(median(ms), at, marker, ms=8, color=colour, label=label if place == 0 else None)
            told = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            times.annotate(f"{median(ms):.0f}", (max(ms), at), (7, 0), **told)
    times.set(xscale="log", xlabel="ms to the first token: each repeat, and the median", yticks=range(len(kinds)))
    times.grid(axis="x", which="both", lw=0.3)
    times.set(yticklabels=[KINDS[kind] for kind in kinds])
    times.margins(x=0.15)
    times.invert_yaxis()
    times.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    plot_gains(faster, samples, kinds)
    figure.suptitle(f"{options.model} {options.quant}")
    return figure


def plot_gains(axes: Axes, samples: Sequence[Sample], kinds: Sequence[str]) -> None:
    """Every repeat as a circle, and the documented gain a little below, so that neither hides the other."""
    for place, kind in enumerate(kinds):
        found = gains(samples, kind)
        axes.plot(found, [place] * len(found), "o", ms=7, mfc="none", color=COLOURS[0])
        if kind in PUBLISHED:
            axes.plot(PUBLISHED[kind], place + BELOW, "D", ms=7, color=COLOURS[1])
    axes.plot([], [], "o", ms=7, mfc="none", color=COLOURS[0], label="here, every repeat")
    axes.plot([], [], "D", ms=7, color=COLOURS[1], label="documented")
    axes.axvline(1, color="grey", lw=0.8)
    axes.set(xscale="log", xlabel="times as fast with reuse", xticks=TICKS, xticklabels=TICKS, xlim=(0.6, None))
    axes.minorticks_off()
    axes.grid(axis="x", lw=0.3)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _gains(kind: str) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: gains(samples, kind)


def _saved(kind: str) -> Callable[[Sequence[Sample]], list[float]]:
    """Percent of the time to the first token."""
    return lambda samples: [100 * (1 - 1 / gain) for gain in gains(samples, kind)]


def _count(kind: str, read: Callable[[Sample], int]) -> Callable[[Sequence[Sample]], list[Any]]:
    return lambda samples: [read(reusing) for reusing, _ in pairs(samples, kind)]


def _same(*kinds: str) -> Callable[[Sequence[Sample]], list[float]]:
    """Share of the same answers of every kind."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        equal = [same(samples, kind) for kind in kinds]
        return [sum(each) / len(each) for each in equal if each]

    return measured


def _gain_figure(kind: str, what: str, printed: str, source: str, configuration: str, why: str) -> Documented:
    value = PUBLISHED[kind]
    told = f"at least nine tenths of the documented gain; {why}"
    return Documented(
        f"{what}, times as fast to the first token",
        printed,
        value,
        "times",
        source,
        configuration,
        _gains(kind),
        lambda values: median(values) >= ENOUGH * value,
        told,
    )


FIGURES = (
    _gain_figure(
        SYSTEM,
        "a prompt of which 231 of 253 tokens are reused",
        "4.99",
        SETTINGS,
        X86,
        "the prompts here share as large a part",
    ),
    _gain_figure(
        NEXT,
        "second turn of a conversation of about 300 tokens",
        "5,882 / 952 ms = 6.2",
        "docs of the original, performance and benchmarks",
        "RK3588, 2B, 8 threads, reuse together with keys and values on disk, prefill_ms",
        "a conversation of about as many tokens; what is new is the first answer and a question",
    ),
    _gain_figure(
        LONG,
        "second turn of a long conversation",
        "100.3 / 7.9 s = 12.8 at 4K",
        BASELINE,
        "RK3588, 2B q4, 4091 tokens, 29 more in the second turn",
        "the conversation here is shorter, so that there is less to save",
    ),
    _gain_figure(
        RESTART,
        "second turn after a restart, from disk",
        "201.7 / 15.4 s = 13.1 at 8K",
        BASELINE,
        "RK3588, 2B q4, 8109 tokens, float32 keys and values of 1.87 GB",
        "the conversation here is shorter, so that there is less to save",
    ),
    *(
        Documented(
            f"time to the first token that {what} saves",
            f"{value} %",
            value,
            "%",
            SETTINGS,
            f"{X86}, neither prompt nor reused tokens stated",
            _saved(kind),
            why="the share depends on the prompt, of which nothing is stated",
        )
        for kind, what, value in ((LONG, "reuse in memory", 97.2), (RESTART, "reuse from disk", 97.3))
    ),
    Documented(
        "a prompt that shares nothing, times as fast with reuse on",
        "none published",
        None,
        "times",
        SETTINGS,
        "reuse is on unless it is turned off",
        _gains(NOTHING),
        lambda values: 0.9 <= median(values) <= 1.1,
        "where nothing is found to reuse, the same time within a tenth",
        category="guarantee",
    ),
    Documented(
        "tokens that are computed of a prompt that comes again",
        "1, the last",
        1.0,
        "tokens",
        "source of the original, an exact repeat keeps all tokens but the last",
        "the same prompt twice",
        _count(AGAIN, lambda sample: prompt_tokens(sample) - reused_tokens(sample)),
        lambda values: set(values) == {1},
        "of every repeat exactly one: without it there would be no logits, and the original once answered nothing",
    ),
    Documented(
        "tokens that are reused behind another picture of the same size",
        "0",
        None,
        "tokens",
        "changelog: pictures of the same size were taken for each other before their content was compared",
        "the prompt begins with the picture",
        _count(OTHER, reused_tokens),
        lambda values: set(values) == {0},
        "none, since the prompt begins with the picture",
    ),
    Documented(
        "answers that are the same with reuse",
        "all; elsewhere: different from about the 60th token on",
        1.0,
        "of all",
        f"{SETTINGS}, later limited to short answers",
        "greedy",
        _same(*(kind for kind in KINDS if kind != RESTART)),
        lambda values: set(values) == {1.0},
        "every answer of every kind, to the last character",
    ),
    Documented(
        "answers that are the same after a restart",
        "all",
        1.0,
        "of all",
        TECHNICAL,
        "the same next turn from memory and from disk",
        _same(RESTART),
        lambda values: set(values) == {1.0},
        "every answer, to the last character",
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__], {"model": "tiny-vl", "short": 64, "long": 256, "answer": 12, "repeats": 2}
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
