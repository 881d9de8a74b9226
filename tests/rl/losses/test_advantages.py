"""Group advantages against hand-computed values, and the groups that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest

from reprise.rl.losses.advantages import (
    RewardPart,
    advantages_by_reward,
    gae,
    group_advantages,
    informative_groups,
    leave_one_out_advantages,
    overlong_penalties,
    response_advantages,
    reward_statistics,
    whiten,
)


def of_groups(rewards, group_ids, **options):
    """Advantages, and the statistics of the same rewards."""
    advantages = group_advantages(rewards, group_ids, **options)
    return advantages, reward_statistics(rewards, group_ids)


def test_two_groups_interleaved_with_std():
    # group 0: 1, 0, 0 -> mean 1/3, std (n - 1) sqrt(1/3); group 1: 2, 4 -> mean 3, std sqrt(2)
    advantages, stats = of_groups([1, 2, 0, 4, 0], [0, 1, 0, 1, 0])
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
    advantages, stats = of_groups([1.0, 0.0, 0.5, 0.5], [7, 7, 8, 8], normalise="none")
    assert advantages.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert stats["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(normalise):
    # the mean of three 0.1 is not 0.1 in floating point
    advantages, stats = of_groups([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1], normalise=normalise)
    assert advantages.tolist() == [0, 0, 0, 0]
    assert stats["frac_reward_zero_std"] == 1
    assert stats["reward/groups_of_one"] == 1


def test_a_reward_of_none_counts_in_no_mean():
    advantages, stats = of_groups([1.0, None, 0.0], [0, 0, 0], normalise="none")
    assert advantages.tolist() == [0.5, 0.0, -0.5]
    assert stats["reward"] == 0.5
    assert stats["reward/skipped_samples"] == 1


def test_nothing_scored_claims_no_mean():
    advantages, stats = of_groups([None, None], [0, 1])
    assert advantages.tolist() == [0, 0]
    assert "reward" not in stats and stats["reward/skipped_samples"] == 2


# GDPO: group 0 has rewards (1, 0), (0, 1), (0, 0), whose sums 1, 1, 0 hide the difference of the
# first two; group 1 has (1, 1), (1, 0), None
CORRECT = [1.0, 0.0, 0.0, 1.0, 1.0, None]
SHORT = [0.0, 1.0, 0.0, 1.0, 0.0, None]
SUMS = [1.0, 0.5, 0.0, 1.5, 1.0, None]
TWO_GROUPS = [0, 0, 0, 1, 1, 1]


def by_hand(group):
    values = np.array(group, np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


@pytest.mark.parametrize("normalise", ["batch", "none"])
def test_each_reward_is_compared_apart_then_summed_by_weight(normalise):
    parts = [RewardPart(1.0, CORRECT), RewardPart(0.5, SHORT)]
    first = by_hand([1, 0, 0]) + 0.5 * by_hand([0, 1, 0])
    second = np.zeros(2) + 0.5 * by_hand([1, 0])
    wanted = np.array([*first, *second])
    if normalise == "batch":
        wanted = (wanted - wanted.mean()) / (wanted.std(ddof=1) + 1e-4)
    found = response_advantages(SUMS, TWO_GROUPS, "group_by_reward", normalise, parts)
    assert found.dtype == np.float32 and found[5] == 0
    np.testing.assert_allclose(found[:5], wanted, rtol=1e-5, atol=1e-7)
    assert found[0] > found[1] > found[2]


def test_a_response_without_a_reward_is_in_no_mean_of_any_part():
    parts = [RewardPart(1.0, [1.0, 0.0, 5.0])]
    found = advantages_by_reward([1.0, 0.0, None], [0, 0, 0], parts, normalise="none")
    np.testing.assert_allclose(found, [*by_hand([1, 0]), 0.0], rtol=1e-5)


def test_a_reward_that_does_not_apply_to_a_response_adds_nothing_to_it():
    parts = [RewardPart(1.0, [1.0, 0.0, 0.5]), RewardPart(1.0, [1.0, 3.0, None])]
    found = advantages_by_reward([2.0, 3.0, 0.5], [0, 0, 0], parts, normalise="none")
    np.testing.assert_allclose(found, by_hand([1, 0, 0.5]) + [*by_hand([1, 3]), 0], atol=1e-6)


def test_groups_with_equal_rewards_get_exactly_zero_beside_others():
    parts = [RewardPart(1.0, [0.1, 0.1, 0.1, 1.0, 0.0, 0.0]), RewardPart(1.0, [2.0] * 6)]
    found = advantages_by_reward([2.1] * 3 + [3.0, 2.0, 2.0], TWO_GROUPS, parts)
    assert found[:3].tolist() == [0, 0, 0] and np.all(found[3:] != 0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(reward):
    with pytest.raises(ValueError, match="sample 1 .group 4."):
        group_advantages([0.0, reward], [4, 4])


def test_bad_arguments():
    with pytest.raises(ValueError, match="group id per reward"):
        group_advantages([1.0], [0, 1])


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_rewards_that_differ_by_rounding_alone_are_equal(normalise):
    noise = 0.1 + 0.2, 0.3, np.nextafter(0.3, 0), float(np.float32(0.3))
    large = 1e9 * noise[0], 1e9 * noise[1]
    for rewards in (noise, large):
        groups = [0] * len(rewards)
        assert not group_advantages(rewards, groups, normalise=normalise).any()
        assert not leave_one_out_advantages(rewards, groups).any()
        assert informative_groups(rewards, groups) == set()
        assert reward_statistics(rewards, groups)["frac_reward_zero_std"] == 1.0
    for rewards in ([0.3, 0.3 + 1e-6], [1e6, 1e6 + 1e-6], [0.0, 1e-6]):
        assert group_advantages(rewards, [0, 0], normalise=normalise).all()
        assert informative_groups(rewards, [0, 0]) == {0}


def test_leave_one_out_by_hand():
    # others of group 0: means 0.5, 1, 1.5; of group 1 (one missing): 4 and 2
    rewards, groups = [2.0, 1.0, 0.0, 2.0, None, 4.0], [0, 0, 0, 1, 1, 1]
    advantages = leave_one_out_advantages(rewards, groups)
    np.testing.assert_allclose(advantages, [1.5, 0, -1.5, -2, 0, 2], rtol=1e-6)


def test_leave_one_out_of_equal_rewards_and_of_one_is_exactly_zero():
    assert leave_one_out_advantages([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "normalise", "wanted"),
    [
        ("group", "none", [0.5, -0.5]),
        ("group", "std", [0.70700, -0.70700]),
        ("leave_one_out", "none", [1, -1]),
        ("gae", "batch", [0, 0]),
    ],
)
def test_estimators_by_name(estimator, normalise, wanted):
    got = response_advantages([1.0, 0.0], [0, 0], estimator, normalise)
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_informative_groups_are_those_whose_rewards_differ():
    rewards = [0.1, 0.1, 0.1, 1.0, None, 1.0, 0.0, 2.0, None]
    assert informative_groups(rewards, [0, 0, 0, 1, 1, 2, 2, 3, 4]) == {2}


def test_overlong_penalties_by_hand():
    lengths = [1, 6, 7, 8, 9, 10]
    wanted = [0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalties(lengths, 10, 4).tolist() == wanted
    assert overlong_penalties(lengths, 10, 0).tolist() == [0] * 6
    assert overlong_penalties([10], 10, 10).tolist() == [-1]
    assert overlong_penalties([9, 9, 9], [10, 9, 9], [2, 4, 0]).tolist() == [-0.5, -1, 0]


def test_gae_by_hand():
    # reward 2 at the end; values 1, 2, 4; gamma = lambda = 1/2
    # deltas: 1/2·2 - 1 = 0, 1/2·4 - 2 = 0, 2 - 4 = -2; A = -2, -2/4, -2/16 from the back
    # the second row has one token: 1 - 3 = -2
    values = np.array([[1.0, 2.0, 4.0], [3.0, 99.0, 99.0]], np.float32)
    rewards = np.array([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    advantages, returns = gae(rewards, values, np.array([3, 1]), gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantages, [[-0.125, -0.5, -2], [-2, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0.875, 1.5, 2], [1, 0, 0]], rtol=1e-6)


def test_gae_between_its_two_ends():
    rng = np.random.default_rng(0)
    values, rewards = rng.normal(size=(2, 5)).astype(np.float32), np.array([0.7, -0.3])
    lengths, inside = np.array([5, 3]), np.arange(5) < np.array([[5], [3]])
    at_the_end = rewards[:, None] * (np.arange(5) == lengths[:, None] - 1)
    whole, returns = gae(at_the_end, values, lengths, gamma=1, gae_lambda=1)
    # lambda 1: what was earned, less what was expected
    np.testing.assert_allclose(returns, np.where(inside, rewards[:, None], 0), atol=1e-6)
    np.testing.assert_allclose(whole, np.where(inside, rewards[:, None] - values, 0), atol=1e-6)
    step, _ = gae(at_the_end, values, lengths, gamma=1, gae_lambda=0)
    # lambda 0: what the next value says, less what this one said
    np.testing.assert_allclose(step[0, :-1], values[0, 1:] - values[0, :-1], atol=1e-6)
    assert step[1, 2] == pytest.approx(rewards[1] - values[1, 2], abs=1e-6)


def test_whitening_is_over_all_tokens_at_once():
    values, mask = np.array([[1.0, 2.0], [6.0, 99.0]]), np.array([[1, 1], [1, 0]], bool)
    # mean 3, variance (4 + 1 + 9) / 2 = 7
    np.testing.assert_allclose(
        whiten(values, mask), np.array([[-2, -1], [3, 0]]) / 7**0.5, rtol=1e-6
    )
    assert whiten(np.full((1, 3), 0.1), np.ones((1, 3), bool)).tolist() == [[0, 0, 0]]
    assert whiten(values, np.zeros((2, 2), bool)).tolist() == [[0, 0], [0, 0]]
