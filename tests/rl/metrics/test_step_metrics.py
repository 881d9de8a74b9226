"""Metrics and sample rows of one step, against numbers worked out by hand."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from trajectories import episode, trajectory

from reprise.rl.data.tasks import Example
from reprise.rl.metrics.step_metrics import sample_rows, step_metrics
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import FinishReason
from reprise.rl.rewards.scores import Score


class Letters:
    """Decodes 0 as a, 1 as b and so on; 9 is special."""

    def decode(self, ids, skip_ends=True):
        ids = ids[:-1] if skip_ends and ids and ids[-1] == 9 else ids
        return "".join("abcdefghi$"[i] for i in ids)


def answer(i, num_tokens, finish):
    """One of a group of two."""
    of = {"group": i // 2, "sample": i % 2, "logprobs": -0.5, "reward": None}
    return trajectory(i, [9, 2, 1], [0] * num_tokens, finish=finish, **of)


def stats(**changes):
    # 10 rounds of 4 slots and 5 rounds of 2 slots: 50 places for a token
    rounds = collections.Counter({(4, 1, 64): 10, (2, 1, 64): 5})
    counts = {"fetches": 7, "tokens": 20, "prefilled_tokens": 6, "rounds": rounds}
    return EngineStats(**(counts | changes))


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TRAJECTORIES = [answer(0, 2, STOP), answer(1, 4, STOP), answer(2, 9, LENGTH)]


def scores(*values, failure=None):
    return [Score({"digits": v}, 0.0 if v is None else v, None) for v in values[:-1]] + [
        Score({"digits": values[-1]}, values[-1], failure)
    ]


def test_tokens_of_an_environment_do_not_count():
    of = {"sample": 0, "logprobs": -0.5, "reward": None}
    one = episode(0, [9], [[1, 2], [3, 4, 5], [6]], group=0, **of)
    none = episode(1, [9], [], group=1, **of)
    row = step_metrics([one, none], scores(1.0, None), stats(), step=3)
    assert row["rollout_tokens"] == 3
    assert row["completions/max_length"] == 3 and row["completions/min_length"] == 0
    assert row["diversity/distinct_1"] == 1.0
    assert row["episodes/inserted_tokens"] == 1.5
    assert "completions/max_length" not in step_metrics([none], scores(None), stats(), step=3)
    examples = [Example("e0", "ca", "b", {}, "t")] * 2
    unscored = [Score({}, None)] * 2
    [shown, _] = sample_rows(Letters(), examples, [one, none], ["", ""], unscored, None)
    assert shown["num_tokens"] == 3 and shown["logprob"] == -1.5
    assert shown["end"] == "done" and shown["turn_rewards"] == [None, None]


def test_lengths_rewards_and_engine_counts():
    row = step_metrics(TRAJECTORIES, scores(1.0, 0.0, 2.0), stats(), step=3)
    assert row == {
        "completions/mean_length": 5.0,
        "completions/min_length": 2,
        "completions/max_length": 9,
        "completions/clipped_ratio": pytest.approx(1 / 3),
        "completions/count": 3,
        "completions/mean_terminated_length": 3.0,
        "rollout/off_policyness": 2.0,
        "rollout/off_policyness/max": 2,
        "rollout/rounds": 15,
        "rollout/fetches": 7,
        "rollout/prefilled_tokens": 6,
        "rollout/preemptions": 0,
        "rollout/slot_use": 20 / 50,
        "rollout/generated_tokens": 20,
        "rollout/tail_s": 0.0,
        "rollout_tokens": 15,
        "diversity/distinct_1": 1 / 15,
        "diversity/self_bleu": pytest.approx((math.exp(-1) + (1 / 1200) ** 0.25) / 2),
        "rewards/digits/mean": 1.0,
        "rewards/digits/std": 1.0,  # over n − 1
        "rewards/failures": 0,
    }


def test_values_that_are_none_are_left_out_and_failures_are_counted():
    row = step_metrics(
        TRAJECTORIES, scores(None, 3.0, None, failure="digits/raised: x"), stats(), step=3
    )
    assert (row["rewards/digits/mean"], row["rewards/digits/std"]) == (3.0, 0.0)
    assert row["rewards/failures"] == 1


def test_the_tasks_of_a_mix_have_means_of_their_own():
    rewards, tasks = scores(1.0, 0.0, 3.0), ("sums", "sums", "words")
    row = step_metrics(TRAJECTORIES, rewards, stats(), step=3, tasks=tasks)
    means = {name: row[f"rewards/{name}/mean"] for name in ("digits", *tasks)}
    assert means == {"digits": pytest.approx(4 / 3), "sums": 0.5, "words": 3.0}


def test_a_function_without_any_value_has_no_mean():
    row = step_metrics(TRAJECTORIES, scores(None, None, None), stats(), step=3)
    assert not [name for name in row if name.startswith("rewards/digits")]


def test_no_terminated_length_where_all_responses_are_truncated():
    cut = [answer(i, 9, LENGTH) for i in range(3)]
    row = step_metrics(
        cut, scores(1.0, 1.0, 1.0), stats(tokens=0, rounds=collections.Counter()), step=3
    )
    assert "completions/mean_terminated_length" not in row
    assert (row["completions/clipped_ratio"], row["rollout/slot_use"]) == (1.0, 0.0)


def test_a_sample_row_holds_what_explains_its_reward():
    examples = [Example("e0", "ca", "b", {}, "t"), Example("e1", "ca", None, {}, "t")]
    failed = Score({"digits": None}, 0.0, "digits/raised: KeyError")
    rows = sample_rows(
        Letters(),
        examples,
        TRAJECTORIES,
        ["aa", "aaaa", "aaaaaaaaa"],
        [*scores(1.0, 0.5), failed],
        np.array([0.5, -0.5, 0.0], np.float32),
    )
    assert rows[2] == {
        "example_id": "e1",
        "sample_index": 0,
        "prompt": "$cb",  # special tokens are shown: they are what the policy read
        "completion": "aaaaaaaaa",
        "answer": None,
        "reward": 0.0,
        "rewards": {"digits": None},
        "reward_failure": "digits/raised: KeyError",
        "advantage": 0.0,
        "logprob": -4.5,
        "num_tokens": 9,
        "finish_reason": "length",
    }
    assert [row["example_id"] for row in rows] == ["e0", "e0", "e1"]
    assert [row["advantage"] for row in rows] == [0.5, -0.5, 0.0]
    unjudged = sample_rows(Letters(), examples, TRAJECTORIES, ["", "", ""], scores(1, 1, 1), None)
    assert [row["advantage"] for row in unjudged] == [None] * 3
