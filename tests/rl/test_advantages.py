"""Group advantages against hand-computed values, and the groups that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest

from rl.advantages import group_advantages


def test_two_groups_interleaved_with_std():
    # group 0: 1, 0, 0 -> mean 1/3, std (n - 1) sqrt(1/3); group 1: 2, 4 -> mean 3, std sqrt(2)
    advantages, stats = group_advantages([1, 2, 0, 4, 0], [0, 1, 0, 1, 0])
    std0, std1 = 3**-0.5, 2**0.5
    wanted = [
        (2 / 3) / (std0 + 1e-4),
        -1 / (std1 + 1e-4),
        (-1 / 3) / (std0 + 1e-4),
        1 / (std1 + 1e-4),
        (-1 / 3) / (std0 + 1e-4),
    ]
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, wanted, rtol=1e-6)
    assert stats["reward"] == pytest.approx(7 / 5)
    assert stats["reward_std"] == pytest.approx((std0 + std1) / 2)
    assert stats["frac_reward_zero_std"] == 0


def test_without_normalisation_only_the_mean_is_taken_away():
    advantages, _ = group_advantages([1.0, 0.0, 0.5, 0.5], [7, 7, 8, 8], normalise="none")
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(normalise):
    # the mean of three 0.1 is not 0.1 in floating point
    advantages, stats = group_advantages([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1], normalise=normalise)
    assert advantages.tolist() == [0, 0, 0, 0]
    assert stats["frac_reward_zero_std"] == 1
    assert stats["reward/groups_of_one"] == 1


def test_a_reward_of_none_counts_in_no_mean():
    advantages, stats = group_advantages([1.0, None, 0.0], [0, 0, 0], normalise="none")
    assert advantages.tolist() == [0.5, 0.0, -0.5]
    assert stats["reward"] == 0.5
    assert stats["reward/skipped_samples"] == 1


def test_nothing_scored_claims_no_mean():
    advantages, stats = group_advantages([None, None], [0, 1])
    assert advantages.tolist() == [0, 0]
    assert "reward" not in stats and stats["reward/skipped_samples"] == 2


def test_fraction_of_groups_without_differences():
    _, stats = group_advantages([1, 1, 1, 0], [0, 0, 1, 1])
    assert stats["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(reward):
    with pytest.raises(ValueError, match="sample 1 .group 4."):
        group_advantages([0.0, reward], [4, 4])


def test_bad_arguments():
    with pytest.raises(ValueError, match="group id per reward"):
        group_advantages([1.0], [0, 1])
    with pytest.raises(ValueError, match="normalise"):
        group_advantages([1.0], [0], normalise="mean")
