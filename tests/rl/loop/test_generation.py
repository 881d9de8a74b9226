"""Scoring as a step of training sees it."""

import types
from concurrent.futures import Future

import pytest

from rl.loop.generation import Scorer
from rl.rewards.config import RewardConfig
from rl.rewards.pool import RewardPool
from rl.runtime.signals import Stopped, Watch


def test_a_run_that_is_asked_to_stop_does_not_wait_for_scores():
    asked = iter([False, True])
    system = types.SimpleNamespace(
        inputs=types.SimpleNamespace(tokenizer=None),
        rewards=RewardPool(RewardConfig()),
        watch=Watch(should_stop=lambda: next(asked)),
        drafter=None,
    )
    scorer = Scorer(system)
    scorer._waiting[7] = Future(), "text"  # whose score never comes
    with pytest.raises(Stopped):
        scorer.result(types.SimpleNamespace(request_id=7))
