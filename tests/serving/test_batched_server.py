"""`--batch-max` over HTTP: 32 mixed requests that come at random times, some of whose neighbours leave, say byte for
byte what each says alone."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator

import httpx
import pytest

from experiments.server_process import running_server
from serving.generation_request import SEED_STEP
from tests.models.test_batch import QUESTIONS, picture

from .chat_client import COMPLETIONS, data_url, frames
from .conftest import client_of


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server with eight rows, on quantised weights."""
    limits = ["--min-free-mb", "0", "--max-context", "512", "--batch-max", "8", "--max-queued", "64"]
    arguments = ["--model", "tiny-vl", "--quant", "q4", *limits]
    with running_server(arguments, tmp_path_factory.mktemp("server") / "log") as server:
        yield f"http://{server.host}:{server.port}"


def shown(seed: int) -> dict:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}


def mixed_bodies(count: int) -> list[dict]:
    """Texts of several lengths, pictures, sampled and greedy, penalties, log-probabilities, stop strings, JSON."""
    draw, made = random.Random(7), []
    for index in range(count):
        content = [{"type": "text", "text": " ".join(draw.choices(QUESTIONS, k=draw.choice((1, 1, 2, 8))))}]
        if index % 4 == 0:
            content.insert(0, shown(index % 3))
        body = {
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "seed": index,
            "temperature": draw.choice((0, 0, 0.7, 1.2)),
            "top_p": draw.choice((1, 0.9)),
            "presence_penalty": draw.choice((0, 0.5)),
            "max_tokens": draw.choice((1, 5, 20)),
        }
        body |= draw.choice(({}, {"stop": ["7"]}, {"logprobs": True, "top_logprobs": 3}))
        made.append(body | ({"response_format": {"type": "json_object"}} if index % 7 == 3 else {}))
    return made


async def told(client: httpx.AsyncClient, body: dict) -> list:
    """All that a stream's objects say of the answer."""
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return [frame["choices"] for frame in frames(answer.text)]


async def leave(client: httpx.AsyncClient, body: dict, events: int) -> None:
    """Asks, and goes after some lines."""
    async with client.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.aiter_lines()
        for _ in range(events):
            await anext(lines, None)


async def test_32_mixed_requests_say_what_each_says_alone(url):
    bodies, moments = mixed_bodies(32), random.Random(3)
    async with client_of(url, limits=httpx.Limits(max_connections=64)) as client:
        alone = [await told(client, body) for body in bodies]

        async def later(body: dict) -> list:
            await asyncio.sleep(moments.uniform(0, 0.5))
            return await told(client, body)

        async def gone(body: dict) -> None:
            await asyncio.sleep(moments.uniform(0, 0.5))
            await leave(client, body, moments.randrange(8))

        leaving = [gone(body | {"max_tokens": 200}) for body in moments.sample(bodies, 8)]
        together = await asyncio.gather(*map(later, bodies), *leaving)
        assert together[: len(bodies)] == alone
        assert len({str(choices) for choices in alone}) > 20
        for _ in range(2000):
            health = (await client.get("/health")).json()
            if health["active"] == health["queued"] == 0:
                break
            await asyncio.sleep(0.05)
        assert (health["active"], health["queued"], health["busy"]) == (0, 0, False)


async def whole(client: httpx.AsyncClient, request: dict) -> list[dict]:
    """The choices of a whole answer, with all that is told of their tokens."""
    answer = await client.post(COMPLETIONS, json=request | {"logprobs": True, "top_logprobs": 3})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


async def test_choices_say_what_each_says_alone(url):
    """They share the prompt that the first of them computes, and each has the seed that follows from its number."""
    question = {"messages": [{"role": "user", "content": QUESTIONS[0] * 4}], "temperature": 2, "max_tokens": 20}
    seeds = [(7 + index * SEED_STEP + 2**63) % 2**64 - 2**63 for index in range(8)]
    async with client_of(url) as client:
        alone = [await whole(client, question | {"seed": seed}) for seed in seeds]
        together = await whole(client, question | {"seed": 7, "n": 8})
    assert together == [choice | {"index": index} for index, [choice] in enumerate(alone)]
    assert len({choice["message"]["content"] for choice in together}) > 4
