"""Runs the server: `python -m serving --model tiny-vl`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import models
from models.disk_cache import open_folder
from models.freed_memory import keep_freed_memory
from serving import request_log
from serving.access import is_loopback
from serving.app import create_app
from serving.engine import Engine
from serving.listener import Listener
from serving.settings import Settings, parse_settings

log = logging.getLogger("kestrel.command")
CLOSING_SECONDS = 3.0  # for the last frames to reach their clients
WRITING_SECONDS = 15.0  # for what is kept on disk


def check(settings: Settings) -> None:
    """Finds what is wrong with the settings before anything else is done; raises KestrelError or OSError."""
    models.check(settings.model, **_model_arguments(settings))
    if settings.disk_kv is not None:
        open_folder(Path(settings.disk_kv))


def _model_arguments(settings: Settings) -> dict[str, Any]:
    return {
        "quant": settings.quant,
        "weights": settings.weights,
        "kv": settings.kv,
        "max_context": settings.max_context,
        "max_image_tokens": settings.max_image_tokens,
    }


def load(settings: Settings) -> models.LoadedModel:
    """Loads and compiles the model; runs on the engine thread."""
    model = models.load(
        settings.model, dtype=settings.dtype, mapped=not settings.copy_weights, **_model_arguments(settings)
    )
    model.warm_up(settings.batch_limits(model.bytes_per_slot))
    return model


def listening_socket(settings: Settings) -> socket.socket:
    """A socket that takes connections from now on, before loading, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=settings.backlog)
    except OSError as error:
        # Python adds the address to the system's words.
        place, reason = f"port {settings.port} of {settings.host}", str(error.strerror).partition(" (while")[0]
        raise OSError(f"cannot listen on {place}: {reason}; --port and --host choose another") from None


async def run(settings: Settings, bound: socket.socket) -> int:
    """Serves until it is asked to stop, by a signal or over HTTP, and drains; a signal after that stops at once. The
    exit status is 1 if the model could not be loaded or the engine has failed."""
    engine = Engine(lambda: load(settings), settings)
    hurried = asyncio.Event()

    def on_signal() -> None:
        (hurried if engine.asked_to_stop.is_set() else engine.asked_to_stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    listener = Listener(create_app(engine, settings), bound, settings, engine.metrics)
    await listener.start()
    await _first(engine.asked_to_stop.wait(), _announce(engine, settings))
    active, queued = engine.places
    if active or queued:
        print(f"finishing {active} running and {queued} waiting requests; a second signal stops at once", flush=True)
    end = time.monotonic() + settings.drain_timeout
    await _first(engine.drain(settings.drain_timeout), hurried.wait())
    engine.stop()
    await _first(listener.finish(max(CLOSING_SECONDS, end - time.monotonic())), hurried.wait())
    await listener.close()
    await _first(engine.written(), hurried.wait(), asyncio.sleep(WRITING_SECONDS))
    return 1 if engine.state == "error" else 0


async def _announce(engine: Engine, settings: Settings) -> None:
    """Says when requests are taken; returns only if the model could not be loaded."""
    start = time.monotonic()
    await engine.loaded.wait()
    if engine.state != "error":
        print(f"{settings.model_id} is ready after {time.monotonic() - start:.1f} s", flush=True)
        await asyncio.Event().wait()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of them is done, and drops the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await asyncio.gather(*done)


def main() -> int:
    """Runs the command; 2 is the exit status of a setting that the user can put right."""
    settings = parse_settings()
    keep_freed_memory()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    request_log.write_to_stderr()
    try:
        check(settings)
        bound = listening_socket(settings)
    except (models.KestrelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host, port = bound.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    if not settings.api_keys and not is_loopback(host):
        log.warning("without an API key, everybody who can reach %s:%d may use this server", address, port)
    print(f"listening on http://{address}:{port}; loading {settings.model}", flush=True)
    return asyncio.run(run(settings, bound))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine thread may be inside XLA, which cannot be interrupted; Python's own way to end crashes under it.
    os._exit(status)
