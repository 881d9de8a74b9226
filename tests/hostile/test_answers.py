"""Answers that try to run, write, hang or raise, put to the real workers."""

from pathlib import Path

import pytest

from reprise.rl.data.tasks import Example
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import ScoreJob
from tests.hostile import answers

SPY = Path(answers.__file__).with_name("spy.py")


@pytest.mark.fault
def test_hostile_answers_execute_nothing_write_nothing_and_end():
    counts = answers.run(budget=180, num_bombs=1)
    assert counts.pop("tried") == 181
    assert counts == {"executions": 0, "hangs": 0, "tracebacks": 0, "outside_writes": 0}


def test_the_spy_sees_forbidden_effects():
    functions = tuple(f"{SPY}:{name}" for name in ("begin", "planted", "seen"))
    example = Example("x#0", "q", "1", {}, "jsonl:x")
    with RewardPool(RewardConfig(functions, deadline_s=300.0, workers=1)) as pool:
        jobs = [pool.submit(ScoreJob(example, text)) for text in ("evaluate", "write", "nothing")]
        seen = [job.result(timeout=300).values["seen"] for job in jobs]
    assert 1.0 <= seen[0] < 1e6  # compiled and executed
    assert seen[1:] == [1e6, 0.0]  # opened for writing; nothing
