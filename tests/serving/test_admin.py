"""/admin/status and /admin/shutdown, and who may ask for them."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import tomllib

import pytest

from models.kernels.loader import active_variant
from serving import access
from serving.access import is_loopback

from .chat_client import COMPLETIONS, ask, body, frames, text_of
from .conftest import PATIENCE, ROOT, Server, client_of, scripted_server
from .scripted_model import ScriptedModel
from .test_command import process
from .test_engine import Crash
from .test_http import assert_refused

KEY = {"X-Api-Key": "sk-secret"}
PAGE = "https://lab.example"


async def status(server: Server, **options) -> dict:
    response = await server.client.get("/admin/status", **options)
    assert response.status_code == 200
    return response.json()


async def test_status_tells_what_the_server_is_and_does(server):
    prompt_tokens = (await server.client.post(COMPLETIONS, json=body("hello"))).json()["usage"]["prompt_tokens"]
    await server.client.post(COMPLETIONS, json={})
    await server.until(lambda: server.engine.counts()["refused"] == 1)
    told = await status(server)
    assert (told["status"], told["problem"], told["model"]) == ("ok", None, "scripted")
    assert told["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert told["kernels"] == (active_variant() or "reference")
    assert told["counters"] == {
        "active": 0,
        "queued": 0,
        "admitted": 1,
        "completed": 1,
        "refused": 1,
        "failed": 0,
        "left": 0,
        "prompt_tokens": prompt_tokens,
        "generation_tokens": 6,
    }
    assert told["memory"]["resident_mb"] > 10
    assert told["memory"]["available_mb"] > 0
    assert told["settings"]["max_queued"] == 16
    assert (told["settings"]["kv"], told["settings"]["max_context"]) == ("float32", 4096)  # as the model chose
    assert told["settings"]["api_keys"] == 0
    assert (await status(server))["uptime_s"] >= told["uptime_s"] >= 0


async def test_status_of_a_server_that_loads_and_of_one_that_has_failed():
    go, model = threading.Event(), ScriptedModel(faults={1: Crash("the disk is gone")})
    async with scripted_server(model, load=lambda: go.wait(PATIENCE) and model) as server:
        told = await status(server)
        assert (told["status"], told["problem"], told["kernels"]) == ("loading", None, None)
        go.set()
        await server.until(lambda: server.engine.state == "ok")
        await ask(server, "hello")
        await server.until(lambda: server.engine.state == "error")
        told = await status(server)
        assert (told["status"], told["problem"]) == ("error", "Crash: the disk is gone")


async def test_the_key_is_needed_and_hidden():
    async with scripted_server(api_keys=("sk-secret",)) as server:
        assert_refused(await server.client.get("/admin/status"), 401)
        assert_refused(await server.client.post("/admin/shutdown"), 401)
        assert not server.engine.asked_to_stop.is_set()
        told = await status(server, headers=KEY)
        assert told["settings"]["api_keys"] == 1
        assert "sk-secret" not in json.dumps(told)
        from_a_page = await server.client.post("/admin/shutdown", headers=KEY | {"Origin": PAGE})
        assert from_a_page.status_code == 202
        assert server.engine.asked_to_stop.is_set()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": PAGE},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
    ],
)
async def test_without_a_key_pages_and_proxies_are_refused(server, headers):
    for method, path in (("GET", "/admin/status"), ("POST", "/admin/shutdown")):
        response = await server.client.request(method, path, headers=headers)
        assert assert_refused(response, 403)["code"] == "forbidden"
    assert not server.engine.asked_to_stop.is_set()


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.168.0.5", False),
        ("::ffff:192.168.0.5", False),
        ("2001:db8::1", False),
        ("<local>", False),
        ("", False),
    ],
)
def test_addresses_of_this_machine(address, allowed):
    assert is_loopback(address) == allowed


async def test_without_a_key_only_this_machine_may(server, monkeypatch):
    """Whatever a client says of its own address."""
    addresses = []
    monkeypatch.setattr(access, "is_loopback", lambda address: addresses.append(address))
    for headers in ({}, {"Remote-Addr": "8.8.8.8"}):
        assert_refused(await server.client.post("/admin/shutdown", headers=headers), 403)
    assert addresses == ["127.0.0.1"] * 2
    assert not server.engine.asked_to_stop.is_set()


async def test_an_allowed_page_may_too():
    async with scripted_server(allowed_origins=(PAGE,)) as server:
        response = await server.client.post("/admin/shutdown", headers={"Origin": PAGE})
        assert (response.status_code, response.json()) == (202, {"status": "draining", "active": 0, "queued": 0})


async def test_wrong_methods_and_paths(server):
    assert_refused(await server.client.get("/admin/shutdown"), 405)
    assert_refused(await server.client.get("/admin"), 404)
    assert_refused(await server.client.get("/admin/nothing"), 404)
    assert not server.engine.asked_to_stop.is_set()


async def test_shutdown_drains_and_ends_the_process():
    """A stream runs to its end, new requests are refused, and the exit status is 0; asking twice changes nothing."""
    with process(held=True) as (server, address):
        async with client_of(address) as client:
            async with client.stream("POST", COMPLETIONS, json=body("x" * 50, stream=True)) as response:
                pieces = response.aiter_text()
                stream = await anext(pieces)  # comes before the engine has taken the request up
                while not (await client.get("/health")).json()["busy"]:
                    await asyncio.sleep(0.01)
                asked = await client.post("/admin/shutdown")
                assert (asked.status_code, asked.json()) == (202, {"status": "draining", "active": 1, "queued": 0})
                assert (await client.post("/admin/shutdown")).status_code == 202
                while (await client.get("/health")).json()["status"] == "ok":
                    await asyncio.sleep(0.01)
                assert_refused(await client.post(COMPLETIONS, json=body("late")), 503)
                server.send_signal(signal.SIGUSR1)
                stream += "".join([piece async for piece in pieces])
            assert text_of(frames(stream)) == "x" * 50
        assert await asyncio.to_thread(server.wait, PATIENCE) == 0


async def test_a_signal_after_shutdown_stops_at_once():
    with process("--drain-timeout", "600", pace=0.02) as (server, address):
        async with client_of(address) as client:
            async with client.stream("POST", COMPLETIONS, json=body("x" * 3000, stream=True)) as response:
                pieces = response.aiter_text()
                stream = await anext(pieces)
                await client.post("/admin/shutdown")
                server.terminate()
                stream += "".join([piece async for piece in pieces])
            assert text_of(frames(stream)).endswith("[the server is shutting down]")
        assert await asyncio.to_thread(server.wait, PATIENCE) == 0
