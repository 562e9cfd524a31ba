"""Soak: a crowd of well and badly behaved clients, for ten minutes, and what the server makes of it.

Claim: nothing is lost and nothing is mixed up, whoever leaves, errs or stalls beside; memory stays where it is; and the
server adds less than a millisecond to a token. Cost: twelve minutes on 2 otherwise idle cores.

    python -m experiments.soak

Runs `python -m serving` with the small model in a process of its own and writes results/soak/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from experiments.bench import ROOT, command_line
from experiments.http_client import CHAT, fetch
from experiments.server_process import Server, running_server
from experiments.soak_clients import LIMIT_SECONDS, MAX_CONTEXT, Record, Soak, server_arguments
from experiments.soak_overhead import measure_overhead
from experiments.soak_report import Found, Memory, write
from experiments.tiny_tasks import user
from models.model import find_folder
from models.tokenizer import Tokenizer

SAMPLE_SECONDS = 1.0
SETTLING_SECONDS = 15.0
ORDINARY_TOKEN = 300  # an id of text, with as many behind it as there are slots


async def soak(server: Server, options: argparse.Namespace) -> tuple[list[Record], Memory, dict, dict, dict]:
    """The crowd, and the server's memory meanwhile."""
    process = psutil.Process(server.pid)
    records: list[Record] = []
    memory = Memory([], [])

    async def watch() -> None:
        while True:
            memory.seconds.append(round(time.monotonic() - begin, 2))
            memory.resident.append(process.memory_info().rss)
            await asyncio.sleep(min(SAMPLE_SECONDS, options.minutes * 60 / 40))

    control = Tokenizer.from_folder(find_folder(options.model)).control_ids
    await fetch(server, "POST", CHAT, json.dumps({"messages": [user("hello")]}).encode())  # what is opened once is open
    await _fill_cache(server)
    before, begin = _held(process), time.monotonic()
    with tqdm(unit="request") as bar:

        def ended(record: Record) -> None:
            records.append(record)
            bar.update()

        watching = asyncio.create_task(watch())
        await Soak(server, options.seed, control, ended).run(options.clients, options.minutes * 60)
        watching.cancel()
    after, counters = await _settled(server, process, before)
    return records, memory, before, after, counters


async def _fill_cache(server: Server) -> None:
    """Fills every slot of the cache with a prompt that no other has a token in common with, because its memory counts
    only from the time when it is first written."""
    _, health = await fetch(server, "GET", "/health")
    for slot in range(health["slots"]["total"]):
        body = {"prompt": [ORDINARY_TOKEN + slot] * (MAX_CONTEXT - 1), "max_tokens": 1}
        code, told = await fetch(server, "POST", "/v1/completions", json.dumps(body).encode())
        if code != 200:
            raise RuntimeError(f"a prompt that fills slot {slot} got status {code}: {told}")


def _held(process: psutil.Process) -> dict[str, int]:
    return {"files": process.num_fds(), "threads": process.num_threads()}


async def _settled(
    server: Server, process: psutil.Process, before: dict[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """What the server holds, and its counters, once the last connections are closed or time is up."""
    deadline = time.monotonic() + SETTLING_SECONDS
    while True:
        _, status = await fetch(server, "GET", "/admin/status")
        counters, after = status["counters"], _held(process)
        idle = counters["active"] == counters["queued"] == 0 and after["files"] <= before["files"]
        if idle or time.monotonic() > deadline:
            return after, counters
        await asyncio.sleep(0.2)


def read_log(log: Path) -> list[dict[str, Any]]:
    """The lines of the server's log that tell of a request."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def note(options: argparse.Namespace) -> str:
    """How to read the table."""
    return (
        f"{options.clients} clients for {options.minutes:g} minutes, seed {options.seed}, on `{options.model}`. Each "
        "asks for its own code words, streamed or whole, or shows a picture, or leaves at a random moment (in the "
        "head, in the body, queued, computing, in mid-stream; by closing, a reset or a half close), sends garbage, or "
        f"stalls (head, body, not reading). The server's limits for slow clients are {LIMIT_SECONDS} s; its context is "
        f"{MAX_CONTEXT} tokens, and every slot of its cache is filled before its memory is watched, because that "
        "counts only once a sequence has come so far. The overhead per token is measured after that, by one client on "
        "an idle server: the gap between two frames as the client sees it, less the time that the model took for the "
        "step of the same token.\n"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `--quick` takes other defaults, and a new folder for the results."""
    made = argparse.ArgumentParser(prog="python -m experiments.soak", description=__doc__.split("\n")[0])
    made.add_argument("--model", default="tiny-vl", help="one that sees and repeats: tiny-vl")
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--clients", type=int, default=24)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--repeats", type=int, default=20, help="answers to each text, for the overhead per token")
    made.add_argument("--quick", action="store_true", help="check in about half a minute that everything works")
    made.add_argument("--out", type=Path, default=ROOT / "results" / "soak")
    if "--quick" in arguments:
        made.set_defaults(minutes=1 / 3, clients=12, repeats=1, out=Path(tempfile.mkdtemp(prefix="soak_")))
    return made.parse_args(arguments)


def main(arguments: Sequence[str]) -> Found:
    """Measures as the command line says, prints the table and writes the results."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        log = Path(folder) / "server.log"
        with running_server(["--model", options.model, *server_arguments()], log) as server:
            measured = asyncio.run(soak(server, options))
        overhead = measure_overhead(options.model, options.repeats, Path(folder))
        found = Found(*measured, read_log(log), overhead)
    command = command_line("soak", arguments)
    print(write(found, options.out, f"    {command}\n\n{note(options)}"))
    for record in found.records:
        if record.outcome == "lost":
            print(f"lost: {record.kind} at {record.start} s: {record.note}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
