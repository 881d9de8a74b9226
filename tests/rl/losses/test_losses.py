"""The objective on arrays small enough to compute by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.rl.losses import losses
from reprise.rl.losses.losses import AlgorithmConfig, LossInputs
from reprise.rl.records.trajectory import Origin

LOSS = jax.jit(losses.loss, static_argnums=0)  # eagerly it is a hundred programs


def log(*values):
    return jnp.log(jnp.array([values], jnp.float32))


def inputs_of(mask, advantages, emission, old=None, reference=None, origins=None):
    zeros = jnp.zeros_like(emission)
    return LossInputs(
        jnp.array(mask, bool),
        jnp.array(advantages, jnp.float32),
        emission,
        emission if old is None else old,
        zeros if reference is None else reference,
        emission,
        jnp.zeros(emission.shape, jnp.int32) if origins is None else jnp.array(origins),
    )


@pytest.mark.parametrize(
    ("name", "wanted", "slope"),
    [  # p = 0.5, ref = 0.25: d = log(1/2)
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 0.5),
    ],
)
def test_kl_estimators(name, wanted, slope):
    value, gradient = jax.value_and_grad(lambda x: losses.kl_estimate(x, log(0.25), name)[0, 0])(
        log(0.5)
    )
    assert float(value) == pytest.approx(wanted, abs=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_estimators_are_unbiased(name):
    p, q = jnp.array([[0.7, 0.2, 0.1]]), jnp.array([[0.3, 0.3, 0.4]])
    estimate = jnp.sum(p * losses.kl_estimate(jnp.log(p), jnp.log(q), name))
    assert float(estimate) == pytest.approx(float(jnp.sum(p * jnp.log(p / q))), abs=1e-6)


def test_expected_gradients_of_kl_estimators():
    """k1: none; k2: the KL's; k3: that of KL(reference ‖ policy). By enumeration of a draw."""
    logits, reference = jnp.array([0.3, -0.5, 0.9]), jnp.log(jnp.array([0.8, 0.15, 0.05]))
    p = jax.nn.softmax(logits)

    def estimated(name):
        def of(x):
            estimates = losses.kl_estimate(jax.nn.log_softmax(x)[None], reference[None], name)
            return jnp.sum(p * estimates[0])  # drawn from the policy, which is not differentiated

        return jax.grad(of)(logits)

    def kl(x):
        return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference))

    def reverse_kl(x):
        return jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(x)))

    np.testing.assert_allclose(estimated("k1"), 0, atol=1e-6)
    np.testing.assert_allclose(estimated("k2"), jax.grad(kl)(logits), atol=1e-6)
    np.testing.assert_allclose(estimated("k3"), jax.grad(reverse_kl)(logits), atol=1e-6)
    assert np.abs(estimated("k3") - estimated("k2")).max() > 0.05


def test_aggregations_weigh_tokens_or_sequences_alike():
    mask = jnp.array([[1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
    token = losses.token_weights(mask, jnp.float32(4), "token")
    sequence = losses.token_weights(mask, jnp.float32(2), "sequence")
    np.testing.assert_allclose(token, [[0.25] * 3, [0, 0.25, 0], [0, 0, 0]])
    np.testing.assert_allclose(sequence, [[1 / 6] * 3, [0, 0.5, 0], [0, 0, 0]], rtol=1e-6)
    assert losses.normaliser_of(4, 2, "token", 8) == 4
    assert losses.normaliser_of(4, 2, "sequence", 8) == 2


@pytest.mark.parametrize(("aggregation", "normaliser"), [("token", 5), ("sequence", 3)])
def test_rows_add_up_to_the_batch(aggregation, normaliser):
    config = AlgorithmConfig(aggregation=aggregation, kl_coefficient=0.5)
    new, old, ref = -np.random.default_rng(0).random((3, 3, 4)).astype(np.float32)
    mask = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]], bool)
    advantages = np.array([1.0, -2.0, 0.5], np.float32)

    def of(rows):
        same = old[rows]
        zeros = np.zeros_like(same)
        part = LossInputs(mask[rows], advantages[rows], same, same, ref[rows], same, zeros)
        return LOSS(config, new[rows], new[rows], part, jnp.float32(normaliser))[0]

    parts = float(of(slice(0, 1))) + float(of(slice(1, 3)))
    assert parts == pytest.approx(float(of(slice(0, 3))), rel=1e-6)


def test_the_distance_from_emission_by_origin():
    """exp(d) − 1 − d at each token, its mean over the tokens that came to be alike."""
    new = jnp.log(jnp.array([[0.5, 0.25, 0.5], [0.25, 0.9, 0.1]], jnp.float32))
    emission = jnp.log(jnp.array([[0.25, 0.25, 0.5], [0.5, 0.1, 0.1]], jnp.float32))
    origins = [[Origin.REUSED, Origin.REUSED, Origin.PLAIN], [Origin.REUSED, Origin.BONUS, 0]]
    inputs = inputs_of([[1, 1, 1], [1, 0, 1]], [1.0, 1.0], emission, origins=origins)
    config = AlgorithmConfig()
    _, (statistics, _) = LOSS(config, new, new, inputs, jnp.float32(1))
    metrics = losses.metrics_of(statistics)
    twice, half = 1 - math.log(2), -0.5 + math.log(2)
    assert metrics["emission_kl/reused"] == pytest.approx((twice + 0 + half) / 3, rel=1e-5)
    assert metrics["emission_kl/plain"] == pytest.approx(0, abs=1e-6)
    # the one bonus token is not in the mask, and there are no accepted ones
    assert not {"emission_kl/bonus", "emission_kl/accepted"} & metrics.keys()
    assert not any(name.startswith("emission_tokens") for name in metrics)


def test_loss_and_metrics_by_hand():
    # row 0: ratios 2 and 1 with A = 1; row 1: one ratio of 1/2 with A = -1, then padding
    new = jnp.log(jnp.array([[0.5, 0.25], [0.25, 0.9]], jnp.float32))
    old = jnp.log(jnp.array([[0.25, 0.25], [0.5, 0.1]], jnp.float32))
    entropy = jnp.array([[1.0, 2.0], [3.0, 99.0]])
    inputs = inputs_of([[1, 1], [1, 0]], [1.0, -1.0], old, reference=new)
    config = AlgorithmConfig(kl_coefficient=1.0)
    loss, (statistics, finite_B) = LOSS(config, new, entropy, inputs, jnp.float32(3))
    assert float(loss) == pytest.approx((-1.2 - 1.0 + 0.8) / 3, abs=1e-6)
    assert finite_B.tolist() == [True, True]
    metrics = losses.metrics_of(jax.device_get(statistics))
    two = math.log(2)
    wanted = {
        "loss": (-1.2 - 1.0 + 0.8) / 3,
        "batch/entropy": 2.0,
        "kl": 0.0,
        "clip_ratio/low_mean": 1 / 3,
        "clip_ratio/high_mean": 1 / 3,
        "clip_ratio/region_mean": 2 / 3,
        "ratio/mean": 3.5 / 3,
        "ratio/max": 2.0,
        "ratio/min": 0.5,
        "sampling/sampling_logp_difference/mean": 2 * two / 3,
        "sampling/sampling_logp_difference/max": two,
        "mismatch_kl": (2 - 1 - two + 0.5 - 1 + two) / 3,
        "emission_kl/plain": (2 - 1 - two + 0.5 - 1 + two) / 3,
    }
    assert metrics == pytest.approx(wanted, abs=1e-6)


def test_what_padding_holds_reaches_neither_value_nor_gradient():
    mask = [[1, 0]]
    old = jnp.array([[-1.0, 0.0]])

    def of(new):
        return LOSS(
            AlgorithmConfig(kl_coefficient=1.0), new, new, inputs_of(mask, [1.0], old), 1.0
        )[0]

    for garbage in (500.0, -500.0):  # exp overflows, or makes the ratio 0
        value, gradient = jax.value_and_grad(of)(jnp.array([[-1.0, garbage]]))
        clean, clean_gradient = jax.value_and_grad(of)(jnp.array([[-1.0, 0.0]]))
        assert float(value) == float(clean)
        assert gradient.tolist() == clean_gradient.tolist() and float(gradient[0, 1]) == 0


def test_rows_that_are_not_finite_are_told_apart():
    old = jnp.array([[-1.0, -1.0], [jnp.nan, -1.0], [-1.0, jnp.nan]])
    mask = [[1, 1], [1, 1], [1, 0]]
    new = jnp.full((3, 2), -1.0)
    _, (_, finite_B) = LOSS(
        AlgorithmConfig(), new, new, inputs_of(mask, [1.0] * 3, old), jnp.float32(5)
    )
    assert finite_B.tolist() == [True, False, True]
