"""Linear layers and embeddings over stored weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import DECODE_ROWS, Embedding, Linear, products, project
from models.quantisation import QuantisedMatrix, dequantise, quantise


def filled(layer: Linear | Embedding, format: str | None, seed: int = 0) -> np.ndarray:
    """Gives a layer a random matrix, stored in `format`; returns the matrix that is stored."""
    matrix = np.random.default_rng(seed).standard_normal(layer.size, np.float32)
    if format is None:
        layer.weight.set_value(jnp.asarray(matrix))
        return matrix
    layer.store_as(format)
    stored: QuantisedMatrix = quantise(matrix, format)
    assert layer.weight.get_value().shape == stored.weight.shape
    assert layer.scale.get_value().shape == stored.scale.shape
    layer.weight.set_value(jnp.asarray(stored.weight))
    layer.scale.set_value(jnp.asarray(stored.scale))
    return dequantise(stored, *layer.size)


@pytest.mark.parametrize("format", [None, "q4", "q8"])
@pytest.mark.parametrize("shape", [(70,), (1, 70), (2, 3, 70), (DECODE_ROWS, 1, 70), (2, DECODE_ROWS, 70)])
def test_a_linear_layer_of_any_batch(format, shape):
    layer = Linear(70, 50, bias=True)
    matrix = filled(layer, format)
    layer.bias.set_value(jnp.arange(50, dtype=jnp.float32))
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    wanted = x @ matrix.T + np.arange(50)
    # Activations are rounded to 1/127 of the largest of 32 for quantised weights.
    error = 1e-5 if format is None else 0.02
    found = layer(jnp.asarray(x))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < error * np.abs(wanted).max()


def test_layers_on_one_input_give_what_each_gives_alone():
    layers = [Linear(64, 24), Linear(64, 8, bias=True)]
    for seed, layer in enumerate(layers):
        filled(layer, "q4", seed)
    layers[1].bias.set_value(jnp.arange(8, dtype=jnp.float32))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 64), np.float32))
    for together, layer in zip(project(x, *layers), layers, strict=True):
        np.testing.assert_array_equal(together, layer(x))


@pytest.mark.parametrize("format", [None, "q4", "q8"])
def test_an_embedding_reads_rows_and_multiplies_with_all(format):
    table = Embedding(41, 70)
    matrix = filled(table, format)
    index = np.array([[0, 40, 7], [8, 9, 15]], np.int32)
    np.testing.assert_allclose(table(jnp.asarray(index)), matrix[index], rtol=1e-6)
    x = np.random.default_rng(3).standard_normal((2, 70), np.float32)
    [found], wanted = products(jnp.asarray(x), table), x @ matrix.T
    assert np.abs(found - wanted).max() < (1e-5 if format is None else 0.02) * np.abs(wanted).max()


def test_few_rows_have_the_gradients_of_many():
    """The kernel computes up to DECODE_ROWS rows, XLA more: training must not notice."""
    layer = Linear(20, 6)
    filled(layer, None)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((DECODE_ROWS + 1, 20), np.float32))

    def loss(layer: Linear, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer(x)))

    both = nnx.grad(loss, argnums=(0, 1))
    (many, by_row), few = both(layer, x), [both(layer, x[row : row + 1]) for row in range(len(x))]
    summed = sum(gradient[0].weight[...] for gradient in few)
    np.testing.assert_allclose(summed, many.weight[...], rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([gradient[1] for gradient in few]), by_row, rtol=2e-5, atol=1e-5)
