"""What is read off a stream, on one whose times are known; and a stream of a real server."""

import asyncio

import pytest

from experiments import latency
from experiments.server_process import Server
from tests.serving.conftest import scripted_server
from tests.serving.scripted_model import ScriptedModel

MS = 1_000_000
SAMPLE = {
    "sent": 5 * MS,
    "events": [
        (15 * MS, "role", ""),
        (105 * MS, "content", "a"),
        (155 * MS, "content", "b"),
        (225 * MS, "content", "c"),
        (226 * MS, "finish", ""),
        (227 * MS, "metrics", ""),
        (228 * MS, "tokens", ""),
        (230 * MS, "done", ""),
    ],
    "metrics": None,
}


def test_each_name_means_what_it_says():
    assert latency.first_event_ms(SAMPLE) == 10
    assert latency.ttft_ms(SAMPLE) == 100
    assert latency.itl_ms(SAMPLE) == [50, 70]
    assert latency.tpot_ms(SAMPLE, tokens=5) == 30  # two of the tokens brought no text of their own
    assert latency.total_ms(SAMPLE) == 225
    assert latency.closing_ms(SAMPLE) == 3
    assert latency.closing_ms(SAMPLE | {"events": SAMPLE["events"][:5]}) is None
    assert latency.text_of(SAMPLE) == "abc"


def chunk(delta: dict, finish: str | None = None) -> dict:
    return {"object": "chat.completion.chunk", "choices": [{"delta": delta, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (chunk({"role": "assistant", "content": ""}), ("role", "")),
        (chunk({"role": "assistant", "content": "a"}), ("content", "a")),
        (chunk({"content": "a"}, "stop"), ("content", "a")),
        (chunk({}, "stop"), ("finish", "")),
        (chunk({"reasoning_content": "a"}), ("other", "")),
        ({"object": "chat.completion.chunk", "choices": []}, ("usage", "")),
        ({"object": "chat.completion.metrics", "metrics": {}}, ("metrics", "")),
        ({"object": "chat.completion.tokens", "tokens": []}, ("tokens", "")),
    ],
)
def test_the_kinds_of_events(frame, kind):
    assert latency.kind_of(frame) == kind


def test_an_error_frame_is_an_error():
    with pytest.raises(RuntimeError, match="out of luck"):
        latency.kind_of({"error": {"message": "out of luck"}})


async def test_a_stream_is_kept_event_by_event():
    body = {"messages": [{"role": "user", "content": "ab"}]}
    async with scripted_server(ScriptedModel(answer=lambda messages: "ab"), kestrel_events=True) as server:
        found = await latency.stream(Server("127.0.0.1", server.port, 0), body)
    kinds = [kind for _, kind, _ in found["events"]]
    assert kinds == ["role", "content", "content", "finish", "metrics", "tokens", "done"]
    times = [found["sent"], *(moment for moment, _, _ in found["events"])]
    assert times == sorted(times)
    assert latency.text_of(found) == "ab"
    assert found["metrics"]["n_tokens"] == 3


async def test_a_refused_request_is_an_error():
    async with scripted_server() as server:
        with pytest.raises(RuntimeError, match="refused: 400"):
            await latency.stream(Server("127.0.0.1", server.port, 0), {"messages": []})


async def test_without_an_event_loop():
    body = {"messages": [{"role": "user", "content": "ab"}]}
    async with scripted_server() as server:
        found = await asyncio.to_thread(latency.streamed, Server("127.0.0.1", server.port, 0), body)
    assert latency.text_of(found).endswith("ab")
