"""Sums whose order the number of terms alone decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sums import mean_square, sum_in_order


def test_sums_in_order_are_sums():
    for length in (1, 2, 16, 17, 99, 512):
        x_N = np.random.default_rng(length).random((2, length)).astype(np.float32)
        np.testing.assert_allclose(sum_in_order(x_N), x_N.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mean_of_squares_is_that_of_the_definition(dtype):
    x_RD = jnp.asarray(np.random.default_rng(0).standard_normal((3, 48)), dtype)
    want = np.square(np.asarray(x_RD, np.float64)).mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(mean_square(x_RD), want, rtol=1e-6)


def test_mean_squares_of_bfloat16_do_not_depend_on_the_program():
    """Not on the number of rows, nor on how they are arranged."""
    x_RD = jnp.asarray(np.random.default_rng(1).standard_normal((256, 128)), jnp.bfloat16)
    of_rows = jax.jit(mean_square)
    all_of_them = np.asarray(of_rows(x_RD))
    for few in (1, 3, 16, 64):
        np.testing.assert_array_equal(of_rows(x_RD[:few]), all_of_them[:few])
    by_slots = of_rows(x_RD.reshape(32, 8, 128)).reshape(-1, 1)
    np.testing.assert_array_equal(by_slots, all_of_them)
