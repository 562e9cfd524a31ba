"""Times of a prompt and of a decoded token, for `pytest -n 0 --benchmark-enable`; else each runs once, as a test."""

from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import models
from models import LoadedModel

PROMPT = 24  # tokens
STEPS = 30  # timed; all of them fit the smallest cache


@pytest.fixture(scope="module", params=["float32", "q4"])
def quant(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "float32" else request.param


@pytest.fixture(scope="module", params=["tiny-vl", "tiny-moe"])
def model(request: pytest.FixtureRequest, quant: str | None) -> LoadedModel:
    return models.load(request.param, quant=quant)


def answer(model: LoadedModel, tokens: int) -> Iterator[int]:
    """The greedy answer to a random prompt, token by token."""
    prompt = np.random.default_rng(0).integers(0, 1000, PROMPT)
    return (step.token_id for step in model.generate(prompt, max_tokens=tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[int]:
    """What one run makes of the prompt; it also compiles everything."""
    return list(answer(model, STEPS + 1))


def test_prefill(benchmark: BenchmarkFixture, model: LoadedModel, expected: list[int]):
    assert benchmark(lambda: next(answer(model, 1))) == expected[0]


def test_decode(benchmark: BenchmarkFixture, model: LoadedModel, expected: list[int]):
    running = answer(model, STEPS + 1)
    tokens = [next(running)]
    benchmark.pedantic(lambda: tokens.append(next(running)), rounds=STEPS)
    assert len(tokens) > 1
    assert tokens == expected[: len(tokens)]
