"""Each loss on arrays small enough to compute by hand, and its gradient."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import policy_losses
from rl.algorithms import ALGORITHMS


def log(*values):
    return jnp.log(jnp.array([values], jnp.float32))


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.3, 0.0),  # above 1 + high: clipped, no gradient
        (0.5, 1.0, -0.5, -0.5),  # below, but the advantage is positive: not clipped
        (0.5, -1.0, 0.9, 0.0),  # below 1 - low: clipped
        (1.5, -1.0, 1.5, 1.5),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss(ratio, advantage, wanted, slope):
    def of(logprob):
        old = jnp.zeros((1, 1))
        return policy_losses.clipped_policy_loss(logprob, old, jnp.array([[advantage]]), 0.1, 0.3)[
            0, 0
        ]

    value, gradient = jax.value_and_grad(of)(log(ratio))
    assert float(value) == pytest.approx(wanted, abs=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-6)
