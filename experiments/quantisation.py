"""What a weight's format costs in agreement with float32 and in right answers, and what it brings in time and memory.

Claims: on the small trained models q8 keeps the most likely token of about 99 in 100 positions and q4 of about 9 in 10,
what users say included, which nobody can predict; a token takes less time the fewer bytes its weights have; a prompt
takes longer with q8 than with q4 where the processor has no dot product of signed bytes, though it is computing and not
reading that takes its time. Documented: prompts 2.4 % slower with q8 weights than with q4; 2B in q8 50 ms per token on
the board and a file of 3.19 GB; no agreement and no accuracy of q4 or q8 at all. Cost: twelve minutes on 2 cores, 11
GiB of memory.

    python -m experiments.quantisation

Formats are float32 and bfloat16 (`--dtype`), q8, q4-head-q8 (q4, but embeddings and head in q8) and q4 (`--quant`). The
trained models are stored in bfloat16, so that nothing is lost by it. Random parity checkpoints, whose logits lie close
together, bound the difference from above. Time and memory are those of the 2B shape with random weights, in a process
for each measurement. Writes results/quantisation/. Of a real checkpoint (`--model DIR`) only the logits are compared.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import models
from experiments.bench import ratios, spread
from experiments.bench_steps import Steps
from experiments.exercises import PICTURES, TEXTS, held_out_of_each, right_answers, share_right, task_table, tasks_of
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, by_repeat, of
from experiments.logits import agreements, divergences, picture_arguments
from experiments.parity import CASES, case_names, read_reference
from experiments.sources import SETTINGS, TECHNICAL
from experiments.turns import Subject
from models import LoadedModel
from models.cache import CacheType
from models.inference import Inference
from models.quantisation import SCHEMES
from models.switches import Switches
from models.weights import float_parameters

LOGITS, RANDOM, TIME = "logits", "random checkpoint", "time"
FULL = "float32"
FORMATS = (FULL, "bfloat16", "q8", "q4-head-q8", "q4")
# Weights and cache; the first is what the others are compared with.
WAYS: tuple[tuple[str, CacheType], ...] = (
    (FULL, FULL),
    (FULL, "bfloat16"),
    (FULL, "int8"),
    ("bfloat16", FULL),
    *((quant, kv) for quant in ("q8", "q4-head-q8", "q4") for kv in (FULL, "int8")),
)
CONTEXT = 512
TWO = "qwen3-vl-2b"
LEAST = 1e-6  # nats; where a divergence that is smaller, or none, is drawn
MARKERS = "os^Dv"
WEIGHT_DOC = "docs of the original, weight formats"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which models are compared and asked, and what is timed."""
    parser.add_argument("--model", nargs="+", default=["tiny-vl", "tiny-moe"], help="trained models or folders")
    parser.add_argument(
        "--prompts", type=int, default=12, help="held-out conversations of each task whose logits are compared"
    )
    parser.add_argument("--conversations", type=int, default=50, help="likewise that are to be answered")
    parser.add_argument("--cases", nargs="*", default=case_names(), help="random parity checkpoints")
    parser.add_argument("--shape", default=TWO, help="the shape that is timed, with random weights")
    parser.add_argument("--timed", nargs="*", choices=FORMATS, default=FORMATS, help="formats that are timed")
    parser.add_argument("--context", type=int, default=256, help="tokens in the timed cache")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the timed prompt")
    parser.add_argument("--steps", type=int, default=16, help="timed, per repeat")
    parser.add_argument("--repeats", type=int, default=2)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Way by way, because only one model is in memory at a time; then what is timed, formats in turn."""
    compared = [
        {"part": part, "model": model, "weights": weights, "kv": kv}
        for model in options.model
        for weights, kv in WAYS
        for part in (*([LOGITS] if (weights, kv) != WAYS[0] else []), *(tasks_of(model) if kv == FULL else []))
    ]
    bounds = [
        {"part": RANDOM, "model": case, "weights": weights, "kv": kv}
        for case in options.cases
        for weights, kv in WAYS[1:]
    ]
    timed = [
        {"part": TIME, "shape": options.shape, "weights": weights, "repeat": repeat}
        for repeat in range(options.repeats)
        for weights in (options.timed if repeat % 2 == 0 else reversed(options.timed))
    ]
    return compared + bounds + timed


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """Each model in one way at a time, and float32's logits of its prompts."""

    @lru_cache(1)
    def opened(model: str, weights: str, kv: CacheType) -> LoadedModel:
        if model in options.cases:
            return open_model(str(CASES / model), weights, kv, None)
        return open_model(model, weights, kv, CONTEXT)

    @lru_cache(1)
    def wanted(model: str) -> list[Wanted]:
        if model in options.cases:
            case = read_reference(model)
            prompts = [(model, case.token_ids, case.visual)]
        else:
            prompts = list(said(opened(model, *WAYS[0]), options.prompts if tasks_of(model) else 1, options.seed))
        return [Wanted(*prompt, centred_logits(opened(model, *WAYS[0]), *prompt[1:])) for prompt in prompts]

    def measure(cell: Cell) -> list[Sample]:
        if cell["part"] == TIME:
            return [timed(cell["weights"], options)]
        model, way = cell["model"], (cell["weights"], cell["kv"])
        if cell["part"] in (LOGITS, RANDOM):
            prompts = wanted(model)
            return [difference(each, opened(model, *way)) for each in prompts]
        seed = f"{options.seed} {cell['part']}"
        return [right_answers(opened(model, *way), tasks_of(model)[cell["part"]], seed, options.conversations)]

    yield measure


def open_model(model: str, weights: str, kv: CacheType, context: int | None) -> LoadedModel:
    """A model whose weights are in one of `FORMATS`."""
    quant, dtype = (weights, FULL) if weights in SCHEMES else (None, weights)
    return models.load(model, quant, dtype, kv=kv, max_context=context)


@dataclass(frozen=True)
class Wanted:
    """A prompt and the centred logits `[length, vocab]` of float32: `token_ids` `[length]`, and `visual`, the picture
    arguments of `LoadedModel.logits`."""

    name: str
    token_ids: np.ndarray
    visual: dict[str, np.ndarray]
    logits: np.ndarray


def said(model: LoadedModel, count: int, seed: int) -> Iterator[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    """`count` held-out conversations of every task with their answers: name, token ids, pictures."""
    for name, messages in held_out_of_each(model, f"{seed} said", count):
        prompt = model.prompt(messages, add_generation_prompt=False)
        yield name, prompt.token_ids, picture_arguments(prompt)


def centred_logits(model: LoadedModel, token_ids: np.ndarray, visual: dict[str, np.ndarray]) -> np.ndarray:
    """Logits `[length, vocab]` whose mean per token is 0: a shift of all has no effect on what is generated."""
    logits = model.logits(token_ids, **visual)
    return logits - logits.mean(axis=-1, keepdims=True)


def difference(wanted: Wanted, model: LoadedModel) -> Sample:
    """How far a model's logits lie from float32's, summed over the tokens of a prompt: squared errors and squares of
    the centred logits (mean over the vocabulary), Kullback-Leibler divergence in nats, and tokens with the same most
    likely successor."""
    found = centred_logits(model, wanted.token_ids, wanted.visual)
    return {
        "prompt": wanted.name,
        "tokens": len(found),
        "squared_error": float(np.square(found - wanted.logits).mean(axis=-1).sum()),
        "square": float(np.square(wanted.logits).mean(axis=-1).sum()),
        "divergence": float(divergences(wanted.logits, found).sum()),
        "agreeing": int(agreements(wanted.logits, found).sum()),
    }


class TimedSteps(Steps):
    """Decode steps and a prompt on one network."""

    def __init__(self, shape: str, weights: str, options: argparse.Namespace) -> None:
        super().__init__(shape, weights, "int8", [(options.context, 1)], options.steps)
        self.inference.compile(options.prompt + 1, 0)
        self.options = options

    def measure(self) -> Sample:
        """Milliseconds of each step and of a prompt up to its first token, bytes of all weights, and bits per weight
        of the decoder's layers."""
        ms = self.decode(self.options.context, 1, self.options.steps)["ms"]
        prompt_ms = self.prefill(self.options.prompt)["ms"]
        told = {"ms": ms, "prompt_ms": prompt_ms, "bytes": sum(self.weights.values())}
        return told | {"layer_bits": layer_bits(self.weights, self.inference)}


def timed(weights: str, options: argparse.Namespace) -> Sample:
    """One measurement in a process of its own, which takes its memory with it."""
    threads = len(os.sched_getaffinity(0))
    with Subject(threads, TimedSteps, options.shape, weights, options) as subject:
        return subject.call("measure")


def layer_bits(weights: dict[str, int], inference: Inference) -> float:
    """Bits per weight of the decoder's layers, of which only norms (and a mixture's routers) are never quantised."""
    parameters = float_parameters(inference.config, Switches())
    count = sum(math.prod(like.shape) for path, like in parameters.items() if path.startswith("layers."))
    return 8 * sum(size for path, size in weights.items() if path.startswith("layers.")) / count


@dataclass(frozen=True)
class Deviation:
    """How far logits lie from float32's: `rmse` of the centred logits over their standard deviation, `divergence` the
    mean Kullback-Leibler divergence in nats, `agreement` the share of tokens with the same most likely successor."""

    tokens: int
    rmse: float
    divergence: float
    agreement: float


def deviation(samples: Sequence[Sample]) -> Deviation:
    """Of the prompts of one model; of several models the mean, weighted by tokens."""
    found, tokens = [], []
    for model in dict.fromkeys(sample["cell"]["model"] for sample in samples):
        own = of(samples, model=model)
        names = ("tokens", "squared_error", "square", "divergence", "agreeing")
        count, error, square, divergence, agreeing = (sum(sample[name] for sample in own) for name in names)
        found.append((math.sqrt(error / square), divergence / count, agreeing / count))
        tokens.append(count)
    return Deviation(sum(tokens), *map(float, np.average(found, axis=0, weights=tokens)))


def groups(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Comparisons of logits by model; the random checkpoints are one group."""
    trained = of(samples, part=LOGITS)
    found = {model: of(trained, model=model) for model in dict.fromkeys(s["cell"]["model"] for s in trained)}
    random = of(samples, part=RANDOM)
    return found | ({"random parity checkpoints": random} if random else {})


def answering(samples: Sequence[Sample]) -> list[str]:
    """The models that were asked their exercises."""
    return list(dict.fromkeys(sample["cell"]["model"] for sample in samples if "right" in sample))


def timed_formats(samples: Sequence[Sample]) -> list[str]:
    """The formats that were timed, from the widest on."""
    return [weights for weights in FORMATS if of(samples, part=TIME, weights=weights)]


def step_ms(samples: Sequence[Sample], weights: str) -> list[float]:
    """Milliseconds per token of each repeat."""
    return [fmean(sample["ms"]) for sample in times(samples, weights)]


def prompt_ms(samples: Sequence[Sample], weights: str) -> list[float]:
    """Milliseconds for the prompt in each repeat."""
    return [sample["prompt_ms"] for sample in times(samples, weights)]


def times(samples: Sequence[Sample], weights: str) -> list[Sample]:
    """What was timed of a format, in the order of the repeats."""
    return by_repeat(samples, part=TIME, weights=weights)


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """Time and memory, differences of the logits, and right answers."""
    parts = [time_lines(samples, options), logit_lines(samples), answer_lines(samples, options)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def time_lines(samples: Sequence[Sample], options: argparse.Namespace) -> list[str]:
    """A row per format."""
    if not timed_formats(samples):
        return []
    lines = [
        f"{options.shape}, random weights, int8 cache with {options.context} tokens, one sequence; median "
        f"(lowest..highest) of {options.repeats} repeats of {options.steps} steps and of a prompt. Memory is that of "
        "all weights, vision tower included; bits are those of the decoder's layers. Each measurement compiles in its "
        "own process before anything is timed; two steps come before those that are timed, and the prompt after them "
        "is the first of its process.",
        "",
        f"| weights | GB | bits per weight | ms per token | prompt of {options.prompt} tokens, s |",
        "|" + "---|" * 5,
    ]
    for weights in timed_formats(samples):
        told = times(samples, weights)
        cells = [weights, f"{told[0]['bytes'] / 1e9:.2f}", f"{told[0]['layer_bits']:.2f}"]
        cells += [spread(step_ms(samples, weights)), spread([ms / 1e3 for ms in prompt_ms(samples, weights)], 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def logit_lines(samples: Sequence[Sample]) -> list[str]:
    """A row per model and way."""
    if not groups(samples):
        return []
    lines = [
        "Logits against those of float32 weights with a float32 cache, after every token of held-out conversations "
        "with their answers. Nothing of this and of the answers is timed.",
        "",
        "| model | weights | cache | tokens | logit RMSE / std | KL divergence, nats | top-1 agreement |",
        "|" + "---|" * 7,
    ]
    for name, own in groups(samples).items():
        for weights, kv in WAYS[1:]:
            told = deviation(of(own, weights=weights, kv=kv))
            cells = [name, weights, kv, str(told.tokens), f"{told.rmse:.4f}", f"{told.divergence:.2e}"]
            lines.append(f"| {' | '.join(cells)} | {told.agreement:.1%} |")
    return lines


def answer_lines(samples: Sequence[Sample], options: argparse.Namespace) -> list[str]:
    """Right answers by kind and by task."""
    if not answering(samples):
        return []
    lines = [
        f"Right answers to {options.conversations} held-out conversations of each task, greedy, float32 cache: those "
        "that are the wanted ones word for word.",
        "",
        "| model | weights | about texts | about pictures |",
        "|---|---|---|---|",
    ]
    for model in answering(samples):
        for weights in FORMATS:
            shares = [answered(samples, model, weights, kind) for kind in (TEXTS, PICTURES)]
            shown = ["" if share is None else f"{share:.1%}" for share in shares]
            lines.append(f"| {model} | {weights} | {' | '.join(shown)} |")
    for model in answering(samples):
        columns = {weights: of(samples, model=model, weights=weights, kv=FULL) for weights in FORMATS}
        lines += ["", *task_table(model, columns)]
    return lines


def answered(samples: Sequence[Sample], model: str, weights: str, kind: str) -> float | None:
    """Share of right answers of a model to its tasks of a kind."""
    return share_right(of(samples, model=model, weights=weights, kv=FULL), kind)


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Time, memory, divergence and right answers by format."""
    figure, ((time, memory), (logits, right)) = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    plot_costs(time, memory, samples, options)
    places = range(len(FORMATS))
    for number, (name, own) in enumerate(groups(samples).items()):
        told = [deviation(of(own, weights=weights, kv=FULL)) for weights in FORMATS[1:]]
        style = {"marker": MARKERS[number % 5], "ls": ("-", "--", ":")[number % 3], "color": COLOURS[number % 6]}
        logits.plot(places[1:], [max(each.divergence, LEAST) for each in told], label=name, **style)
    logits.set(yscale="log", ylabel="KL divergence from float32 (nats)", title=f"at {LEAST:g}: that or less")
    logits.plot([], [], " ", label="documented: none published")
    plot_answers(right, samples)
    for axes in (logits, right):
        axes.set(xticks=places, xticklabels=FORMATS, xlim=(-0.6, len(FORMATS) - 0.4), xlabel="weights")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return figure


def plot_costs(time: Axes, memory: Axes, samples: Sequence[Sample], options: argparse.Namespace) -> None:
    """Bars of the formats that were timed, with the documented values of the 2B model."""
    formats = timed_formats(samples)
    gigabytes = [times(samples, weights)[0]["bytes"] / 1e9 for weights in formats]
    for axes, values, digits in (
        (time, [median(step_ms(samples, weights)) for weights in formats], ".0f"),
        (memory, gigabytes, ".2f"),
    ):
        drawn = axes.bar(formats, values, 0.6, color=COLOURS[0])
        axes.bar_label(drawn, fmt=f"%{digits}", fontsize=7)
        axes.set(title=options.shape, xlabel="weights")
    time.axhline(50, color="grey", ls="--", lw=1, label="documented, 2B q8 on the RK3588: about 50 ms")
    memory.axhline(3.19, color="grey", ls="--", lw=1, label="documented, 2B q8: 3.19 GB")
    memory.axhline(4.16, color="grey", ls=":", lw=1, label="documented, 2B in q8 and q4 at once: 4.16 GB")
    time.set(ylabel="ms per token")
    memory.set(ylabel="GB of weights")
    time.legend(fontsize=7)
    memory.legend(fontsize=7)


def plot_answers(axes: Axes, samples: Sequence[Sample]) -> None:
    """Right answers of every model by kind."""
    lines = [(model, kind) for model in answering(samples) for kind in (TEXTS, PICTURES)]
    for number, (model, kind) in enumerate(lines):
        shares = [answered(samples, model, weights, kind) for weights in FORMATS]
        if None in shares:
            continue
        style = {"marker": MARKERS[number % 5], "ls": ("-", "--", ":", "-.")[number % 4], "color": COLOURS[number % 6]}
        axes.plot(range(len(FORMATS)), [100 * share for share in shares], label=f"{model}, {kind}", **style)
    if not axes.lines:
        return
    axes.plot([], [], " ", label="documented: none published")
    lowest = min(min(line.get_ydata(), default=100) for line in axes.lines)
    axes.set(ylabel="right answers (%), not from 0 on", ylim=(lowest - 1.5, 100.5))


def _bits(weights: str) -> Callable[[Sequence[Sample]], list[float]]:
    return lambda samples: [sample["layer_bits"] for sample in times(samples, weights)][:1]


def _of_two(read: Callable[[Sequence[Sample]], list[float]]) -> Callable[[Sequence[Sample]], list[float]]:
    """What was timed, if it was the 2B shape."""
    return lambda samples: read(of(samples, part=TIME, shape=TWO))


def _over(
    read: Callable[[Sequence[Sample], str], list[float]], weights: str, other: str
) -> Callable[[Sequence[Sample]], list[float]]:
    """The ratio of two formats in each repeat, where both were timed."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        both = read(samples, weights), read(samples, other)
        return ratios(*both) if all(both) else []

    return measured


def _agreement(weights: str) -> Callable[[Sequence[Sample]], list[float]]:
    """Of each trained model."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        told = [of(own, part=LOGITS, weights=weights, kv=FULL) for own in groups(samples).values()]
        return [deviation(own).agreement for own in told if own]

    return measured


def _right_over_full(weights: str) -> Callable[[Sequence[Sample]], list[float]]:
    """Right answers over those with float32, of each model and kind of task."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        pairs = [
            [answered(samples, model, each, kind) for each in (weights, FULL)]
            for model in answering(samples)
            for kind in (TEXTS, PICTURES)
        ]
        return [narrow / full for narrow, full in pairs if narrow is not None and full]

    return measured


FIGURES = (
    *(
        Documented(
            f"bits per weight, {weights}",
            f"{size} bytes for 32 weights = {bits}",
            bits,
            "bits",
            WEIGHT_DOC,
            f"a float16 scale for every 32 weights{more}",
            _bits(weights),
            lambda values, bits=bits: abs(values[0] / bits - 1) < 0.01,
            "within 1 %; all weights of the decoder's layers are counted, norms in float32 too",
        )
        for weights, size, bits, more in (
            ("q8", 34, 8.5, ""),
            ("q4", 18, 4.5, "; elsewhere the original says about 4.25"),
        )
    ),
    Documented(
        "weights of the 2B model, q8",
        "3,191,541,768 bytes",
        3.191541768,
        "GB",
        "docs of the original, a converter's log",
        "Qwen3-VL-2B, the whole file",
        _of_two(lambda samples: [sample["bytes"] / 1e9 for sample in times(samples, "q8")][:1]),
        lambda values: abs(values[0] / 3.191541768 - 1) < 0.1,
        "within a tenth. Here embeddings and head are one q8 matrix; there the head is stored besides float16 "
        "embeddings, which are 0.62 GB more. What the rest of the difference is no document tells",
    ),
    Documented(
        "time per token of the 2B model, q8",
        "about 50 ms",
        50.0,
        "ms",
        TECHNICAL,
        "RK3588, 2B q8, 4 threads",
        _of_two(lambda samples: step_ms(samples, "q8")),
        absolute="at most",
    ),
    Documented(
        "time per token with q4 over q8",
        "less: the default mode keeps both and decodes with q4",
        None,
        "",
        WEIGHT_DOC,
        "mode dual",
        _over(step_ms, "q4", "q8"),
        lambda values: max(values) < 1,
        "less in every repeat",
    ),
    Documented(
        "time for a prompt with q8 over q4",
        "101.3 / 98.9 s = 1.024",
        1.024,
        "",
        SETTINGS,
        "x86, 8B, 16 threads, mode dual (prompts with q8) against q4",
        _over(prompt_ms, "q8", "q4"),
        lambda values: 0.9 <= median(values) <= 1.1,
        "the same within a tenth. Reading explains no difference: the bytes that q8 has more (GB in the table) are "
        "read once for a prompt of one chunk, in a hundredth of its time. Where q8 takes longer, its kernel does: "
        "without a dot product of signed bytes (AVX2) it moves the sign of every weight to the activation and adds in "
        "32 bits, while q4 has no signs and adds in 16",
    ),
    *(
        Documented(
            f"most likely tokens that {weights} keeps of float32's",
            "none published",
            None,
            "of all",
            "no document of the original found",
            "here: trained small models, held-out conversations, float32 cache",
            _agreement(weights),
            why="the original publishes no agreement of its formats with float32",
        )
        for weights in ("q8", "q4")
    ),
    *(
        Documented(
            f"right answers with {weights} over those with float32",
            "none published",
            None,
            "",
            "no document of the original found",
            "here: trained small models, held-out conversations, texts and pictures apart",
            _right_over_full(weights),
            why="the original publishes no accuracy of its formats",
        )
        for weights in ("q8", "q4")
    ),
)

EXPERIMENT = Experiment.of_module(
    sys.modules[__name__],
    {"model": ["tiny-vl"], "prompts": 1, "conversations": 2, "cases": ["dense_tied", "vl_image"], "shape": "tiny-vl"}
    | {"timed": [FULL, "q8", "q4"], "context": 64, "prompt": 32, "steps": 4, "repeats": 1},
)

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
