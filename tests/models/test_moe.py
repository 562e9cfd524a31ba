"""The mixture-of-experts block against a plain loop over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import MoeConfig
from models.layers import RMSNorm
from models.moe import MoeBlock

HIDDEN = 10


def block(*, experts: int = 6, top_k: int = 2, normalise: bool = True, seed: int = 0) -> MoeBlock:
    moe = MoeBlock(MoeConfig(experts, top_k, 7, normalise), HIDDEN)
    random = np.random.default_rng(seed)
    for parameter in (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj):
        parameter.set_value(jnp.asarray(random.standard_normal(parameter.shape), jnp.float32))
    return moe


def unit_norm() -> RMSNorm:
    """The norm before the block, with weights of one."""
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight.set_value(jnp.ones(HIDDEN))
    return norm


def expected(moe: MoeBlock, x: np.ndarray) -> np.ndarray:
    """One token at a time, in float64."""
    x = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + 1e-6)
    gate, gate_up, down = (
        np.asarray(parameter.get_value(), np.float64)
        for parameter in (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj)
    )
    out = np.zeros_like(x, np.float64)
    for token, row in enumerate(x.astype(np.float64)):
        exponentials = np.exp(gate @ row - (gate @ row).max())
        shares = exponentials / exponentials.sum()
        chosen = np.argsort(-shares, kind="stable")[: moe.config.top_k]
        total = shares[chosen].sum() if moe.config.normalise else 1.0
        for expert in chosen:
            first, second = np.split(gate_up[expert] @ row, 2)
            out[token] += shares[expert] / total * (down[expert] @ (first / (1 + np.exp(-first)) * second))
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 4, 50])
def test_few_and_many_tokens_match_the_definition(normalise, tokens):
    moe = block(normalise=normalise)
    x = np.random.default_rng(1).standard_normal((1, tokens, HIDDEN)).astype(np.float32)
    np.testing.assert_allclose(moe(jnp.asarray(x), unit_norm())[0], expected(moe, x[0]), rtol=2e-5, atol=2e-5)


def test_ties_go_to_the_lower_expert():
    moe = block(experts=5, top_k=3)
    moe.gate.weight.set_value(jnp.zeros((5, HIDDEN)))
    shares, experts = moe.route(jnp.ones((1, HIDDEN)), unit_norm())
    assert experts.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)


def test_near_ties_and_negative_logits_are_told_apart():
    """Router logits 1e-3 apart, all around -5: bfloat16 could not order them."""
    moe = block(experts=4, top_k=2)
    moe.gate.weight.set_value(jnp.zeros((4, HIDDEN)).at[:, 0].set(jnp.array([-5.003, -5.0, -5.002, -5.001])))
    _, experts = moe.route(jnp.ones((1, HIDDEN)), unit_norm())
    assert experts.tolist() == [[1, 3]]


def test_the_block_has_gradients_through_router_and_experts():
    moe = block()
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 9, HIDDEN)), jnp.float32)
    norm = unit_norm()
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(moe(x, norm)))))(x)
    assert jnp.all(jnp.isfinite(gradient))
    assert jnp.any(gradient != 0)
