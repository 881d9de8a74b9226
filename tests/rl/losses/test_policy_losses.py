"""Each loss on arrays small enough to compute by hand, and its gradient."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.rl.losses import losses, policy_losses
from reprise.rl.losses.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig
from reprise.rl.losses.losses import LossInputs
from reprise.rl.losses.policy_losses import policy_loss

CLIPPED = Algorithm("", clip_low=0.1, clip_high=0.3)
SEQUENCE_CLIPPED = dataclasses.replace(CLIPPED, policy_loss="sequence_clipped")


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
        zero, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
        return policy_loss(CLIPPED, logprob, zero, jnp.array([[advantage]]), mask)[0][0, 0]

    value, gradient = jax.value_and_grad(of)(log(ratio))
    assert float(value) == pytest.approx(wanted, abs=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-6)


# GSPO: row 0 has ratios 4 and 1, so s = 2; row 1 has 1/4 alone, then padding

NEW = np.log(np.array([[0.8, 0.5], [0.1, 0.9]], np.float32))
OLD = np.log(np.array([[0.2, 0.5], [0.4, 0.1]], np.float32))
MASK = np.array([[True, True], [True, False]])


@pytest.mark.parametrize(
    ("advantages", "wanted", "slopes"),
    [
        # both outside the bounds on the side where clipping counts: no gradient
        ((1.0, -1.0), (-1.3, 0.9), (0.0, 0.0)),
        # on the other side: s·A, whose gradient is s·A / n at each token
        ((-1.0, 1.0), (2.0, -0.25), (1.0, -0.25)),
    ],
)
def test_sequence_clipped_policy_loss(advantages, wanted, slopes):
    A_B1 = jnp.array(advantages)[:, None]

    def of(new):
        return policy_loss(SEQUENCE_CLIPPED, new, OLD, A_B1, MASK)[0]

    loss_BT = of(NEW)
    np.testing.assert_allclose(loss_BT[0], [wanted[0]] * 2, rtol=1e-6)
    assert float(loss_BT[1, 0]) == pytest.approx(wanted[1], rel=1e-6)
    gradient = jax.grad(lambda new: of(new)[0, 0] + of(new)[1, 0])(NEW)
    np.testing.assert_allclose(gradient, [[slopes[0]] * 2, [slopes[1], 0]], atol=1e-6)


def test_the_sequence_ratio_is_the_geometric_mean_and_padding_is_not_in_it():
    ratio_BT = policy_losses.sequence_ratio(NEW, OLD, MASK)
    np.testing.assert_allclose(ratio_BT, [[2, 2], [0.25, 0.25]], rtol=1e-6)
    nothing = policy_losses.sequence_ratio(NEW, OLD, jnp.zeros_like(MASK))
    np.testing.assert_array_equal(nothing, 1)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_clipped_weight_keeps_the_gradient_of_each_token(advantage):
    cispo = dataclasses.replace(CLIPPED, policy_loss="clipped_weight")

    def of(new):
        return policy_loss(cispo, new, OLD, jnp.full((2, 1), advantage), MASK)[0]

    weights = np.array([[1.3, 1.0], [0.9, 1.3]])  # of the ratios 4, 1, 1/4 and 9
    np.testing.assert_allclose(of(NEW), -weights * advantage * NEW, rtol=1e-6)
    slope = jax.grad(lambda new: of(new).sum())(NEW)
    np.testing.assert_allclose(slope, -weights * advantage, rtol=1e-6)


def test_the_entropy_is_subtracted_with_the_weight_of_its_token():
    """The gradient of each entropy is −c over the tokens; masked tokens have none."""
    entropy = jnp.array([[0.5, 1.5], [2.0, jnp.nan]])
    inputs = LossInputs(MASK, jnp.zeros(2), OLD, OLD, OLD, OLD, 0 * OLD)

    def of(entropy, coefficient):
        config = AlgorithmConfig(entropy_coefficient=coefficient)
        return losses.loss(config, NEW, entropy, inputs, jnp.float32(3))[0]

    value, slope = jax.value_and_grad(of)(entropy, 0.25)
    assert float(value) == pytest.approx(-0.25 * 4 / 3, rel=1e-6)
    np.testing.assert_allclose(slope, [[-0.25 / 3, -0.25 / 3], [-0.25 / 3, 0]], rtol=1e-6)
    assert float(of(entropy, 0.0)) == 0


def test_reinforce_policy_loss():
    def of(new):
        old, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
        return policy_loss(ALGORITHMS["rloo"], new, old, jnp.array([[2.0]]), mask)[0]

    wanted = [[2 * math.log(2), 4 * math.log(2)]]
    np.testing.assert_allclose(of(log(0.5, 0.25)), wanted, rtol=1e-6)
    slope = jax.grad(lambda x: of(x).sum())(log(0.5, 0.25))
    np.testing.assert_array_equal(slope, [[-2, -2]])


@pytest.mark.parametrize(
    ("value", "wanted", "slope", "clipped"),
    [  # old value 1, return 2, clip 0.5: values may move to 0.5 … 1.5
        (1.2, 0.5 * 0.64, -0.8, False),
        (1.8, 0.5 * 0.25, 0.0, True),  # nearer to the return than it may be
        (0.0, 0.5 * 4.0, -2.0, False),  # moved away: the larger loss stands
        (3.0, 0.5 * 1.0, 1.0, False),  # beyond the return
    ],
)
def test_clipped_value_loss(value, wanted, slope, clipped):
    def of(v):
        loss, _ = policy_losses.clipped_value_loss(v, jnp.float32(1), jnp.float32(2), 0.5)
        return loss

    got, gradient = jax.value_and_grad(of)(jnp.float32(value))
    assert float(got) == pytest.approx(wanted, rel=1e-5)
    assert float(gradient) == pytest.approx(slope, abs=1e-5)
    _, cut = policy_losses.clipped_value_loss(jnp.float32(value), 1.0, 2.0, 0.5)
    assert bool(cut) == clipped


# The whole objective by name


def objective(name, new, advantages=(1.0, -2.0), max_new_tokens=8, by_token=None, **more):
    config = AlgorithmConfig(name=name, **more)
    A_B = jnp.array(advantages, jnp.float32)
    inputs = LossInputs(MASK, A_B, OLD, OLD, OLD, OLD, 0 * OLD, by_token)
    normaliser = losses.normaliser_of(3, 2, config.resolved.aggregation, 2 * max_new_tokens)
    value, (statistics, _) = losses.loss(config, new, new, inputs, jnp.float32(normaliser))
    return value, losses.metrics_of(jax.device_get(statistics))


TOKEN_ADVANTAGES = np.array([[1.0, -1.0], [2.0, 9.0]], np.float32)
# ratios 4, 1 and 1/4 with advantages 1, 1 and -2
BY_HAND = {
    "grpo": (-1.2 - 1 + 1.6) / 3,
    "dr_grpo": (-1.2 - 1 + 1.6) / (2 * 8),
    "dapo": (-1.28 - 1 + 1.6) / 3,
    "gspo": (-1.0004 + 2 * (1 - 3e-4)) / 2,
    "cispo": (-4 * math.log(0.8) - math.log(0.5) + 2 * 0.25 * math.log(0.1)) / 3,
    "gdpo": (-1.2 - 1 + 1.6) / 3,
    "rloo": (-(math.log(0.8) + math.log(0.5)) + 2 * math.log(0.1)) / 2,
    "ppo": (-1.2 + 1 - 0.5) / 3,  # token advantages 1, -1 and 2
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_objective_of_each_name_by_hand(name):
    by_token = TOKEN_ADVANTAGES if name == "ppo" else None
    value, metrics = objective(name, NEW, by_token=by_token)
    assert float(value) == pytest.approx(BY_HAND[name], rel=1e-5)
    assert metrics["loss"] == pytest.approx(BY_HAND[name], rel=1e-5)
    clipped = {"gspo": 3, "cispo": 0, "rloo": 0, "ppo": 1}.get(name, 2)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(clipped / 3)
    assert metrics["ratio/max"] == pytest.approx(2.0 if name == "gspo" else 4.0, rel=1e-6)


def test_dr_grpo_does_not_reward_length():
    """Twice the tokens, twice the weight: the same gradient at each token, however many."""
    short, long = (objective("dr_grpo", OLD, (a, b))[0] for a, b in ((0.0, 1.0), (1.0, 0.0)))
    assert float(long) == pytest.approx(2 * float(short))
    short, long = (
        objective("dr_grpo", OLD, pair, aggregation="sequence")[0]
        for pair in ((0.0, 1.0), (1.0, 0.0))
    )
    assert float(long) == pytest.approx(float(short))  # what its paper calls the length bias
