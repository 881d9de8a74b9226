"""A step's rewards on their way to advantages."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from trajectories import trajectory

from reprise.rl.learner import trainer
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.scores import Score
from reprise.rl.steps import step as run_step


def system(**algorithm):
    config = SimpleNamespace(algorithm=AlgorithmConfig(**algorithm))
    return SimpleNamespace(config=config, learner=None, leave_update_if_stopped=print)


def test_the_kl_penalty_is_the_sum_over_a_response(monkeypatch):
    some = [trajectory(0, [1], [2, 3], reward=1.0), trajectory(1, [1], [2], reward=None)]
    kl = [np.array([0.5, -0.25], np.float32), np.array([1.0], np.float32)]
    monkeypatch.setattr(trainer, "token_kl", lambda *args: kl)
    rloo = system(name="rloo", kl_coefficient=0.5, kl_in_reward=True)
    penalised, metrics = run_step._subtract_kl(rloo, some)
    assert [t.reward for t in penalised] == [1.0 - 0.5 * 0.25, None]
    assert metrics["kl"] == pytest.approx(1.25 / 3)


def test_parts_of_rewards_are_the_functions_by_weight_and_the_penalties():
    """A response that failed and is worth 0 has 0 in each part."""
    config = SimpleNamespace(reward=RewardConfig(("a.py:f", "a.py:g"), weights=(1.0, 0.5)))
    scores = [
        Score({"f": 1.0, "g": 2.0}, 2.0),
        Score({"f": 0.5, "g": None}, 0.5),
        Score({"f": 3.0, "g": None}, 0.0, "g/error: no"),
    ]
    rewards = [2.0 - 0.25, 0.5, 0.0]
    some = [trajectory(i, [1], [2], reward=x) for i, x in enumerate(rewards)]
    parts = run_step.reward_parts(config, scores, some)
    assert [part.weight for part in parts] == [1.0, 0.5, 1.0]
    assert [part.values for part in parts] == [
        [1.0, 0.5, 0.0],
        [2.0, None, 0.0],
        [-0.25, 0.0, 0.0],
    ]


@pytest.mark.parametrize(
    "algorithm",
    [{"kl_coefficient": 0.5}, {"name": "ppo", "kl_coefficient": 0.5, "kl_in_reward": True}],
)
def test_a_kl_in_the_loss_or_in_the_critics_targets_is_in_no_reward(algorithm):
    some = [trajectory(0, [1], [2, 3], reward=1.0)]
    penalised, metrics = run_step._subtract_kl(system(**algorithm), some)
    assert penalised[0].reward == 1.0 and metrics == {}
