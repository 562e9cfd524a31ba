"""How fast /health answers while the engine computes a prompt on all cores.

Claim: a probe is answered within 50 ms at the 99th percentile while a model of 2B size reads its prompts. Cost: three
minutes on 2 cores, 3 GiB of memory.

    python -m experiments.health_under_load

One client sends prompts one after the other; another asks /health, every time on a new connection, as probes do.
Writes results/health_under_load/.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench import ROOT
from experiments.environment import write_environment
from experiments.http_client import fetch
from experiments.server_process import Server, running_server
from models.presets import PRESETS

LIMIT_MS = 50.0
INTERVAL = 0.02  # seconds between two probes
Probe = dict[str, Any]


async def measure(server: Server, prompt_words: int, seconds: float) -> list[Probe]:
    """Every probe: when it was sent (seconds since the beginning), how many milliseconds its answer took, and whether
    the engine was busy."""
    begin = time.monotonic()
    probes: list[Probe] = []

    async def load() -> None:
        for number in itertools.count():  # which comes first, so that nothing of an earlier prompt can be reused
            body = {"prompt": f"{number}" + " one two three four" * (prompt_words // 4), "max_tokens": 1}
            status, told = await fetch(server, "POST", "/v1/completions", json.dumps(body).encode())
            if status != 200:
                raise RuntimeError(f"the prompt was refused: {told}")

    loading = asyncio.create_task(load())
    while time.monotonic() < begin + seconds and not loading.done():
        sent = time.monotonic()
        _, health = await fetch(server, "GET", "/health")
        took = 1e3 * (time.monotonic() - sent)
        probes.append({"s": round(sent - begin, 3), "ms": round(took, 3), "busy": health["busy"]})
        await asyncio.sleep(INTERVAL)
    if loading.done():
        loading.result()
    loading.cancel()
    return probes


def table(probes: Sequence[Probe]) -> str:
    """The times while the engine was busy, and while it was not."""
    lines = ["| engine | probes | p50, ms | p95, ms | p99, ms | longest, ms | p99 must be, ms | reached |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for busy, name in ((True, "computing a prompt"), (False, "between two prompts")):
        times = [probe["ms"] for probe in probes if probe["busy"] == busy]
        if not times:
            continue
        median, high, highest = np.percentile(times, (50, 95, 99))
        verdict = ("yes" if highest < LIMIT_MS else "no") if busy else ""
        must = f"< {LIMIT_MS:g}" if busy else ""
        found = " | ".join(f"{value:.1f}" for value in (median, high, highest, max(times)))
        lines.append(f"| {name} | {len(times)} | {found} | {must} | {verdict} |")
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `--quick` takes the small model, other defaults, and a new folder for the results."""
    made = argparse.ArgumentParser(prog="python -m experiments.health_under_load", description=__doc__.split("\n")[0])
    made.add_argument("--model", default="qwen3-vl-2b", help="a preset, whose weights are random, or a model")
    made.add_argument("--quant", default="q4")
    made.add_argument("--words", type=int, default=1000, help="words of a prompt, about as many tokens")
    made.add_argument("--seconds", type=float, default=120.0)
    made.add_argument("--quick", action="store_true", help="check in some seconds that everything works")
    made.add_argument("--out", type=Path, default=ROOT / "results" / "health_under_load")
    if "--quick" in arguments:
        made.set_defaults(
            model="tiny-vl", quant=None, words=200, seconds=2.0, out=Path(tempfile.mkdtemp(prefix="health_"))
        )
    return made.parse_args(arguments)


def main(arguments: Sequence[str]) -> list[Probe]:
    """Measures as the command line says, prints the table and writes the results."""
    options = parse(arguments)
    served = ["--model", options.model]
    served += ["--quant", options.quant] if options.quant else []
    served += ["--weights", "random"] if options.model in PRESETS else []
    with (
        tempfile.TemporaryDirectory(prefix="health_") as folder,
        running_server(served, Path(folder) / "server.log") as server,
    ):
        probes = asyncio.run(measure(server, options.words, options.seconds))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "raw.jsonl").write_text("".join(json.dumps(probe) + "\n" for probe in probes))
    command = shlex.join([".venv/bin/python", "-m", "experiments.health_under_load", *arguments])
    text = (
        f"`python -m serving {shlex.join(served)}`, prompts of {options.words} words one after the other, and a probe "
        f"{1e3 * INTERVAL:g} ms after the last, on a new connection; times from opening it to the whole answer.\n\n"
        f"{table(probes)}"
    )
    (options.out / "table.md").write_text(f"    {command}\n\n{text}")
    write_environment(options.out)
    print(text)
    return probes


if __name__ == "__main__":
    main(sys.argv[1:])
