"""Runs the server: `python -m serving --model tiny-vl`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time

from hypercorn.asyncio import serve
from hypercorn.config import Config

import models
from models.model import find_folder
from serving.app import create_app
from serving.engine import Engine
from serving.settings import Settings, parse_settings

KEEP_ALIVE_SECONDS = 75  # longer than the idle time of common client pools
CLOSING_SECONDS = 3.0


def load(settings: Settings) -> models.LoadedModel:
    """Loads and compiles the model; runs on the engine thread."""
    start = time.monotonic()
    model = models.load(
        settings.model,
        dtype=settings.dtype,
        weights=settings.weights,
        max_context=settings.max_context,
        max_image_tokens=settings.max_image_tokens,
    )
    model.warm_up()
    print(f"{settings.model_id} is ready after {time.monotonic() - start:.1f} s", flush=True)
    return model


def listening_socket(settings: Settings) -> socket.socket:
    """A bound socket, opened before loading, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    return listener


async def run(settings: Settings, listener: socket.socket) -> int:
    """Serves until a signal. The first one drains, the second stops at once; 1 if the engine has failed."""
    engine = Engine(lambda: load(settings), settings.max_queued)
    app = create_app(engine, settings)
    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.graceful_timeout = CLOSING_SECONDS
    config.accesslog = None
    asked, closing = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            closing.set()
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    server = asyncio.create_task(serve(app, config, shutdown_trigger=closing.wait))
    waiting = asyncio.create_task(asked.wait())
    await asyncio.wait({server, waiting}, return_when=asyncio.FIRST_COMPLETED)
    await _close(engine, settings, server, closing)
    return 1 if engine.state == "error" else 0


async def _close(engine: Engine, settings: Settings, server: asyncio.Task[None], closing: asyncio.Event) -> None:
    """Drains, then closes. From Python 3.12 on a server waits for every connection; its end is not waited for long."""
    drain = asyncio.create_task(engine.drain(settings.drain_timeout))
    at_once = asyncio.create_task(closing.wait())
    await asyncio.wait({drain, at_once, server}, return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        drain.cancel()
        engine.stop()
    await asyncio.sleep(0.1)  # lets the streams write their last frames
    closing.set()
    await asyncio.wait({server}, timeout=CLOSING_SECONDS + 2)
    server.cancel()
    await asyncio.gather(server, drain, at_once, return_exceptions=True)


def main() -> int:
    """Runs the command; 2 is the exit status of a setting that the user can put right."""
    settings = parse_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("hypercorn").setLevel(logging.WARNING)
    try:
        find_folder(settings.model)
        listener = listening_socket(settings)
    except (models.KestrelError, OSError, OverflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    print(f"listening on http://{address}:{port}; loading {settings.model}", flush=True)
    return asyncio.run(run(settings, listener))


if __name__ == "__main__":
    sys.exit(main())
