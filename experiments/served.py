"""The server that an experiment asks: one it starts itself, or any OpenAI-compatible one by its address."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments.http_client import fetch
from experiments.server_process import Server, running_server
from models.presets import PRESETS

KEY_VARIABLE = "KESTREL_EXPERIMENT_KEY"
PORTS = {"http": 80, "https": 443}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which model is served, or where a server already listens."""
    parser.add_argument(
        "--model", default="qwen3-vl-2b", help="a preset, whose weights are random, or a model or folder"
    )
    parser.add_argument(
        "--url",
        type=address,
        help=f"ask this server (http[s]://HOST:PORT) instead of starting one; a key is taken from ${KEY_VARIABLE}",
    )
    parser.add_argument(
        "--model-name", help="name in requests to the server of --url; by default the first of its GET /v1/models"
    )
    parser.add_argument(
        "--server-machine",
        help="what the server of --url runs on, such as RK3588: whether absolute figures can be judged goes by it",
    )


def address(url: str) -> str:
    """Scheme, host and port of a URL, as a URL."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise argparse.ArgumentTypeError(f"should look like http://127.0.0.1:8080, found {url!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or PORTS[parts.scheme]}"


def folder_of(url: str) -> str:
    """The name of the folder for results of a server."""
    parts = urlsplit(address(url))
    return f"{parts.hostname}_{parts.port}".replace(":", "-")


def server_at(url: str, model: str | None = None) -> Server:
    """The server of an address. Requests to it name `model`, or else the first model that it lists; a server that
    lists none is sent no name."""
    parts = urlsplit(address(url))
    key = os.environ.get(KEY_VARIABLE, "")
    server = Server(parts.hostname, parts.port, 0, tls=parts.scheme == "https", key=key)
    return replace(server, model=first_model(server) if model is None else model)


def first_model(server: Server) -> str:
    """The first model that a server lists, "" if it lists none."""
    status, told = asyncio.run(fetch(server, "GET", "/v1/models"))
    listed = told.get("data") if status == 200 else None
    return listed[0]["id"] if listed else ""


def named(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """A request's body as this server wants it: with a model's name, if one is known."""
    return body | ({"model": server.model} if server.model else {})


def subject(options: argparse.Namespace, quant: str) -> str:
    """What was asked, in a few words; of a server that ran already only its address is known."""
    return f"the server at {options.url}" if options.url else f"{options.model} {quant}"


@contextmanager
def asked_server(options: argparse.Namespace, quant: str | None, *arguments: str) -> Iterator[Server]:
    """The server of `options`; `quant` and further `arguments` are for one that is started here."""
    if options.url:
        yield server_at(options.url, options.model_name)
        return
    with started_server(options.model, quant, *arguments) as server:
        yield server


@contextmanager
def started_server(model: str, quant: str | None, *arguments: str) -> Iterator[Server]:
    """A server of a model or folder, or of a preset with random weights."""
    command = ["--model", model, *(["--quant", quant] if quant else []), *arguments]
    command += ["--weights", "random"] if model in PRESETS else []
    with (
        tempfile.TemporaryDirectory(prefix="experiment_") as folder,
        running_server(command, Path(folder) / "server.log") as server,
    ):
        yield server
