"""A crowd at the door: what listen's backlog decides, and what a waiting room with and without a limit costs.

Claims: while nobody accepts, as many connections are made at once as the backlog says, and the others try again after a
second; none is refused, but with a backlog of 1 some seem to be made and wait for many seconds. A room for 16 turns the
rest away at once; one without a limit keeps them all, and with them memory and the next client's time. Documented as
questions. Cost: five minutes on 2 cores.

    python -m experiments.backlog

First, many clients connect at the same moment, to a server that accepts and to one that is stopped (SIGSTOP) for half a
second, as a loop is that is busy with something else. Then clients ask for long answers and read nothing but the head,
while the engine is busy; one more client asks after them, and asks again as often as it is told to. For Linux. Writes
results/backlog/.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench import spread
from experiments.experiment import COLOURS, Cell, Documented, Experiment, Measure, Sample, of
from experiments.health_rtt import send_prompt
from experiments.http_client import CHAT, BrokenError, connected, fetch
from experiments.latency import kind_of, stream
from experiments.server_process import Server, running_server
from models.model import find_folder
from models.tokenizer import Tokenizer

BACKLOGS = (1, 32, 100)
LISTEN = 32  # documented
ACCEPTS, STOPPED = "accepts", "stopped for 0.5 s"
STOPPED_SECONDS = 0.5  # less than the second after which Linux sends the first packet of a connection again
PATIENCE = 10.0  # seconds until a client gives up
ROOM, UNLIMITED = 16, 0  # --max-queued; the former is the documented default, and this server's
BUSY_TOKENS = 1200  # of the answer that keeps the engine busy while the crowd comes
WARM_WORDS = 1500  # of a prompt that has the cache written once, so that it does not count as memory of the crowd
ALTERNATIVES = 20  # told with every token: they make a frame of some 3 kB
WATCH_SECONDS = 0.05
MEGABYTE = 1e6
SOURCE = "article 20-1, section 4, task A3"
ROOM_SOURCE = "article 20-1, section 4, task B3"
BOARD = "listen(fd, 32), bounded queue of connections, 8 workers; no figure is given"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and the crowds."""
    parser.add_argument("--model", default="tiny-vl", help="a small trained model or folder")
    parser.add_argument("--connects", type=int, default=200, help="clients that connect at the same moment")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 40, 80], help="that ask and do not read")
    parser.add_argument("--tokens", type=int, default=80, help="of each of their answers")
    parser.add_argument("--repeats", type=int, default=2)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Both parts in turn, and within them backlogs and rooms."""
    return [
        cell | {"repeat": repeat}
        for repeat in range(options.repeats)
        for cell in (
            *({"backlog": backlog, "loop": loop} for loop in (ACCEPTS, STOPPED) for backlog in BACKLOGS),
            *({"room": room, "clients": clients} for clients in options.clients for room in (ROOM, UNLIMITED)),
        )
    ]


@contextmanager
def session(options: argparse.Namespace) -> Iterator[Measure]:
    """A server for each backlog; every crowd gets one of its own, whose memory nothing has used before."""
    control = Tokenizer.from_folder(find_folder(options.model)).control_ids
    endless = {"temperature": 0, "logit_bias": {str(token): -100 for token in control}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="experiment_")))
        logs = (folder / f"server_{number}.log" for number in itertools.count())

        def serving(*arguments: Any) -> AbstractContextManager[Server]:
            return running_server(["--model", options.model, *map(str, arguments)], next(logs))

        servers = {backlog: stack.enter_context(serving("--backlog", backlog)) for backlog in BACKLOGS}

        def measure(cell: Cell) -> list[Sample]:
            if "backlog" in cell:
                return asyncio.run(burst(servers[cell["backlog"]], cell["loop"], options.connects))
            limits = ("--max-queued", cell["room"], "--max-connections", 0, "--stall-timeout", 0)
            with serving(*limits, "--min-free-mb", 0, "--prefix-cache-mb", 0) as server:
                return [asyncio.run(crowd(server, cell["clients"], options.tokens, endless))]

        yield measure


# Clients that connect at the same moment


async def burst(server: Server, loop: str, count: int) -> list[Sample]:
    """What becomes of so many clients."""
    if loop == ACCEPTS:
        return await connect_all(server, count, PATIENCE)
    with stopped(server):
        clients = asyncio.create_task(connect_all(server, count, PATIENCE))
        await asyncio.sleep(STOPPED_SECONDS)
    return await clients


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The server's process does nothing meanwhile."""
    process = psutil.Process(server.pid)
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        process.resume()


async def connect_all(server: Server, count: int, patience: float) -> list[Sample]:
    """So many clients that ask for /health, and give up after `patience` seconds."""
    begun = time.monotonic_ns()
    return await asyncio.gather(*(connect(server, begun, patience) for _ in range(count)))


async def connect(server: Server, begun: int, patience: float) -> Sample:
    """One client: nanoseconds from `begun` until its connection was made and until it was answered, None for what never
    came, and what became of it."""
    moments: dict[str, int | None] = {"opened_ns": None, "answered_ns": None}
    outcome = "answered"
    try:
        async with asyncio.timeout(patience), connected(server) as connection:
            moments["opened_ns"] = time.monotonic_ns() - begun
            connection.send("GET", "/health")
            _, headers = await connection.status()
            await connection.object(headers)
            moments["answered_ns"] = time.monotonic_ns() - begun
    except TimeoutError:
        outcome = "gave up"
    except ConnectionRefusedError:
        outcome = "refused"
    except (OSError, BrokenError):
        outcome = "cut off"
    return moments | {"outcome": outcome}


# Clients that ask and do not read


async def crowd(server: Server, clients: int, tokens: int, endless: dict[str, Any]) -> Sample:
    """What so many clients are told and when, how long one more waits for the first text of its answer and how often it
    asks, and the memory of the server before them and meanwhile: nanoseconds, bytes of the process, bytes of all
    sockets."""
    await send_prompt(server, "", WARM_WORDS)
    message = [{"role": "user", "content": "Repeat: river stone"}]
    question = {"messages": message, "max_tokens": tokens, "stream": True, "logprobs": True} | endless
    body = json.dumps(question | {"top_logprobs": ALTERNATIVES}).encode()
    async with (
        busy(server, {"messages": message, "max_tokens": BUSY_TOKENS} | endless),
        watched(server) as memory,
        AsyncExitStack() as stack,
    ):
        begun = time.monotonic_ns()
        told = await asyncio.gather(*(ask(stack, server, body, begun) for _ in range(clients)))
        waited_ns, tries = await ask_politely(server, {"messages": message, "max_tokens": 8, "temperature": 0})
        await asyncio.sleep(2 * WATCH_SECONDS)
    return {"told": told, "waited_ns": waited_ns, "tries": tries, "memory": memory}


@asynccontextmanager
async def busy(server: Server, body: dict[str, Any]) -> AsyncIterator[None]:
    """The engine is at work on a long answer, whose client reads it."""
    answer = asyncio.create_task(stream(server, body))
    try:
        while not (await fetch(server, "GET", "/health"))[1]["busy"]:
            await asyncio.sleep(WATCH_SECONDS / 5)
            if answer.done():
                raise RuntimeError(f"the answer that is to keep the engine busy is over: {answer.result()}")
        yield
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


@asynccontextmanager
async def watched(server: Server) -> AsyncIterator[list[tuple[int, int, int]]]:
    """The memory from now on: moments in nanoseconds, bytes of the process and of sockets."""
    process, memory = psutil.Process(server.pid), []

    def note() -> None:
        memory.append((time.monotonic_ns(), process.memory_info().rss, socket_bytes()))

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            note()

    note()
    watching = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        watching.cancel()


def socket_bytes() -> int:
    """What the kernel holds for all TCP sockets of the machine; 0 where it does not tell."""
    file = Path("/proc/net/sockstat")
    rows = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    pages = next((int(row[row.index("mem") + 1]) for row in rows if row[0] == "TCP:"), 0)
    return pages * os.sysconf("SC_PAGE_SIZE")


async def ask(stack: AsyncExitStack, server: Server, body: bytes, begun: int) -> tuple[int, int]:
    """Asks, and reads the status and no further; the connection stays. Nanoseconds from `begun`, and the status."""
    connection = await stack.enter_async_context(connected(server, stuck=True))
    connection.send("POST", CHAT, body)
    status, _ = await connection.status()
    return time.monotonic_ns() - begun, status


async def ask_politely(server: Server, body: dict[str, Any]) -> tuple[int, int]:
    """Asks until it is let in, as often as it is told to. Nanoseconds until the first text, and how often it asked.

    Raises:
        RuntimeError: it was refused for another reason, or the answer was empty.
    """
    begun, encoded = time.monotonic_ns(), json.dumps(body | {"stream": True}).encode()
    for tries in itertools.count(1):
        async with connected(server) as connection:
            connection.send("POST", CHAT, encoded)
            status, headers = await connection.status()
            if status == 200:
                async for arrived, frame in connection.frames():
                    if kind_of(frame)[0] == "content":
                        return round(1e9 * arrived) - begun, tries
            if status != 429:
                raise RuntimeError(f"no text, status {status}")
        await asyncio.sleep(float(headers["retry-after"]))
    raise AssertionError


# What is read off that


def at_once(samples: Sequence[Sample]) -> int:
    """Connections that were made before the server went on."""
    return sum((sample["opened_ns"] or float("inf")) < 1e9 * STOPPED_SECONDS for sample in samples)


def of_each(samples: Sequence[Sample], read: Callable[[list[Sample]], float], **cell: Any) -> list[float]:
    """What `read` says of the clients of each burst with these values, in the order of repeats."""
    found = of(samples, **cell)
    repeats = sorted({sample["cell"]["repeat"] for sample in found})
    return [float(read(of(found, repeat=repeat))) for repeat in repeats]


def with_status(sample: Sample, status: int) -> int:
    """How many of a crowd were told this."""
    return sum(found == status for _, found in sample["told"])


def grown_mb(sample: Sample, place: int) -> float:
    """By how many MB the process (1), or what the kernel holds for sockets (2), grew at most."""
    return (max(row[place] for row in sample["memory"]) - sample["memory"][0][place]) / MEGABYTE


def all_grown_mb(sample: Sample) -> float:
    """By how many MB process and sockets grew at most."""
    return grown_mb(sample, 1) + grown_mb(sample, 2)


def waited_s(sample: Sample) -> float:
    """Seconds that the client after the crowd waited for its first text."""
    return sample["waited_ns"] / 1e9


def table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    """A row per backlog and state of the server; then one per room and crowd."""
    lines = [
        f"{options.connects} clients that connect to {options.model} at the same moment and ask for /health; medians "
        f"of {options.repeats} repeats (lowest..highest). Later: after a second or more, because the first packet was "
        "dropped and sent again. No time contains compiling, since a server has done all of it before it says that it "
        "is ready; nothing is warmed up for the first table, whose servers see one burst after the other.",
        "",
        "| server | backlog | connected at once | later | refused, cut off or gave up | last connection, s |",
        "|" + "---|" * 6,
    ]
    for loop, backlog in itertools.product((ACCEPTS, STOPPED), BACKLOGS):
        counts = [of_each(samples, read, loop=loop, backlog=backlog) for read in (at_once, later, failed)]
        last = of_each(samples, last_s, loop=loop, backlog=backlog)
        row = [loop, str(backlog), *(spread(count, 0) for count in counts), spread(last, 2)]
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        f"Clients that ask for {options.tokens} tokens with {ALTERNATIVES} alternatives each and read nothing but the "
        "head, while the engine is busy; then one more, which asks again where it is told to. Memory is what process "
        f"and sockets grow by until that one has its first text. Every crowd has a server of its own, warmed up by a "
        f"prompt of {WARM_WORDS:,} words, so that the cache is written before memory is read.",
        "",
        "| room | clients | let in | turned away | last told, s | process, MB | sockets, MB "
        "| next client's first text, s | it asked |",
        "|" + "---|" * 9,
    ]
    for clients, room in itertools.product(options.clients, (ROOM, UNLIMITED)):
        found = of(samples, clients=clients, room=room)
        row = [str(room or "unlimited"), str(clients)]
        row += [spread([with_status(sample, status) for sample in found], 0) for status in (200, 429)]
        row += [spread([max(moment for moment, _ in sample["told"]) / 1e9 for sample in found], 2)]
        row += [spread([grown_mb(sample, place) for sample in found]) for place in (1, 2)]
        row += [spread([waited_s(sample) for sample in found], 1), spread([sample["tries"] for sample in found], 0)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def failed(samples: Sequence[Sample]) -> int:
    """Clients without an answer."""
    return sum(sample["outcome"] != "answered" for sample in samples)


def later(samples: Sequence[Sample]) -> int:
    """Connections that were made, but not at once."""
    return sum(sample["opened_ns"] is not None for sample in samples) - at_once(samples)


def last_s(samples: Sequence[Sample]) -> float:
    """Seconds until the last of the connections that were made."""
    return max((sample["opened_ns"] or 0) for sample in samples) / 1e9


def plot(samples: Sequence[Sample], options: argparse.Namespace) -> Figure:
    """Connections over time for each backlog; memory and waiting by the size of the crowd for each room."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    for axis, loop in zip(axes[0], (STOPPED, ACCEPTS), strict=True):
        plot_connections(axis, samples, loop)
        axis.set(title=f"{options.connects} connect at once to a server that {WHICH[loop]}", xlim=(1e-3, 10))
    plot_crowds(axes[1][0], samples, options, all_grown_mb, "memory of process and sockets (MB)")
    plot_crowds(axes[1][1], samples, options, waited_s, "next client's first text (s)")
    return figure


WHICH = {STOPPED: "is stopped for 0.5 s", ACCEPTS: "accepts"}


def plot_connections(axes: Axes, samples: Sequence[Sample], loop: str) -> None:
    """Connections over time, a curve for each backlog; those that lie on each other are told by width and dashes."""
    for number, backlog in enumerate(BACKLOGS):
        found = of(samples, backlog=backlog, loop=loop, repeat=0)
        made = sorted(sample["opened_ns"] / 1e9 for sample in found if sample["opened_ns"] is not None)
        look = {"color": COLOURS[number], "marker": "os^"[number], "ms": 5 - number, "lw": (3.5, 2.2, 1.0)[number]}
        look["markevery"] = (5 * number, max(1, len(made) // 8))
        style = ("-", "--", "-")[number]
        axes.step(made, range(1, len(made) + 1), style, where="post", label=f"backlog {backlog}", **look)
    axes.axhline(LISTEN, color="grey", ls="--", lw=1, label=f"documented: listen(fd, {LISTEN})")
    if loop == STOPPED:
        axes.axvline(STOPPED_SECONDS, color="black", ls="-.", lw=0.8, label="the server goes on")
    axes.set(xscale="log", xlabel="seconds", ylabel="connections made")
    axes.legend(fontsize=7, loc="upper left")


def plot_crowds(
    axes: Axes, samples: Sequence[Sample], options: argparse.Namespace, read: Callable[[Sample], float], title: str
) -> None:
    """One value by the size of the crowd, for both rooms."""
    for number, room in enumerate((ROOM, UNLIMITED)):
        points = [(size, read(sample)) for size in options.clients for sample in of(samples, clients=size, room=room)]
        middles = [median([value for size, value in points if size == clients]) for clients in options.clients]
        marker = "os"[number]
        axes.plot(*zip(*points, strict=True), ls="", marker=marker, color=COLOURS[number], mfc="none")
        label = f"room for {room or 'all'}"
        axes.plot(options.clients, middles, ("-", "--")[number], marker=marker, color=COLOURS[number], label=label)
    axes.axvline(ROOM, color="grey", ls="--", lw=1, label=f"documented room: {ROOM}")
    axes.set(xlabel="clients that do not read", ylabel=title, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=7)


def _beyond_listen(samples: Sequence[Sample]) -> list[float]:
    return [
        count - backlog for backlog in BACKLOGS for count in of_each(samples, at_once, backlog=backlog, loop=STOPPED)
    ]


def _one_against_listen(samples: Sequence[Sample]) -> list[float]:
    one, many = (of_each(samples, later, backlog=backlog, loop=STOPPED) for backlog in (1, LISTEN))
    return [few - more for few, more in zip(one, many, strict=True)]


def _unlimited_over_room(read: Callable[[Sample], float]) -> Callable[[Sequence[Sample]], list[float]]:
    """Without a limit over with one, for the largest crowd of each repeat in which there is something to divide by."""

    def measured(samples: Sequence[Sample]) -> list[float]:
        largest = max((sample["cell"].get("clients", 0) for sample in samples), default=0)
        limited, free = (of(samples, clients=largest, room=room) for room in (ROOM, UNLIMITED))
        return [read(one) / read(other) for one, other in zip(free, limited, strict=True) if read(other) > 0]

    return measured


def _let_in(samples: Sequence[Sample]) -> list[float]:
    return [float(with_status(sample, 200)) for sample in of(samples, room=ROOM)]


def _turned_away(samples: Sequence[Sample]) -> list[float]:
    return [float(with_status(sample, 429)) for sample in of(samples, room=UNLIMITED)]


def _most_failed(samples: Sequence[Sample]) -> list[float]:
    """Over all ways to accept, all backlogs and all repeats."""
    ways = itertools.product((ACCEPTS, STOPPED), BACKLOGS)
    counts = [count for loop, backlog in ways for count in of_each(samples, failed, loop=loop, backlog=backlog)]
    return [max(counts)] if counts else []


FIGURES = (
    Documented(
        "connections made at once while nobody accepts, beyond listen's number",
        "the length of the queue",
        None,
        "connections",
        "article 20-1, section 1",
        "listen(fd, 32)",
        _beyond_listen,
        lambda values: min(values) >= 0 and max(values) <= 1,
        f"backlogs of {', '.join(map(str, BACKLOGS))}; Linux takes one more than it is told",
    ),
    Documented(
        "clients that have to try again with listen(fd, 1), more than with listen(fd, 32)",
        "asked of the reader; 31 by counting",
        31.0,
        "clients",
        SOURCE,
        BOARD,
        _one_against_listen,
        lambda values: all(30 <= value <= 32 for value in values),
        "all at once to a server that does not accept for half a second; the two clients that the article proposes "
        "would see no difference, because both have room",
        category="question",
    ),
    Documented(
        "most clients of a burst that get no answer",
        "asked of the reader",
        0.0,
        "clients",
        SOURCE,
        BOARD,
        _most_failed,
        lambda values: max(values) == 0,
        f"a full backlog should make clients wait, not fail: none refused, cut off or unanswered in {PATIENCE:g} s. In "
        "the table only a backlog of 1 leaves some unanswered, whether its server accepts or is stopped: where the "
        "queue fills again during handshakes, Linux drops their last packet. The client believes that it is connected, "
        "and what it sends is dropped too, and sent again after ever longer times",
        category="question",
    ),
    Documented(
        "requests let in with a room for 16 while one is computed",
        "16; more are refused with 429",
        16.0,
        "requests",
        "docs of the original: --max-queued 16",
        "default of the server",
        _let_in,
        lambda values: set(values) == {16.0},
        "crowds of at least 16 that come while the engine is busy",
    ),
    Documented(
        "requests turned away without a limit",
        "0 = unlimited",
        0.0,
        "requests",
        "docs of the original: --max-queued 0",
        "not the default",
        _turned_away,
        lambda values: max(values) == 0,
        "every client of every crowd is let in",
    ),
    Documented(
        "memory of a crowd without a limit, over that with a room for 16",
        "asked of the reader",
        None,
        "times",
        ROOM_SOURCE,
        BOARD,
        _unlimited_over_room(all_grown_mb),
        lambda values: median(values) > 2,
        "growth of process and sockets with the largest crowd, whose clients do not read; expected is more than twice",
        category="question",
    ),
    Documented(
        "waiting of the next client without a limit, over that with a room for 16",
        "asked of the reader",
        None,
        "times",
        ROOM_SOURCE,
        BOARD,
        _unlimited_over_room(waited_s),
        lambda values: median(values) > 2,
        "until its first text, with the largest crowd before it, asking again where it is told to; expected is more "
        "than twice",
        category="question",
    ),
)

EXPERIMENT = Experiment.of_module(sys.modules[__name__], {"connects": 60, "clients": [48], "tokens": 60, "repeats": 1})

if __name__ == "__main__":
    EXPERIMENT.run(sys.argv[1:])
