"""Sampling inside jit, against plain definitions in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import ConfigError
from models.kernels.ops import sample
from models.sampling import SamplingParams, everything, seated, start_sampling

VOCAB = 50
choose, seat = jax.jit(sample), jax.jit(seated)  # shapes that come up again are compiled once


def draw(logits: np.ndarray, *params: SamplingParams, prompts=None, allowed=None, steps: int = 1):
    """`steps` draws per row from unchanging logits `[batch, vocab]`; tokens `[steps, batch]` and the last `Sampled`.
    `allowed` has the tokens of each row's constraint, None where there is none."""
    prompts = prompts or [np.zeros(0, np.int64)] * len(params)
    constraints = everything(len(params), logits.shape[1])
    for row, tokens in enumerate(allowed or []):
        if tokens is not None:
            bits = np.zeros((1, 32 * constraints.shape[1]), bool)
            bits[0, tokens] = True
            constraints[row] = np.packbits(bits, bitorder="little").view(np.uint32)
    state = start_sampling(list(zip(params, prompts, strict=True)), logits.shape[1])
    slots = jnp.arange(len(params), dtype=jnp.int32)
    tokens = []
    for _ in range(steps):
        sampled, state = choose(jnp.asarray(logits, jnp.float32), state, slots, constraints)
        tokens.append(np.asarray(sampled.token))
    return np.array(tokens), sampled


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, VOCAB)) * 2


def support(logits, draws=400, **params) -> set[int]:
    """The tokens that come up."""
    rows = [SamplingParams(temperature=1.0, seed=seed, **params) for seed in range(draws)]
    tokens, _ = draw(np.repeat(logits, draws, axis=0), *rows)
    return set(tokens[0].tolist())


def test_greedy_takes_the_first_largest():
    tokens, sampled = draw(np.array([[0.0, 3.0, 1.0, 3.0]]), SamplingParams())
    assert tokens.tolist() == [[1]]
    assert float(sampled.margin[0]) == 0.0


def test_logprob_margin_and_top_describe_the_models_own_distribution(logits):
    params = SamplingParams(temperature=1.3, logit_bias={7: 100.0}, top_logprobs=5)
    tokens, sampled = draw(logits, params)
    assert tokens.tolist() == [[7]]
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    best = np.argsort(-logits[0])
    assert float(sampled.logprob[0]) == pytest.approx(expected[7], abs=1e-5)
    assert float(sampled.margin[0]) == pytest.approx(logits[0][best[0]] - logits[0][best[1]], abs=1e-5)
    assert sampled.top_tokens[0, :5].tolist() == best[:5].tolist()
    np.testing.assert_allclose(sampled.top_logprobs[0, :5], expected[best[:5]], atol=1e-5)


def test_draws_follow_the_distribution(logits):
    rows = [SamplingParams(temperature=0.8, seed=seed) for seed in range(4000)]
    tokens, _ = draw(np.repeat(logits, 4000, axis=0), *rows)
    weights = np.exp(logits[0] / 0.8)
    frequency = np.bincount(tokens[0], minlength=VOCAB) / 4000
    np.testing.assert_allclose(frequency, weights / weights.sum(), atol=0.03)


def test_top_k_keeps_the_best(logits):
    assert support(logits, top_k=3) == set(np.argsort(-logits[0])[:3].tolist())
    assert support(np.zeros((1, VOCAB)), top_k=2) == {0, 1}, "ties go to the lower id"


def test_top_p_keeps_the_smallest_set_that_holds_the_share(logits):
    best = np.argsort(-logits[0])
    shares = np.exp(logits[0][best]) / np.exp(logits[0]).sum()
    count = int(np.searchsorted(np.cumsum(shares), 0.6)) + 1
    assert support(logits, top_p=0.6) == set(best[:count].tolist())
    assert support(logits, top_p=1e-6) == {int(best[0])}


def test_top_p_counts_shares_of_what_top_k_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    assert support(logits, top_k=2, top_p=0.5) == {0}
    assert support(logits, top_k=2, top_p=0.6) == {0, 1}


def test_min_p_is_relative_to_the_best():
    logits = np.log(np.array([[0.5, 0.3, 0.12, 0.08]]))
    assert support(logits, min_p=0.2) == {0, 1, 2}


def test_presence_and_frequency_count_the_answer_only():
    logits = np.array([[1.0, 0.7, 0.0]])
    prompt = [np.array([0, 0, 0])]
    tokens, _ = draw(logits, SamplingParams(presence_penalty=0.5), prompts=prompt, steps=4)
    assert tokens[:, 0].tolist() == [0, 1, 0, 0]
    tokens, _ = draw(logits, SamplingParams(frequency_penalty=0.2), prompts=prompt, steps=6)
    assert tokens[:, 0].tolist() == [0, 0, 1, 0, 1, 0]


def test_repetition_penalty_counts_the_prompt_and_divides_or_multiplies_by_sign():
    params = SamplingParams(repetition_penalty=2.0)
    assert draw(np.array([[1.0, 0.6, 0.0]]), params, prompts=[np.array([0])])[0].tolist() == [[1]]
    assert draw(np.array([[-1.0, -1.5, -9.0]]), params, prompts=[np.array([0])])[0].tolist() == [[1]]


def test_same_seed_same_draws_whatever_the_neighbours(logits):
    mine = SamplingParams(temperature=1.0, top_p=0.9, seed=-5)
    alone, _ = draw(logits, mine, steps=20)
    others = [SamplingParams(temperature=2.0, seed=seed) for seed in range(3)]
    together, _ = draw(np.repeat(logits, 4, axis=0), others[0], mine, *others[1:], steps=20)
    assert together[:, 1].tolist() == alone[:, 0].tolist()
    assert len(set(alone[:, 0].tolist())) > 3


MIXED = [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=7)] * 2


def test_a_constraint_leaves_its_tokens_to_choose_from_and_other_rows_alone(logits):
    """Greedy and drawn, with and without constraint in one batch; token 49 is in the last, unfilled word."""
    mine = [1, 33, 49]
    rows = np.repeat(logits, 4, axis=0)
    tokens, sampled = draw(rows, *MIXED, allowed=[mine, mine, None, None], steps=40)
    free, unconstrained = draw(rows, *MIXED, steps=40)
    assert set(tokens[:, 0].tolist()) == {mine[int(np.argmax(logits[0, mine]))]}
    assert len(set(tokens[:, 1].tolist())) > 1
    assert set(tokens[:, 1].tolist()) <= set(mine)
    assert tokens[:, 2:].tolist() == free[:, 2:].tolist()
    own = logits[0] - np.log(np.exp(logits[0]).sum())
    np.testing.assert_allclose(sampled.logprob, own[tokens[-1]], atol=1e-5)
    assert sampled.margin.tolist() == unconstrained.margin.tolist(), "they tell of the model's own distribution"


def test_what_a_constraint_leaves_is_drawn_in_proportion(logits):
    mine = [3, 32, 40]
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3000)]
    tokens, _ = draw(np.repeat(logits, 3000, axis=0), *rows, allowed=[mine] * 3000)
    shares = np.exp(logits[0, mine])
    frequency = np.bincount(tokens[0], minlength=VOCAB)[mine] / 3000
    np.testing.assert_allclose(frequency, shares / shares.sum(), atol=0.03)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 2.0, "top_k": 5, "top_p": 0.1, "min_p": 1.0}, {"logit_bias": {9: -100.0, 8: 100.0}}],
)
def test_the_only_token_that_is_allowed_is_taken_however_unlikely(params):
    logits = np.zeros((1, VOCAB))
    logits[0, 9] = -1e30
    assert draw(logits, SamplingParams(seed=1, **params), allowed=[[9]])[0].tolist() == [[9]]


def test_without_a_seed_draws_differ(logits):
    first, second = (draw(logits, SamplingParams(temperature=1.0), steps=30)[0].tolist() for _ in range(2))
    assert first != second


def test_seeds_beyond_32_bits_are_told_apart(logits):
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, -1, 2**63 - 1)]
    tokens, _ = draw(np.repeat(logits, 4, axis=0), *rows, steps=30)
    assert len({tuple(column) for column in tokens.T.tolist()}) == 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be > 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_k": "a"}, "top_k must be a whole number, found 'a'"),
        ({"top_logprobs": 2.5}, "top_logprobs must be a whole number"),
        ({"temperature": None}, "temperature must be a number, found None"),
        ({"min_p": True}, "min_p must be a number, found True"),
    ],
)
def test_values_out_of_range_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"token 50; the vocabulary has ids 0\.\.49"):
        start_sampling([(SamplingParams(logit_bias={50: 1.0}), np.zeros(1, np.int64))], VOCAB)


def test_rows_take_the_parameters_of_their_slots_and_empty_rows_change_none():
    random = np.random.default_rng(3)
    logits = jnp.asarray(random.standard_normal((3, VOCAB)), jnp.float32)
    own = [SamplingParams(), SamplingParams(temperature=1.5, seed=4), SamplingParams(presence_penalty=2, seed=5)]
    nothing = np.zeros(0, np.int64)
    state = start_sampling([(SamplingParams(), nothing)] * 5, VOCAB)
    for slot, params in zip((4, 0, 2), own, strict=True):
        row = start_sampling([(params, nothing)], VOCAB)
        state = seat(state, row, jnp.int32(slot))
    slots = jnp.asarray([4, 0, 2, -1], jnp.int32)
    for _ in range(6):
        sampled, state = choose(logits[jnp.asarray([0, 1, 2, 0])], state, slots, everything(4, VOCAB))
    alone, last = draw(np.asarray(logits), *own, steps=6)
    assert sampled.token[:3].tolist() == alone[-1].tolist()
    np.testing.assert_array_equal(sampled.logprob[:3], last.logprob)
    assert state.step.tolist() == [6, 0, 6, 0, 6]
    assert state.counts.sum(axis=1).tolist() == [6, 0, 6, 0, 6]


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_a_row_is_sampled_in_a_batch_as_alone_to_the_last_bit(vocab):
    random = np.random.default_rng(vocab)
    logits = (random.standard_normal((32, vocab)) * 3).astype(np.float32)
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.3)[row % 3],
            top_p=(1.0, 0.9)[row % 2],
            top_k=(0, 40)[row // 2 % 2],
            seed=row,
            top_logprobs=3,
        )
        for row in range(32)
    ]
    alone = [draw(logits[row : row + 1], params[row])[1] for row in range(0, 32, 5)]
    for size in (3, 32):
        _, together = draw(logits[:size], *params[:size])
        for row, own in zip(range(0, size, 5), alone, strict=False):
            for one, shared in zip(jax.tree.leaves(own), jax.tree.leaves(together), strict=True):
                np.testing.assert_array_equal(one[0], shared[row])


def test_tiny_values_do_what_small_ones_do():
    """In float32 a division by 1e-38 overflows, and 1e-46 is nothing."""
    logits = np.array([[1.0, 90.0, 2.0, 3.0]])
    bounded = [draw(logits, SamplingParams(temperature=value, seed=3), steps=4)[0] for value in (1e-4, 1e-38, 1e-46)]
    assert all((tokens == 1).all() for tokens in bounded)
    drawn = SamplingParams(temperature=1.0, top_p=1e-46, seed=3)
    assert draw(logits, drawn, steps=4)[0].tolist() == [[1]] * 4
    for penalty in (1e-6, 1e-46):
        repeated = SamplingParams(repetition_penalty=penalty)
        assert draw(-logits, repeated, prompts=[np.array([1])])[0].tolist() == [[1]]


def test_top_k_of_more_than_any_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="top_k must be in"):
        SamplingParams(top_k=2**31)
