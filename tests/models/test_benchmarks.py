"""Times of a prompt, a decoded token, a choice and of text as tokens, for `make bench`; else each runs once, as a
test."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import models
from models import LoadedModel, SamplingParams
from models.kernels.ops import sample
from models.qwen_vocabulary import QWEN_VOCABULARY, qwen_tokenizer
from models.sampling import everything, start_sampling

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


CHOICES = {
    "greedy": SamplingParams(),
    "top_k_top_p": SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=0),
    "temperature": SamplingParams(temperature=0.7, seed=0),
}
choose = jax.jit(sample, donate_argnums=1)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("choice", CHOICES)
def test_sampling(benchmark: BenchmarkFixture, choice: str, rows: int):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((rows, QWEN_VOCABULARY), np.float32))
    begun = start_sampling([(CHOICES[choice], np.zeros(0, np.int32))] * rows, QWEN_VOCABULARY)
    slots, allowed = jax.device_put((np.arange(rows, dtype=np.int32), everything(rows, QWEN_VOCABULARY)))
    state = jax.tree.map(jnp.array, begun)

    def step() -> np.ndarray:
        nonlocal state
        sampled, state = choose(logits, state, slots, allowed)
        return np.asarray(sampled.token)

    first = step()
    tokens = benchmark(step)
    best = {"greedy": 1, "top_k_top_p": 40, "temperature": QWEN_VOCABULARY}[choice]
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[:, :best]
    for found in (first, tokens):
        assert all(token in allowed for token, allowed in zip(found, order, strict=True))


def test_text_to_tokens_and_back(benchmark: BenchmarkFixture):
    tokenizer, text = qwen_tokenizer(), "The quick brown fox jumps over the lazy dog. 敏捷的狐狸。" * 40
    assert benchmark(lambda: tokenizer.decode(tokenizer.encode_text(text))) == text
