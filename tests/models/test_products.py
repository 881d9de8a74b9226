"""Products of few rows and of many, and that a row's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import products
from models.products import feed_forward, linear


@pytest.mark.parametrize("rows", [1, 4, 17, 64])
def test_rows_are_their_own(rows):
    """A round has as many rows whoever shares it; a row's bits do not depend on the others."""
    D, F = 256, 704
    x_RD, (gate_FD, up_FD, down_DF) = random_array(0, 128, D), random_weights(D, F)

    @jax.jit
    def products(x):
        return linear(x, gate_FD), feed_forward(x, gate_FD, up_FD, down_DF)

    want = products(x_RD[:rows])
    others_RD = jnp.concatenate([x_RD[:1], x_RD[65 : 64 + rows]])
    for got, whole in zip(products(others_RD), want, strict=True):
        np.testing.assert_array_equal(got[0], whole[0])
        assert rows == 1 or (got[1] != whole[1]).any()


def test_few_rows_are_not_padded():
    """Padding them to 64 rows more than halved the speed of plain rounds of 4 slots."""
    x_RD, weights = random_array(0, 4, 32), random_weights(32, 16)
    program = jax.jit(feed_forward).lower(x_RD, *weights).as_text()
    assert "stablehlo.pad" not in program
    assert "x64x" not in program


def test_few_rows_are_computed_as_many():
    x_RD, (gate_FD, up_FD, down_DF) = random_array(0, 80, 32), random_weights(32, 16)
    y_RF = np.asarray(x_RD @ gate_FD.T)
    want = y_RF / (1 + np.exp(-y_RF)) * np.asarray(x_RD @ up_FD.T) @ np.asarray(down_DF.T)
    for rows in (1, 2, 17, 80):
        x = x_RD[:rows]
        got = jax.jit(feed_forward)(x, gate_FD, up_FD, down_DF)
        np.testing.assert_allclose(got, want[:rows], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(linear(x, gate_FD), y_RF[:rows], atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_features_add_up(parts):
    x_RD, weights = random_array(0, 80, 32), random_weights(32, 16)

    def loss(product, x, weights):
        return (product(x, *weights) ** 2).sum()

    in_parts = lambda x, *weights: products._feed_forward_in_parts(x, *weights, parts)  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)), static_argnums=0)
    want, got = (both(product, x_RD, weights) for product in (feed_forward, in_parts))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-2)


def random_weights(D, F):
    return random_array(1, F, D), random_array(2, F, D), random_array(3, D, F)


def random_array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
