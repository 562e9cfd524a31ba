"""One token per event against four, straight from the server and through nginx: what its client sees of a stream.

Claims: with four tokens per event the first text comes three tokens later, while the server's own ttft_ms and the role
frame stay; a proxy that buffers turns the rhythm of tokens into a few bursts, and `X-Accel-Buffering: no` gives it
back. Documented as questions, and as a known limit of SSE. Cost: three minutes on 2 cores.

    python -m experiments.flush_ablation

The server has no switch for tokens per event; `experiments.paced_server` emulates it, and slows the small model down to
a token every 50 ms, the documented pace. nginx is the real one; where it is not installed, only the paths without it
are measured. Writes results/flush_ablation/.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.latency import first_event_ms, itl_ms, moments, streamed, total_ms, ttft_ms
from experiments.nginx import Route, find_nginx, nginx_version, running_nginx
from experiments.paced_server import PACE_VARIABLE, TOKENS_VARIABLE
from experiments.server_process import Server, running_server

ONE, FOUR = 1, 4  # tokens per event
QUESTION = "请从61数到90。"  # an answer of nearly 60 tokens
IGNORED = "proxy_ignore_headers X-Accel-Buffering;"
DIRECT = "no proxy"
OBEYING = "nginx, obeys X-Accel-Buffering: no"
BUFFERING = "nginx, ignores it and buffers"
BUFFERING_1_1 = "nginx, the same with HTTP/1.1 behind it"
UNBUFFERED = "nginx, proxy_buffering off"
DIRECTIVES = {
    OBEYING: (),
    BUFFERING: (IGNORED,),
    BUFFERING_1_1: (IGNORED, "proxy_http_version 1.1;", 'proxy_set_header Connection "";'),
    UNBUFFERED: (IGNORED, "proxy_buffering off;"),
}
PATHS = (DIRECT, *DIRECTIVES)
SOURCE = "article 20-3, section 3"
TASK = "article 20-3, section 4, task B3"
PROXY_TASK = "article 20-3, section 4, task A3"
BOARD = "RK3588, one event per token, client on the LAN, no proxy"
# The documented stream of 30 tokens, milliseconds from sending: only its first three and its last are printed. Between
# them tokens come "every 50 to 60 ms", and evenly spaced they do.
ROLE_MS, LAST_MS, DOCUMENTED_TOKENS = 130.3, 2726.5, 30
PRINTED_MS = (930.4, 1061.1, 1191.8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is served, at which pace, and through which nginx."""
    parser.add_argument("--model", default="tiny-vl", help="a model that counts: tiny-vl, or a folder")
    parser.add_argument("--pace", type=float, default=50.0, help="milliseconds that a token takes at least")
    parser.add_argument("--tokens", type=int, default=60, help="at most, of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nginx", default=find_nginx(), help="the program; by default the one that is installed")


def cells(options: argparse.Namespace) -> list[Cell]:
    """All paths in turn; every second repeat in the opposite order."""
    paths = PATHS if options.nginx else (DIRECT,)
    ways = [{"path": path, "per_event": per_event} for path in paths for per_event in (ONE, FOUR)]
    return [
        way | {"repeat": repeat}
        for repeat in range(options.repeats)
        for way in (ways if repeat % 2 == 0 else reversed(ways))
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A server for each number of tokens, and one nginx in front of both; each way is used once before it is
    measured."""
    if not options.nginx:
        print("nginx is not installed: what a proxy does is not measured (Debian: apt-get install nginx-light)")
    version = nginx_version(options.nginx) if options.nginx else ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="experiment_")))
        ways = {
            (DIRECT, per_event): stack.enter_context(server_of(options, per_event, folder)) for per_event in (ONE, FOUR)
        }
        if options.nginx:
            proxied = [(path, per_event) for path in DIRECTIVES for per_event in (ONE, FOUR)]
            routes = [Route(ways[DIRECT, per_event], DIRECTIVES[path]) for path, per_event in proxied]
            ways |= zip(proxied, stack.enter_context(running_nginx(options.nginx, routes)), strict=True)
        for server in ways.values():
            ask(server, 4)

        def measure(cell: Cell) -> list[Sample]:
            sample = ask(ways[cell["path"], cell["per_event"]], options.tokens)
            return [sample | {"pace_ms": options.pace, "nginx": version}]

        yield measure


def server_of(options: argparse.Namespace, per_event: int, folder: Path) -> AbstractContextManager[Server]:
    """The paced server whose events carry so many tokens."""
    settings = {PACE_VARIABLE: str(options.pace), TOKENS_VARIABLE: str(per_event)}
    arguments = ["--model", options.model, "--kestrel-events", "--prefix-cache-mb", "0"]
    log = folder / f"server_{per_event}.log"
    return running_server(arguments, log, module="experiments.paced_server", settings=settings)


def ask(server: Server, tokens: int) -> Sample:
    """One streamed answer. Greedy, so that all are the same."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, "temperature": 0}
    return streamed(server, body)


def bursts(sample: Sample) -> list[tuple[float, int]]:
    """The moments at which text appears, in milliseconds from sending, and how many events bring it: those that come
    within a quarter of the pace after the one before come at the same moment."""
    found: list[tuple[float, int]] = []
    before = float("-inf")
    for moment in moments(sample):
        if moment - before < sample["pace_ms"] / 4:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((moment, 1))
        before = moment
    return found


def tokens_at_a_time(sample: Sample) -> float:
    """Tokens of the answer over moments at which text appears."""
    return sample["metrics"]["n_tokens"] / len(bursts(sample))


def longest_pause_ms(sample: Sample) -> float:
    """The longest time without new text, after the first."""
    return max(itl_ms(sample), default=0.0)


COLUMNS: dict[str, tuple[Callable[[Sample], float], int]] = {
    "first event": (first_event_ms, 0),
    "first text": (ttft_ms, 0),
    "ttft_ms of the server": (lambda sample: sample["metrics"]["ttft_ms"], 1),
    "tokens at a time": (tokens_at_a_time, 1),
    "longest pause": (longest_pause_ms, 0),
    "whole stream": (total_ms, 0),
}


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per path and number of tokens."""
    version = samples[0]["nginx"] or "nginx was not installed, so that its paths are missing"
    lines = [
        f"`{QUESTION}` to {options.model}, at most {options.tokens} tokens, slowed down to one every "
        f"{options.pace:g} ms; {version}. Milliseconds from sending the request, median (lowest..highest). Tokens at a "
        "time: tokens over moments at which text appears. Four tokens per event are emulated: the text is held back "
        "before the server's own code.",
        "",
        "Warm-up: an answer of four tokens along each way, which is not counted. The server has compiled everything "
        "before it says that it is ready, so no time here contains compiling.",
        "",
        f"| path | tokens per event | n | {' | '.join(COLUMNS)} |",
        "|" + "---|" * (3 + len(COLUMNS)),
    ]
    for path in PATHS:
        for per_event in (ONE, FOUR):
            found = of(samples, path=path, per_event=per_event)
            if found:
                values = [spread([read(sample) for sample in found], digits) for read, digits in COLUMNS.values()]
                lines.append(f"| {' | '.join([path, str(per_event), str(len(found)), *values])} |")
    return "\n".join(lines) + "\n"


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """A line per path and number of tokens with a mark wherever text appears, as large as the text, below the
    documented stream."""
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    ways = [(path, per_event) for per_event in (ONE, FOUR) for path in PATHS]
    shown = [(way, of(samples, path=way[0], per_event=way[1])) for way in ways]
    rows = [(way, found[len(found) // 2]) for way, found in shown if found]
    for height, ((_, per_event), sample) in enumerate(rows, 1):
        plot_stream(axes, sample, height, COLOURS[0] if per_event == ONE else COLOURS[1])
    plot_documented(axes)
    names = [f"{path}, {per_event} per event" for (path, per_event), _ in rows]
    documented = f"documented: 1 per event, no proxy, {DOCUMENTED_TOKENS} tokens"
    axes.set_yticks(range(len(rows) + 1), [documented, *names], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms from sending the request", title="when text appears; the number is that of tokens at a time")
    handles = [axes.plot([], [], color="black", ls="", marker=marker, mfc="none")[0] for marker in "D|."]
    labels = ["role frame", "text", "documented only as every 50 to 60 ms: drawn evenly"]
    figure.legend(handles, labels, fontsize=8, loc="outside lower left", ncols=3)
    return figure


def plot_stream(axes: Axes, sample: Sample, height: int, colour: str) -> None:
    """One stream: its role frame, and its bursts, with the number of tokens where that is more than one."""
    axes.plot([first_event_ms(sample)], [height], ls="", marker="D", ms=5, color="black", mfc="none")
    tokens = sample["metrics"]["n_tokens"] / len(moments(sample))
    for moment, events in bursts(sample):
        axes.plot([moment], [height], ls="", marker="|", ms=min(6 + events, 16), mew=1.5, color=colour)
        if events * tokens >= 1.5:
            axes.annotate(f"{events * tokens:.0f}", (moment, height), (3, 3), textcoords="offset points", fontsize=6)


def plot_documented(axes: Axes) -> None:
    """The article's stream: what it prints as it is printed, and dots for what it only describes."""
    axes.plot([ROLE_MS], [0], ls="", marker="D", ms=5, color="grey", mfc="none")
    printed = [*PRINTED_MS, LAST_MS]
    axes.plot(printed, [0] * len(printed), ls="", marker="|", ms=9, mew=1.5, color="grey")
    described = between()
    axes.plot(described, [0] * len(described), ls="", marker=".", ms=3, color="grey")


def between() -> list[float]:
    """Where the article's tokens are that it prints no moment of, if they are evenly spaced."""
    left = DOCUMENTED_TOKENS - len(PRINTED_MS)
    gap = (LAST_MS - PRINTED_MS[-1]) / left
    return [PRINTED_MS[-1] + number * gap for number in range(1, left)]


def _four_against_one(
    read: Callable[[Sample, Sample], float], path: str = DIRECT
) -> Callable[[Sequence[Sample]], list[float]]:
    """What `read` says of the streams with four tokens and with one of each repeat."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        ones = {sample["cell"]["repeat"]: sample for sample in of(samples, path=path, per_event=ONE)}
        fours = of(samples, path=path, per_event=FOUR)
        return [read(four, ones[four["cell"]["repeat"]]) for four in fours if four["cell"]["repeat"] in ones]

    return measured


def _later(moment: Callable[[Sample], float]) -> Callable[[Sample, Sample], float]:
    return lambda four, one: (moment(four) - moment(one)) / median(itl_ms(one))


def _through(path: str, read: Callable[[Sample], float] = tokens_at_a_time) -> Callable[..., list[float]]:
    return lambda samples: [read(sample) for sample in of(samples, path=path, per_event=ONE)]


def _role_against_text(samples: Sequence[Sample]) -> list[float]:
    """The first event through the proxy that buffers over the first text without one, of each repeat."""
    direct = {sample["cell"]["repeat"]: ttft_ms(sample) for sample in of(samples, path=DIRECT, per_event=ONE)}
    found = of(samples, path=BUFFERING, per_event=ONE)
    return [first_event_ms(sample) / direct[sample["cell"]["repeat"]] for sample in found]


FIGURES = (
    Documented(
        "four tokens per event: the first text comes later, in tokens",
        "asked of the reader; 3 by counting",
        3.0,
        "tokens",
        TASK,
        BOARD,
        _four_against_one(_later(ttft_ms)),
        lambda values: 2.5 <= median(values) <= 3.5,
        "the first text waits for three more tokens: the difference over the gap between two tokens, within half a one",
        category="question",
    ),
    Documented(
        "four tokens per event: ttft_ms of the server's metrics",
        "asked of the reader; the same by definition",
        1.0,
        "",
        TASK,
        BOARD,
        _four_against_one(lambda four, one: four["metrics"]["ttft_ms"] / one["metrics"]["ttft_ms"]),
        lambda values: 0.9 <= median(values) <= 1.1,
        "ttft_ms is noted where the token is chosen, not where it is sent; four over one, within 10 %",
        category="question",
    ),
    Documented(
        "four tokens per event: the first event comes later, in tokens",
        "130.3 ms, before any token",
        0.0,
        "tokens",
        SOURCE,
        BOARD,
        _four_against_one(_later(first_event_ms)),
        lambda values: abs(median(values)) <= 0.5,
        "the role frame waits for no token, so it must come at the same time within half a one",
    ),
    Documented(
        "tokens at a time without a proxy",
        "one event per token",
        1.0,
        "tokens",
        SOURCE,
        BOARD,
        _through(DIRECT),
        lambda values: median(values) <= 1.1,
        "every write reaches the client at once, without a flush",
    ),
    Documented(
        "tokens at a time through nginx that buffers",
        "proxies may collect events",
        None,
        "tokens",
        f"{SOURCE} and {PROXY_TASK}",
        "no figure; nginx with its default buffering",
        _through(BUFFERING),
        lambda values: median(values) >= 2,
        "nginx as it is by default, but for the header, which it is told to ignore; at least two at a time. The table "
        "has what that depends on: with HTTP/1.1 behind it, the same nginx passes every event on",
    ),
    Documented(
        "first event through nginx that buffers over the first text without a proxy",
        "asked of the reader",
        None,
        "",
        f"{SOURCE} and {PROXY_TASK}",
        "no figure; nginx with its default buffering",
        _role_against_text,
        lambda values: median(values) > 1,
        "what a proxy takes away: without one, the role frame hides the wait; behind one, expected is that even the "
        "role frame comes after the first token would have",
        category="question",
    ),
    Documented(
        "tokens at a time through nginx with X-Accel-Buffering: no",
        "asked of the reader: what the header is for",
        1.0,
        "tokens",
        PROXY_TASK,
        "no figure; nginx with its default buffering, the header sent by this server",
        _through(OBEYING),
        lambda values: median(values) <= 1.1,
        "nothing is set in nginx; expected is that every token comes by itself again",
        category="question",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"pace": 20.0, "repeats": 1})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
