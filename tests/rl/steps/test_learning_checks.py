"""Rewards that fail, and steps that teach nothing: what is reported, and what ends a run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from trajectories import trajectory

from reprise.rl.exchange.responses import scored_rewards, without_failed_groups
from reprise.rl.gin.loader import load
from reprise.rl.losses.advantages import RewardPart
from reprise.rl.records.trajectory import FinishReason
from reprise.rl.rewards.scores import Score
from reprise.rl.settings.config import TrainConfig
from reprise.rl.steps.learning_checks import (
    LearningWatch,
    NotLearning,
    check_failures,
    compared_groups,
    missing_signal,
)

GOOD, RAISED = Score({"f": 1.0}, 1.0), Score({"f": None}, 0.0, "f/raised: TypeError: 'x'")
LATE = Score({"f": None}, 0.0, "f/deadline: no result")


def config(*overrides):
    return load(TrainConfig, (), [*overrides, "Task.specs=('jsonl:x',)"])


def test_failures_are_reported_at_their_step_and_too_many_end_the_run():
    said = []
    check_failures(config(), said.append, [GOOD] * 8, 1)
    assert said == []
    check_failures(config(), said.append, [GOOD, RAISED], 2)  # a single one ends no run
    check_failures(config(), said.append, [GOOD] * 18 + [RAISED, LATE], 3)
    assert said == [
        "warning: step 2: 1 of 2 samples: f/raised: TypeError: 'x'",
        "warning: step 3: 1 of 20 samples: f/raised: TypeError: 'x'; "
        "1 of 20 samples: f/deadline: no result",
    ]
    with pytest.raises(NotLearning, match=r"step 4: 2 of 19 samples: .*max_failed_share=0\.1"):
        check_failures(config(), said.append, [GOOD] * 17 + [RAISED] * 2, 4)
    check_failures(config("Reward.max_failed_share=1.0"), said.append, [RAISED] * 2, 5)


def scored(rewards, failed=(), **fields):
    """Responses in groups of four."""
    some = [trajectory(i, [1], [2], reward=r, **fields) for i, r in enumerate(rewards)]
    return some, [
        Score({}, t.reward, "f/raised: E" if i in failed else None) for i, t in enumerate(some)
    ]


def test_a_failed_reward_counts_only_where_others_differ():
    """With `zero`: the first group differs by its failure alone, the second does without it."""
    some, scores = scored([1, 1, 1, 0, 1, 0.5, 1, 0], failed=(3, 7))
    assert scored_rewards(some, scores) == [1, 1, 1, None, 1, 0.5, 1, None]
    groups = [t.group_id for t in some]
    kept = without_failed_groups(some, scores, groups)
    assert [t.reward for t in kept] == [1, 1, 1, None, 1, 0.5, 1, 0]


def missing(rewards, *overrides, used=None, parts=(), **fields):
    some, _ = scored(rewards, **fields)
    one = config(*overrides)
    use = np.ones(len(some), bool) if used is None else np.array(used)
    return missing_signal(one, some, compared_groups(one, some), use, parts)


CUT = {"finish": FinishReason.LENGTH}
MASK = "Algorithm.mask_truncated=True"
EPISODES = "Environment.factory='env.py:Env'"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (missing([None] * 4), "no response has a reward"),
        (missing([0.0] * 8), "all rewards are 0: look at samples.jsonl"),
        (missing([0.0] * 4 + [1.0] * 4), "no group's rewards differ"),
        (missing([0.0] * 4 + [1.0] * 4, **CUT), "cut off at Sampling.max_new_tokens: raise it"),
        (missing([0.0, 1.0, 0.0, 1.0], MASK, **CUT), "cut off at Sampling.max_new_tokens: raise"),
        (
            missing([0.0] * 4 + [1.0] * 4, "Algorithm.name='dapo'", used=[False] * 8),
            "no group is left to train on, since no group's rewards differ",
        ),
        (missing([0.5] * 4, "Algorithm.name='ppo'"), "all rewards are 0.5"),
        (missing([0.0] * 4, EPISODES), "does the environment tell good episodes from bad ones"),
        (missing([0.0] * 4, EPISODES, **CUT), "a limit has stopped all episodes"),
    ],
)
def test_the_reason_is_named(reason, text):
    assert reason is not None and text in reason


def test_rewards_that_differ_teach():
    for rewards in ([0.0, 1.0, None, None], [0.0] * 4 + [1.0, 0.0, 0.0, 0.0]):
        assert missing(rewards) is None
    assert missing([0.0, 1.0] * 2, **CUT) is None, "they are not masked"
    assert missing([0.0] * 4 + [1.0] * 4, "Algorithm.name='ppo'") is None
    assert missing([]) is None, "all groups continue"


def test_parts_teach_where_their_sums_do_not_differ():
    """As GDPO compares them: each part of a reward with the same part of the others."""
    sums = [1.0] * 4
    format_part = RewardPart(1.0, [1.0, 0.0, 1.0, 0.0])
    answer_part = RewardPart(1.0, [0.0, 1.0, 0.0, 1.0])
    assert missing(sums, parts=[format_part, answer_part]) is None
    assert "all rewards are 1" in missing(sums)
    unused = [RewardPart(0.0, format_part.values), RewardPart(1.0, sums)]
    assert "all rewards are 1" in missing(sums, parts=unused), "a part without a weight is no part"
    some_used = [True, False, True, False]  # those left have equal parts
    assert missing(sums, parts=[format_part, answer_part], used=some_used) is not None


def test_a_run_of_steps_is_warned_about_and_ended():
    said, row = [], {"rewards/failures": 0, "completions/count": 100}
    watch = LearningWatch(config("Run.no_update_limit_steps=4"), said.append)
    for step, reason in enumerate([None, "why", None, "why", "why", "why"], 1):
        watch.after(step, row, reason)
    assert said == ["warning: step 6: 3 steps in a row have taught the policy nothing: why"]
    with pytest.raises(NotLearning, match="step 7: 4 steps .*why.*no_update_limit_steps"):
        watch.after(7, row, "why")


def test_failures_that_persist_end_the_run_and_rare_ones_do_not():
    watch = LearningWatch(config("Reward.max_failing_steps=3"), lambda text: None)
    counts = {"completions/count": 100}
    for step, failures in enumerate([2, 2, 1, 2, 2], 1):  # 1% may fail
        watch.after(step, counts | {"rewards/failures": failures}, None)
    with pytest.raises(NotLearning, match="failed in each of the last 3 steps"):
        watch.after(6, counts | {"rewards/failures": 2}, None)


@pytest.mark.parametrize(
    ("reasons", "warns"), [(["why"], True), ([None, "why"], False), ([], False)]
)
def test_a_short_run_without_any_update_ends_with_a_warning(reasons, warns):
    said = []
    watch = LearningWatch(config(), said.append)
    for step, reason in enumerate(reasons, 1):
        watch.after(step, {"rewards/failures": 0, "completions/count": 8}, reason)
    watch.end()
    assert said == ["warning: no step has taught the policy anything: why"] * warns


def test_bad_limits_are_refused():
    with pytest.raises(ValueError, match="max_failed_share must be in 0 … 1, got 1.5"):
        dataclasses.replace(config().reward, max_failed_share=1.5)
    with pytest.raises(ValueError, match="no_update_limit_steps must be at least 1, got 0"):
        dataclasses.replace(config().run, no_update_limit_steps=0)
