"""The server that an experiment asks: one it starts itself, or any OpenAI-compatible one by its address."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from experiments.server_process import Server, running_server
from models.presets import PRESETS


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which model is served, or where a server already listens."""
    parser.add_argument(
        "--model", default="qwen3-vl-2b", help="a preset, whose weights are random, or a model or folder"
    )
    parser.add_argument("--url", type=address, help="ask this server (http://HOST:PORT) instead of starting one")


def address(url: str) -> str:
    """The host and port of a URL, as "host:port"."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise argparse.ArgumentTypeError(f"should look like http://127.0.0.1:8080, found {url!r}")
    return f"{parts.hostname}:{parts.port or 80}"


@contextmanager
def asked_server(options: argparse.Namespace, quant: str | None, *arguments: str) -> Iterator[Server]:
    """The server of `options`; `quant` and further `arguments` are for one that is started here."""
    if options.url:
        host, port = options.url.rsplit(":", 1)
        yield Server(host, int(port), 0)
        return
    command = ["--model", options.model, *(["--quant", quant] if quant else []), *arguments]
    command += ["--weights", "random"] if options.model in PRESETS else []
    with (
        tempfile.TemporaryDirectory(prefix="experiment_") as folder,
        running_server(command, Path(folder) / "server.log") as server,
    ):
        yield server
