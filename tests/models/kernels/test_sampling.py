"""The compiled choice of tokens against plain JAX, in every variant."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import ops, reference_sampling
from models.sampling import MOST_TOP_K, SamplingParams, everything, start_sampling
from tests.models.kernels.results import expected_from, in_numpy

sample = in_numpy(ops.sample)
expected_sample = expected_from(reference_sampling.sample)
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {3: 1.5, 0: -2.0}, "repetition_penalty": 1.7},
    {"temperature": 1.0},
    {"temperature": 3.0, "top_p": 0.5},
    {"top_p": 0.4},
    {"top_p": 0.999},
    {"top_k": 3},
    {"top_k": 9, "top_p": 0.7, "top_logprobs": 3},
    {"top_k": 12, "frequency_penalty": 0.4},
    {"top_k": 40, "min_p": 0.01, "top_p": 0.95},
    {"top_k": 700},
    {"min_p": 0.05},
    {"min_p": 0.001, "presence_penalty": 0.5},
    {"min_p": 0.3, "top_p": 0.6},
    {"min_p": 1.0},
    {"top_k": MOST_TOP_K, "top_p": 0.8},
    {"top_p": 1e-30, "top_logprobs": 20},
]


def sequences(random, vocab):
    """One sequence per filter, with a prompt and some answer; the state of their slots."""
    rows = [
        (SamplingParams(**{"temperature": 0.9, "seed": seed} | filters), random.integers(0, vocab, 9))
        for seed, filters in enumerate(FILTERS)
    ]
    state = start_sampling(rows, vocab)
    counts = (random.random((len(rows), vocab)) < 0.1) * random.integers(1, 4, (len(rows), vocab))
    steps = random.integers(0, 1000, len(rows))
    return dataclasses.replace(state, counts=counts.astype(np.int32), step=steps.astype(np.int32))


def logits_like(random, shape, kind):
    """Logits of a model that is sure, of one that is not, of many ties, or all the same."""
    spread = {"sure": 6.0, "flat": 0.3, "tied": 1.0, "equal": 0.0}[kind]
    logits = spread * random.standard_normal(shape)
    return (np.round(logits) if kind == "tied" else logits).astype(np.float32) + 0.0  # XLA sorts -0 below 0


@pytest.mark.parametrize("kind", ["sure", "flat", "tied", "equal"])
@pytest.mark.parametrize("vocab", [20, 61, 300, 5000, 40_000])
def test_choices_equal_the_reference(variant, vocab, kind):
    """Small vocabularies, and such where the filters leave more than the best few tokens; half of the rows have a
    constraint, every fifth belongs to no slot."""
    random = np.random.default_rng([vocab, len(kind)])
    state = sequences(random, vocab)
    logits = logits_like(random, (len(FILTERS), vocab), kind)
    slots = random.permutation(len(FILTERS)).astype(np.int32)
    slots[::5] = -1
    allowed = everything(len(FILTERS), vocab)
    allowed[::2] &= random.integers(0, 2**32, (len(allowed[::2]), allowed.shape[1]), np.uint32)
    allowed[:, 0] |= 1
    found, found_state = sample(logits, state, slots, allowed)
    wanted, wanted_state = expected_sample(logits, state, slots, allowed)
    np.testing.assert_array_equal(found.token, wanted.token)
    np.testing.assert_array_equal(found.top_tokens, wanted.top_tokens)
    for name in ("logprob", "margin", "top_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=2e-5, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, found_state, wanted_state)


def with_seeds(count, vocab, **params):
    """The state of sequences that differ in their seed."""
    params = {"temperature": 1.0} | params
    rows = [(SamplingParams(seed=seed, **params), np.zeros(0, np.int64)) for seed in range(count)]
    return start_sampling(rows, vocab)


def test_noise_is_that_of_the_reference(variant):
    """Equal logits: the token with the most noise is drawn."""
    given = (np.zeros((200, 5000), np.float32), with_seeds(200, 5000), np.arange(200, dtype=np.int32))
    found, _ = sample(*given, everything(200, 5000))
    assert len(set(found.token.tolist())) > 150
    np.testing.assert_array_equal(found.token, expected_sample(*given, everything(200, 5000))[0].token)


def test_the_largest_logit_and_the_next_are_found_wherever_they_are(variant):
    """Of 77 tokens every pair in turn is the first and the second."""
    first, second = np.array([(a, b) for a in range(77) for b in range(77) if a != b]).T
    rows = np.arange(len(first))
    logits = np.full((len(first), 77), -3.0, np.float32)
    logits[rows, first], logits[rows, second] = 2.0, 0.5
    found, _ = sample(
        logits, with_seeds(1, 77, temperature=0.0), np.zeros(len(first), np.int32), everything(len(first), 77)
    )
    np.testing.assert_array_equal(found.token, first)
    assert set(found.margin.tolist()) == {1.5}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab", [50, 5000])
def test_logits_that_are_not_finite_cost_no_other_row_anything(variant, bad, vocab):
    """Whatever a broken model gives, a token of the vocabulary comes out; one that is not a number is not chosen."""
    random = np.random.default_rng(5)
    state, rows = sequences(random, vocab), np.arange(len(FILTERS), dtype=np.int32)
    clean = logits_like(random, (len(FILTERS), vocab), "sure")

    def tokens(logits):
        return sample(logits, state, rows, everything(len(FILTERS), vocab))[0].token

    one, all_of_them, without = clean.copy(), clean.copy(), clean.copy()
    one[::2, 17], all_of_them[::2], without[::2, 17] = bad, bad, -np.inf
    for broken in (one, all_of_them):
        found = tokens(broken)
        assert ((found >= 0) & (found < vocab)).all()
        np.testing.assert_array_equal(found[1::2], tokens(clean)[1::2])
    if bad != np.inf:
        np.testing.assert_array_equal(tokens(one), tokens(without))


def test_of_fewer_tokens_than_asked_for_all_are_told(variant):
    logits = np.full((1, 40), -np.inf, np.float32)
    logits[0, [9, 3]] = 0.0
    found, _ = sample(logits, with_seeds(1, 40, top_logprobs=20), np.zeros(1, np.int32), everything(1, 40))
    assert found.top_tokens[0, :2].tolist() == [3, 9]
    np.testing.assert_allclose(found.top_logprobs[0], [np.log(0.5)] * 2 + [-np.inf] * 18, rtol=1e-6)


@pytest.mark.parametrize("level", [0.0, 1e4, -1e30])
def test_logprobs_do_not_depend_on_the_level_of_the_logits(variant, level):
    logits = np.full((1, 64), level, np.float32)
    found, _ = sample(logits, with_seeds(1, 64, top_logprobs=1), np.zeros(1, np.int32), everything(1, 64))
    np.testing.assert_allclose([found.logprob[0], found.top_logprobs[0, 0]], -np.log(64), rtol=1e-6)


def test_a_constraint_that_forbids_everything_still_gives_a_token(variant):
    state = with_seeds(3, 40, top_p=0.5)
    found, _ = sample(np.ones((3, 40), np.float32), state, np.arange(3, dtype=np.int32), np.zeros((3, 2), np.uint32))
    assert found.token.tolist() == [0, 0, 0]


def test_rows_that_share_a_slot_choose_before_any_is_counted(variant):
    state = start_sampling([(SamplingParams(presence_penalty=2.0), np.zeros(0, np.int64))], 8)
    logits = np.array([[0, 1, 0, 0, 0, 0, 0, 0]] * 3, np.float32)
    found, after = sample(logits, state, np.zeros(3, np.int32), everything(3, 8))
    assert found.token.tolist() == [1, 1, 1]
    assert after.counts[0, 1] == 3
    assert after.step.tolist() == [3]


def test_a_donated_state_is_changed_in_place(variant):
    state = jax.tree.map(jnp.asarray, with_seeds(2, 40))
    step = jax.jit(
        lambda state, logits: ops.sample(logits, state, jnp.arange(2), everything(2, 40))[1], donate_argnums=0
    )
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)]
    after = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(step(state, jnp.zeros((2, 40))))]
    assert after == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"logits": np.zeros((2, 40), np.float16)}, "logits should be float32"),
        ({"logits": np.zeros((2, 41), np.float32)}, r"bias has shape \[3, 40\], wanted is \[3, 41\]"),
        ({"slots": np.zeros(3, np.int32)}, r"slots has shape \[3\], wanted is \[2\]"),
        ({"slots": np.zeros(2, np.float32)}, "slots should be int32"),
        ({"slots": np.array([0, 3], np.int32)}, "slots: row 1 wants slot 3 of 3"),
        ({"allowed": np.zeros((2, 1), np.uint32)}, r"allowed has shape \[2, 1\], wanted is \[2, 2\]"),
        ({"allowed": np.zeros((2, 2), np.int32)}, "allowed should be uint32"),
        ({"temperature": np.zeros((3, 1), np.float32)}, r"temperature should be \[slots\]"),
        ({"top_k": np.zeros(3, np.float32)}, "top_k should be int32"),
        ({"adjusted": np.zeros(3, np.int8)}, "adjusted should be bool"),
        ({"key": np.zeros((3, 1), np.uint32)}, r"key has shape \[3, 1\], wanted is \[3, 2\]"),
        ({"step": np.zeros(4, np.int32)}, r"step has shape \[4\], wanted is \[3\]"),
    ],
)
def test_a_wrong_argument_is_named(changed, named):
    state = with_seeds(3, 40)
    given = {"logits": np.zeros((2, 40), np.float32), "slots": np.zeros(2, np.int32), "allowed": everything(2, 40)}
    fields = {name: value for name, value in changed.items() if name not in given}
    given |= {name: value for name, value in changed.items() if name in given}
    with pytest.raises(jax.errors.JaxRuntimeError, match=named):
        sample(given["logits"], dataclasses.replace(state, **fields), given["slots"], given["allowed"])
