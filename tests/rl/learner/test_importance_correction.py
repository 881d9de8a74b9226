"""Importance weights by hand, and what they weigh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.rl.losses import losses
from reprise.rl.losses.algorithms import AlgorithmConfig, Correction, parse_correction
from reprise.rl.losses.losses import LossInputs
from reprise.rl.losses.policy_losses import importance_weights

# ratios 4, 1/2 and 1, then padding; and 1/4 alone
TRAINER = np.log(np.array([[0.8, 0.2, 0.5, 1.0], [0.1, 1.0, 1.0, 1.0]], np.float32))
EMISSION = np.log(np.array([[0.2, 0.4, 0.5, 0.1], [0.4, 0.1, 0.1, 0.1]], np.float32))
MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)


@pytest.mark.parametrize(
    ("text", "weights", "cut"),
    [
        ("token_tis:2", [2, 0.5, 1, 0.25], [1, 0, 0, 0]),
        ("sequence_tis:1.5", [1.5, 1.5, 1.5, 0.25], [1, 1, 1, 0]),  # products 2 and 1/4
        ("sequence_tis:3", [2, 2, 2, 0.25], [0, 0, 0, 0]),
        ("token_mask:0.4:2", [0, 1, 1, 0], [1, 0, 0, 1]),
        ("sequence_mask:0.5:2.5", [1, 1, 1, 0], [0, 0, 0, 1]),
        ("sequence_mask:0:1", [0, 0, 0, 1], [1, 1, 1, 0]),
    ],
)
def test_weights_by_hand(text, weights, cut):
    weight_BT, cut_BT = importance_weights(parse_correction(text), TRAINER, EMISSION, MASK)
    np.testing.assert_allclose(np.array(weight_BT)[MASK], weights, rtol=1e-6)
    np.testing.assert_array_equal(np.array(cut_BT)[MASK], np.array(cut, bool))


def test_what_they_read_as():
    assert parse_correction("none") is None
    assert parse_correction("token_tis:2") == Correction("token", "tis", 0.0, 2.0)
    assert parse_correction("sequence_mask:0.5:2e0") == Correction("sequence", "mask", 0.5, 2.0)


@pytest.mark.parametrize(
    "text",
    ["tis:2", "token_tis", "token_tis:x", "token_tis:0", "token_tis:inf", "token_tis:1:2"]
    + ["token_mask:2", "token_mask:2:1", "token_mask:-1:1", "group_tis:2", "", "token_:2"],
)
def test_what_is_no_correction_is_refused_with_the_forms_that_are(text):
    with pytest.raises(ValueError, match="correction"):
        AlgorithmConfig(correction=text)


def test_products_over_long_sequences_neither_overflow_nor_vanish_into_nan():
    mask = jnp.ones((2, 2000), bool)
    trainer = jnp.stack([jnp.zeros(2000), jnp.full(2000, -1.0)])
    emission = trainer[::-1]  # log ratios of +2000 and -2000
    for text, wanted in (("sequence_tis:2", (2.0, 0.0)), ("sequence_mask:0.5:2", (0.0, 0.0))):
        weight_BT, _ = importance_weights(parse_correction(text), trainer, emission, mask)
        assert (float(weight_BT[0, 0]), float(weight_BT[1, 0])) == wanted


def loss_of(new, **more):
    config = AlgorithmConfig(name="rloo", kl_coefficient=0.5, kl_estimator="k2", **more)
    zeros = jnp.zeros_like(TRAINER)
    inputs = LossInputs(MASK, jnp.array([1.0, 1.0]), TRAINER, TRAINER, zeros, EMISSION, zeros)
    return losses.loss(config, new, new, inputs, jnp.float32(2))


def test_they_weigh_the_policy_loss_and_not_the_kl_and_have_no_gradient_of_their_own():
    def of(new, **more):
        return loss_of(new, **more)[0]

    plain, weighed = (
        jax.grad(lambda x, c=c: of(x, correction=c))(TRAINER) for c in ("none", "token_tis:2")
    )
    kl = np.array(0.5 * TRAINER / 2)  # the k2 gradient against a reference of log-prob 0
    weights = np.array([[2, 0.5, 1, 0], [0.25, 0, 0, 0]])
    np.testing.assert_allclose(plain, np.where(MASK, -0.5 + kl, 0), atol=1e-6)
    np.testing.assert_allclose(weighed, np.where(MASK, -0.5 * weights + kl, 0), atol=1e-6)


def test_reinforce_follows_the_policy_through_a_batch_and_clipped_losses_keep_their_ratio():
    """The policy has moved by a factor of 2; denominators are those before the batch."""
    new = TRAINER + np.float32(np.log(2))

    def weight(name, correction="token_tis:100"):
        config = AlgorithmConfig(name=name, correction=correction)
        zeros = jnp.zeros_like(TRAINER)
        inputs = LossInputs(MASK, jnp.array([1.0, 1.0]), TRAINER, TRAINER, zeros, EMISSION, zeros)
        _, (statistics, _) = losses.loss(config, new, new, inputs, jnp.float32(2))
        return losses.metrics_of(jax.device_get(statistics))["correction/weight_mean"]

    before = (4 + 0.5 + 1 + 0.25) / 4
    assert weight("grpo") == pytest.approx(before)
    assert weight("rloo") == pytest.approx(2 * before)


@pytest.mark.parametrize(
    ("text", "name", "mean", "fraction"),
    [("token_tis:2", "truncated", 3.75 / 4, 1 / 4), ("token_mask:0.4:2", "masked", 2 / 4, 2 / 4)],
)
def test_mean_weight_and_what_was_cut_are_reported(text, name, mean, fraction):
    _, (statistics, _) = loss_of(TRAINER, correction=text)
    metrics = losses.metrics_of(jax.device_get(statistics))
    assert metrics["correction/weight_mean"] == pytest.approx(mean)
    assert metrics[f"correction/{name}_fraction"] == pytest.approx(fraction)
    assert set(loss_of(TRAINER)[1][0].sums).isdisjoint({"correction/weight_mean"})
