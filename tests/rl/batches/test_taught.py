"""Advantages of tokens by a teacher, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from trajectories import trajectory

from reprise.rl.batches.micro_batches import TrainSample
from reprise.rl.batches.taught import TeacherScores, taught_advantages
from reprise.rl.losses.algorithms import DistillConfig


def two_samples():
    first = trajectory(0, [1], [2, 3], logprobs=np.array([-1.0, -3.0], np.float32))
    second = trajectory(1, [1], [4], logprobs=np.array([-2.0], np.float32))
    return [TrainSample(first, 0.5), TrainSample(second, -0.5)]


SCORES = TeacherScores(
    [np.array([-2.0, -0.5], np.float32), np.array([-2.25], np.float32)],
    [np.array([0.5, 1.5], np.float32), np.array([1.0], np.float32)],
)


@pytest.mark.parametrize(
    ("coefficient", "task_weight", "wanted"),
    [
        (1.0, 0.0, ([-1.0, 2.5], [-0.25])),
        (0.5, 1.0, ([0.5 - 0.5, 0.5 + 1.25], [-0.5 - 0.125])),
        (1.0, 2.0, ([1.0 - 1.0, 1.0 + 2.5], [-1.0 - 0.25])),
    ],
)
def test_advantages_by_hand(coefficient, task_weight, wanted):
    config = DistillConfig("x", coefficient, task_weight)
    taught = SCORES.added_to(two_samples(), config)
    for sample, values in zip(taught, wanted, strict=True):
        np.testing.assert_allclose(sample.token_advantages, values, rtol=1e-6)
        assert sample.token_advantages.dtype == np.float32


def test_a_critics_advantages_of_tokens_are_added_token_by_token():
    samples = two_samples()
    samples[0] = dataclasses.replace(samples[0], token_advantages=np.float32([3.0, 4.0]))
    taught = SCORES.added_to(samples, DistillConfig("x", 1.0, 2.0))
    np.testing.assert_allclose(taught[0].token_advantages, [6.0 - 1.0, 8.0 + 2.5])


def test_metrics_are_means_over_tokens():
    metrics = SCORES.metrics(two_samples())
    assert metrics["distill/reverse_kl"] == pytest.approx((1.0 - 2.5 + 0.25) / 3)
    assert metrics["distill/teacher_entropy"] == pytest.approx(1.0)
    assert TeacherScores([], []).metrics([]) == {}


def test_advantages_of_tokens_equal_the_formula_in_float64():
    rng = np.random.default_rng(0)
    teacher, drawn = rng.normal(size=(2, 50)).astype(np.float32)
    found = taught_advantages(0.75, teacher, drawn, DistillConfig("x", 0.3, 2.0))
    wanted = 2.0 * 0.75 + 0.3 * (teacher.astype(np.float64) - drawn.astype(np.float64))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    alone = taught_advantages(np.nan, teacher, drawn, DistillConfig("x", 0.3, 0.0))
    np.testing.assert_allclose(alone, wanted - 1.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"coefficient": 0.0}, "coefficient must be positive and finite, got 0"),
        ({"coefficient": float("nan")}, "coefficient must be positive"),
        ({"task_weight": -1.0}, "task_weight must be 0 or positive"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig("x", **bad)
