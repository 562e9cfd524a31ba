"""Tokens per event and buffering: what is held back and let go, and what is read off streams that were made up."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from experiments import flush_ablation
from experiments.experiment import Sample
from experiments.flush_ablation import BUFFERING, DIRECT, FIGURES, FOUR, OBEYING, ONE, bursts, tokens_at_a_time
from experiments.http_client import CHAT, connected
from experiments.latency import stream, text_of, ttft_ms
from experiments.nginx import Route, find_nginx, nginx_version, running_nginx
from experiments.paced_server import HeldPieces, slowed
from experiments.server_process import Server
from models.text_stream import TextStream
from tests.serving.conftest import Server as ScriptedServer
from tests.serving.conftest import scripted_server
from tests.serving.scripted_model import ScriptedModel, byte_tokenizer

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4


def pieces_of(text: str, tokens: int, stop: Sequence[str] = ()) -> list[str]:
    pieces = HeldPieces(TextStream(byte_tokenizer(), stop), tokens)
    told = []
    for byte in text.encode():
        told.append(pieces.push(byte))
        if pieces.stopped:
            return told
    return [*told, pieces.finish()]


def test_text_comes_once_in_so_many_tokens_and_at_the_end():
    assert pieces_of("abcdef", 4) == ["", "", "", "abcd", "", "", "ef"]
    assert pieces_of("abc", 1) == ["a", "b", "c", ""]


def test_a_stop_string_ends_the_holding():
    assert pieces_of("abcdef", 4, ["c"]) == ["", "", "ab"]


def made_up(path: str, per_event: int, moments: Sequence[float], role: float = 5.0, repeat: int = 0) -> Sample:
    """A stream of 8 tokens with text at these moments, in milliseconds."""
    events = [(role, "role", ""), *((moment, "content", "text") for moment in moments), (500.0, "done", "")]
    return {
        "cell": {"path": path, "per_event": per_event, "repeat": repeat},
        "sent": 0,
        "events": [(moment * 1e6, kind, text) for moment, kind, text in events],
        "metrics": {"n_tokens": 8, "ttft_ms": 50.0},
        "pace_ms": 50.0,
        "nginx": "nginx/1",
    }


EVEN = [50.0 * number for number in range(1, 9)]
SAMPLES = [
    made_up(DIRECT, ONE, EVEN),
    made_up(DIRECT, FOUR, [200, 400]),
    made_up(BUFFERING, ONE, [401 + 0.1 * number for number in range(8)], role=401),
    made_up(OBEYING, ONE, EVEN),
]


def test_bursts_are_events_that_come_together():
    assert bursts(SAMPLES[2]) == [(401, 8)]
    assert bursts(made_up(DIRECT, ONE, [50, 51, 100, 111, 200])) == [(50, 2), (100, 2), (200, 1)]
    assert tokens_at_a_time(SAMPLES[1]) == 4


def test_every_figure_is_read_off_the_streams_that_it_is_about():
    found = [figure.found(SAMPLES) for figure in FIGURES]
    assert [row["measured"] for row in found] == pytest.approx([3, 1, 0, 1, 8, 401 / 50, 1])
    asked = [row["verdict"] for row in found if row["category"] == "question"]
    assert asked == ["answered"] * 4
    assert [row["verdict"] for row in found if row["category"] == "documented"] == ["holds"] * 3
    late = made_up(DIRECT, FOUR, [300, 500], role=90)
    assert FIGURES[0].found([SAMPLES[0], late])["verdict"] == "answered otherwise than expected"
    assert FIGURES[2].found([SAMPLES[0], late])["verdict"] == "does not hold"


def test_the_documented_stream_is_drawn_with_as_many_tokens_as_it_has():
    described = flush_ablation.between()
    assert len(flush_ablation.PRINTED_MS) + len(described) + 1 == flush_ablation.DOCUMENTED_TOKENS
    gaps = np.diff([flush_ablation.PRINTED_MS[-1], *described, flush_ablation.LAST_MS])
    assert min(gaps) == pytest.approx(max(gaps))
    assert 50 < gaps[0] < 60


def test_without_nginx_its_paths_are_left_out():
    options = Namespace(nginx=None, repeats=2)
    assert [cell["per_event"] for cell in flush_ablation.cells(options)] == [ONE, FOUR, FOUR, ONE]
    assert FIGURES[-1].found(SAMPLES[:2])["verdict"] == "not measured"


def test_table_and_plot_show_every_path():
    options = Namespace(model="tiny-vl", tokens=8, pace=50.0)
    rows = flush_ablation.table(SAMPLES, options).splitlines()
    assert f"| {DIRECT} | 4 | 1 | 5 (5..5) | 200 (200..200) | 50.0 (50.0..50.0) | 4.0 (4.0..4.0) |" in "\n".join(rows)
    assert len(rows) == 6 + len(SAMPLES)
    assert len(flush_ablation.plot(SAMPLES, options).axes[0].get_yticklabels()) == 1 + len(SAMPLES)


async def test_a_server_whose_text_is_held_back_says_the_same_in_fewer_events():
    async with scripted_server(slowed(ScriptedModel(), 0.0, FOUR), kestrel_events=True) as server:
        told = await stream(Server("127.0.0.1", server.port, 0), question())
    assert text_of(told) == TEXT
    assert len([kind for _, kind, _ in told["events"] if kind == "content"]) == len(TEXT) // FOUR
    assert told["metrics"]["ttft_ms"] < ttft_ms(told)


@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
async def test_nginx_passes_events_on_or_gathers_them():
    async with scripted_server() as server:
        upstream = Server("127.0.0.1", server.port, 0)
        routes = [Route(upstream, flush_ablation.DIRECTIVES[path]) for path in (OBEYING, BUFFERING)]
        with running_nginx(find_nginx(), routes) as (obeying, buffering):
            assert nginx_version(find_nginx()).startswith("nginx/")
            async with held_stream(server, obeying) as frames:
                told = [(await anext(frames))[1]["choices"][0]["delta"].get("content") for _ in range(4)]
                assert told == ["", "a", "b", "c"]
            async with held_stream(server, buffering) as frames:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await anext(frames)


@asynccontextmanager
async def held_stream(server: ScriptedServer, proxy: Server) -> AsyncIterator[AsyncIterator[tuple[float, dict]]]:
    """The frames of an answer through a proxy, of which the server has sent a few and no more."""
    server.model.hold_at = server.model.begun + 5
    async with connected(proxy) as connection:
        connection.send("POST", CHAT, json.dumps(question() | {"stream": True}).encode())
        await server.held()

        async def frames() -> AsyncIterator[tuple[float, dict]]:
            await connection.status()
            async for frame in connection.frames():
                yield frame

        yield frames()
        server.model.gate.set()
    await server.idle()


def question() -> dict:
    return {"messages": [{"role": "user", "content": TEXT}], "temperature": 0}
