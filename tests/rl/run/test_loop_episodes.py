"""The loop with an environment: the same bits with drafts, with slow environments, and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from loop_runs import finish, stop_after

ENVIRONMENT = '''"""Dialogues about digits, slow on command, with faults on command."""

import os
import random
import time

DELAY_S = float(os.environ.get("EPISODE_DELAY_S", 0))


class Digits:
    def reset(self, **columns):
        self.reward = 0.0

    def step(self, completion):
        time.sleep(DELAY_S * random.SystemRandom().random())
        self.reward += sum(c in "02468" for c in completion)
        return None if completion[-1:] == "5" else f"+{random.randrange(10)}="


class Fails(Digits):
    def step(self, completion):
        if completion[-1:] == "1":
            raise KeyError(completion)
        if completion[-1:] == "2":
            os._exit(3)
        return super().step(completion)
'''
DRAFTS = 'Speculation.budget="fixed:1"', 'Speculation.sources=("group", "own")'


@pytest.fixture(scope="module")
def settings(tiny):
    file = tiny.parent / "environment.py"
    file.write_text(ENVIRONMENT)

    def of(name="Digits"):
        return (
            f"Environment.factory='{file}:{name}'",
            *("Environment.max_turns=3", "Environment.max_environment_tokens=6"),
            *('Reward.functions=("environment",)', "Sampling.stop_ids=(3,4,5,6,7,8)"),
        )

    return of


@pytest.fixture(scope="module")
def whole(tiny, settings, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("whole"), *settings())


def tokens_of(finished):
    return [json.loads(line)["completion"] for line in finished.samples.splitlines()]


def test_episodes_have_turns_and_teach(whole):
    rows = [row for row in whole.rows if row["step"]]
    assert all(row["episodes/turns"] > 1 for row in rows)
    assert all(row["episodes/inserted_tokens"] > 0 for row in rows)
    assert all(row["episodes/ends/failed"] == 0 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    # the sampler and the trainer compute the same log-probs of all drawn tokens
    assert all(row["mismatch_kl"] < 1e-6 for row in rows)
    samples = [json.loads(line) for line in whole.samples.splitlines()]
    assert len({sample["end"] for sample in samples}) > 1
    assert any(m["role"] == "user" for sample in samples for m in sample["messages"])


def test_drafts_change_no_token(tiny, settings, whole, tmp_path):
    drafted = finish(tiny, tmp_path, *settings(), *DRAFTS)
    assert tokens_of(drafted) == tokens_of(whole)
    for one, other in zip(drafted.leaves, whole.leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_slow_environments_change_no_bit(tiny, settings, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("EPISODE_DELAY_S", "0.02")
    slow = finish(tiny, tmp_path, *settings())
    assert slow.samples == whole.samples
    for one, other in zip(slow.leaves, whole.leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_resumed_run_has_the_same_bits(tiny, settings, whole, tmp_path):
    """Rounds depend on the speed of environments; tokens, rewards and weights do not."""
    stop_after(tiny, tmp_path, 1, *settings())
    resumed = finish(tiny, tmp_path, *settings())
    assert resumed.samples == whole.samples
    for one, other in zip(resumed.leaves, whole.leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    names = "reward", "loss", "grad_norm", "episodes/turns", "num_tokens"
    for row, expected in zip(resumed.rows, whole.rows, strict=True):
        assert [row.get(name) for name in names] == [expected.get(name) for name in names]


@pytest.mark.fault
def test_failures_cost_their_episodes(tiny, settings, tmp_path):
    more = "Reward.max_failed_share=1.0"
    failing = finish(tiny, tmp_path, *settings("Fails"), more)
    kinds = {name for row in failing.rows for name in row if name.startswith("episodes/failures/")}
    assert kinds == {"episodes/failures/raised", "episodes/failures/died"}
    samples = [json.loads(line) for line in failing.samples.splitlines()]
    failed = [sample for sample in samples if sample["reward_failure"] is not None]
    assert failed and all(sample["reward"] is None for sample in failed)
    assert any(sample["reward"] is not None for sample in samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('Reward.functions=("task",)', "since the environment gives the reward"),
        ('Sched.mode="pipeline"', "which Sched.mode does not support"),
        ("Sched.workers=2", "which Sched.workers does not support"),
        ('Reuse.mode="coupled"', "which Reuse.mode does not support"),
        ("Environment.max_environment_tokens=60", "set Environment.max_tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tiny, settings, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        finish(tiny, tmp_path, *settings(), change)


def test_the_reward_of_an_environment_needs_one(tiny, tmp_path):
    with pytest.raises(ValueError, match="no environment gives a reward"):
        finish(tiny, tmp_path, 'Reward.functions=("environment",)')
