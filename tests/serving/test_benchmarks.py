"""Time of a frame, for `make bench`; else it runs once, as a test."""

from pytest_benchmark.fixture import BenchmarkFixture

from serving import sse

CHUNK = {
    "id": "chatcmpl-0",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "tiny-vl",
    "choices": [{"index": 0, "delta": {"content": "你好"}, "logprobs": None, "finish_reason": None}],
}


def test_frame(benchmark: BenchmarkFixture):
    assert b"\\u4f60" in benchmark(sse.event, CHUNK)
