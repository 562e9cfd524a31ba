"""Real servers on real ports: one around a scripted model, in this process, and the command around tiny-vl."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from serving.app import create_app
from serving.engine import Engine
from serving.job import Job
from serving.listener import Listener
from serving.settings import Settings

from .scripted_model import ScriptedModel

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds for what should happen at once: the machine may be busy with something else


@dataclass
class Server:
    """A running server around a scripted model."""

    url: str
    port: int
    engine: Engine
    model: ScriptedModel
    client: httpx.AsyncClient
    listener: Listener

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something holds, and stays so; fails if it does not."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.005)

    async def held(self) -> Job:
        """The running job, once the model has come to the unit of work at which it holds."""
        await self.holding()
        [job] = [job for job in self.engine._live if job.running]
        return job

    async def holding(self) -> None:
        """Waits until the model has come to the unit of work at which it holds."""
        await self.until(lambda: self.model.begun == self.model.hold_at and not self.model.gate.is_set())

    async def run_on(self, units: int) -> None:
        """Lets the model work until it holds again, so many units on."""
        self.model.hold_at = self.model.begun + units
        self.model.gate.set()
        await self.holding()

    async def submitted(self, count: int) -> None:
        """Waits until so many requests have been prepared and lie before the engine, which holds."""
        await self.until(lambda: self.engine._queue.qsize() == count)

    async def idle(self) -> None:
        """Waits until no request is left."""
        await self.until(lambda: self.engine.places == (0, 0))


def client_of(url: str, **options) -> httpx.AsyncClient:
    """A patient client of a server. It reads no certificates, which would take longer than most tests."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False, **options)


@asynccontextmanager
async def scripted_server(
    model: ScriptedModel | None = None, load=None, app_config=None, **settings
) -> AsyncIterator[Server]:
    """Serves a scripted model on a free port."""
    model = model or ScriptedModel()
    chosen = Settings(**{"model_id": "scripted", "min_free_mb": 0} | settings)
    engine = Engine(load or (lambda: model), chosen)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    app = create_app(engine, chosen)
    app.config.update(app_config or {})
    listener = Listener(app, bound, chosen, engine.metrics)
    await listener.start()
    url = f"http://127.0.0.1:{port}"
    async with client_of(url) as client:
        server = Server(url, port, engine, model, client, listener)
        try:
            await server.until(lambda: engine.state in ("ok", "error") or load is not None)
            yield server
        finally:
            model.gate.set()
            engine.stop()
            await listener.finish(0.2)
            await listener.close()


def scripted(answer: str, **options) -> AbstractAsyncContextManager[Server]:
    """A server whose model always answers the same."""
    return scripted_server(ScriptedModel(answer=lambda _: answer, **options))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with the default settings, whose model is as fast as it can be."""
    async with scripted_server() as running:
        yield running


@contextmanager
def tiny_server(*arguments: str) -> Iterator[str]:
    """The address of `python -m serving` with tiny-vl, as users run it; a signal ends it."""
    command = [sys.executable, "-m", "serving", "--model", "tiny-vl", "--port", "0", "--max-context", "512"]
    command += ["--min-free-mb", "0"]  # other tests may use much
    process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+:\d+", process.stdout.readline())[0]
        ready = process.stdout.readline()
        assert "is ready" in ready
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    """The address of such a server with the default settings."""
    with tiny_server() as url:
        yield url
