"""A server in a process of its own, as users run it, for experiments that are its clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from experiments.bench import ROOT

STOPPING_SECONDS = 60


@dataclass(frozen=True)
class Server:
    """Where a server listens, and its process. One that was not started here may want TLS, a model's name in requests
    and a key with them; "" for none."""

    host: str
    port: int
    pid: int
    tls: bool = False
    model: str = ""
    key: str = field(default="", repr=False)


@contextmanager
def running_server(
    arguments: Sequence[str], log: Path, *, module: str = "serving", settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """Starts `python -m serving` (or another module) on a free port, waits until it takes requests, and drains it in
    the end. Its messages go to `log`; `settings` are added to its environment.

    Raises:
        RuntimeError: the server did not start, or did not end in order.
    """
    command = [sys.executable, "-m", module, "--port", "0", *arguments]
    environment = os.environ | settings
    with log.open("w") as messages:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment
        )
    try:
        found = re.search(r"listening on http://(\S+):(\d+);", process.stdout.readline())
        if found is None or "is ready" not in process.stdout.readline():
            raise RuntimeError(f"the server did not start; its messages are in {log}")
        yield Server(found[1], int(found[2]), process.pid)
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOPPING_SECONDS)
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}; its messages are in {log}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
