"""What /metrics says, read with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from .chat_client import COMPLETIONS, ask, body
from .conftest import PATIENCE, Server, scripted_server
from .scripted_model import ScriptedModel
from .test_engine import Crash, start

TIMES = ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")


class Samples(dict):
    """Values by name without the prefix, and by the labels other than the model's name."""

    def value(self, name: str, **labels: str) -> float:
        return self[name, frozenset(labels.items())]


async def read(server: Server) -> Samples:
    """The metrics as they are now."""
    response = await server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = Samples()
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "scripted"
            samples[sample.name.removeprefix("kestrel:"), frozenset(labels.items())] = sample.value
    return samples


async def test_a_request_is_counted(server):
    await ask(server, "hello", max_tokens=3)
    response = await server.client.post(COMPLETIONS, json=body("hello"))
    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    samples = await read(server)
    assert samples.value("prompt_tokens_total") == 2 * prompt_tokens
    assert samples.value("generation_tokens_total") == 3 + 6
    assert samples.value("request_success_total", finished_reason="length") == 1
    assert samples.value("request_success_total", finished_reason="stop") == 1
    assert samples.value("time_to_first_token_seconds_count") == 2
    assert samples.value("inter_token_latency_seconds_count") == 2 + 5
    assert [samples.value(f"{name}_seconds_count") for name in TIMES] == [2] * 4
    assert samples.value("request_inference_time_seconds_count") == 2
    assert samples.value("request_time_per_output_token_seconds_count") == 2


async def test_names_and_buckets_are_those_of_vllms_dashboards(server):
    """Histograms by their bounds in seconds, as vLLM has them in its engine's metrics."""
    found: dict[str, list[float]] = {}
    for name, labels in await read(server):
        if name.endswith("_bucket"):
            found.setdefault(name, []).append(float(dict(labels)["le"]))
    first_token = "0.001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    token = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
    request = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    wanted = {
        "time_to_first_token_seconds": first_token,
        "inter_token_latency_seconds": token,
        "request_time_per_output_token_seconds": token,
        "request_inference_time_seconds": request,
        **{f"{name}_seconds": request for name in TIMES},
    }
    for name, bounds in wanted.items():
        assert sorted(found.pop(f"{name}_bucket")) == [*map(float, bounds.split()), float("inf")], name
    assert list(found) == ["event_loop_lag_seconds_bucket"], "vLLM has none of these"


async def test_what_only_grows_is_a_counter(server):
    """Rates are taken of counters, whose names end in `_total`."""
    families = {}
    for family in text_string_to_metric_families((await server.client.get("/metrics")).text):
        families[family.name.removeprefix("kestrel:")] = family.type
    assert [families[name] for name in ("mm_cache_queries", "mm_cache_hits", "prefix_cache_hits")] == ["counter"] * 3
    assert [families[name] for name in ("cache_slots_kept_tokens", "num_requests_running")] == ["gauge"] * 2


async def test_times_add_up(server):
    """As vLLM defines them: the parts of a request are its whole, and the first token comes after queue and prefill."""
    first, second = await start(server, "one"), asyncio.create_task(ask(server, "two"))
    await server.submitted(1)  # so that it waits for all that the first one takes
    server.model.pace = 0.01
    server.model.gate.set()
    await asyncio.gather(first, second)
    samples = await read(server)
    queue, prefill, decode, total = (samples.value(f"{name}_seconds_sum") for name in TIMES)
    assert abs(queue + prefill + decode - total) < 1e-6
    assert abs(prefill + decode - samples.value("request_inference_time_seconds_sum")) < 1e-6
    assert abs(decode / 3 - samples.value("request_time_per_output_token_seconds_sum")) < 1e-6
    assert abs(queue + prefill - samples.value("time_to_first_token_seconds_sum")) < 1e-6
    assert abs(decode - samples.value("inter_token_latency_seconds_sum")) < 1e-6
    assert prefill >= 2 * 2 * server.model.pace
    assert decode >= 2 * 3 * server.model.pace
    assert queue >= 5 * server.model.pace


async def test_running_and_waiting_requests_are_told_from_what_lives(server):
    running = await start(server, "first")
    waiting = [asyncio.create_task(ask(server, "second")) for _ in range(2)]
    await server.until(lambda: server.engine.queued == 2)
    samples = await read(server)
    assert (samples.value("num_requests_running"), samples.value("num_requests_waiting")) == (1, 2)
    for task in waiting:
        task.cancel()
    await server.until(lambda: server.engine.queued == 0)
    assert (await read(server)).value("num_requests_waiting") == 0
    server.model.gate.set()
    await running
    assert (await read(server)).value("num_requests_running") == 0


async def test_the_lag_of_the_event_loop_is_measured(server):
    before = (await read(server)).value("event_loop_lag_seconds_sum")
    time.sleep(0.3)  # which holds up the server's event loop too
    async with asyncio.timeout(PATIENCE):
        while (await read(server)).value("event_loop_lag_seconds_sum") < before + 0.28:
            await asyncio.sleep(0.01)


async def test_the_engines_end_is_seen(server):
    assert (await read(server)).value("engine_state", state="ok") == 1
    server.model.faults = {1: Crash("the disk is gone")}
    await ask(server, "first")
    await server.until(lambda: server.engine.state == "error")
    await server.idle()
    samples = await read(server)
    assert samples.value("engine_state", state="error") == 1
    assert samples.value("engine_state", state="ok") == 0
    assert samples.value("num_requests_running") == samples.value("num_requests_waiting") == 0


async def test_servers_of_one_process_count_apart(server):
    async with scripted_server(ScriptedModel()) as other:
        await ask(other, "hello")
        assert (await read(server)).value("generation_tokens_total") == 0
        assert (await read(other)).value("generation_tokens_total") == 6


async def test_what_clients_send_makes_no_series(server):
    before = set(await read(server))
    for text in ("a", "b"):
        await ask(server, text, user=text)
        await server.client.post(COMPLETIONS, json=body(text, model=text))
        await server.client.get(f"/{text}")
    assert set(await read(server)) == before
