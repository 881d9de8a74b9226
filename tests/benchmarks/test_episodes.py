"""Figures of runs with episodes, and counts of tokens, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import episodes
from reprise.rl.records.episode import INSERTED


def test_the_gain_is_of_the_first_and_the_last_evaluation():
    def evaluation(mean):
        name = "eval/mean_reward"
        return {name: mean, f"{name}_low": mean - 0.1, f"{name}_high": mean + 0.1}

    def step(number, turns):
        return {"step": number, "reward": 0.5, "step_time": 2.0, "episodes/turns": turns}

    rows = [
        {"step": 0, **evaluation(0.25)},
        step(1, 1.5) | evaluation(0.5),
        step(2, 2.0) | evaluation(0.75),
    ]
    found = episodes.run_figures(rows)
    assert found["gain"] == pytest.approx(0.5) and found["steps"] == 2
    assert (found["turns_before"], found["turns_after"], found["step_time_s"]) == (1.5, 2.0, 2.0)
    assert found["before"] == [0.25, 0.15, 0.35] and found["after"][0] == 0.75


def test_missing_tokens_differ():
    assert episodes.num_differing([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert episodes.num_differing([[1, 2, 3], [4]], [[1, 5], [4, 6]]) == 3


def played(group, prompt_tokens, turns):
    turns = np.array(turns)
    episode = SimpleNamespace(
        turns=turns, num_turns=turns.max() + 1, num_inserted=int((turns == INSERTED).sum())
    )
    return SimpleNamespace(group_id=group, prompt_ids=np.zeros(prompt_tokens), episode=episode)


def test_new_tokens_are_counted_once():
    rows = [played(0, 10, [0, 0, -1, -1, 1]), played(0, 10, [0]), played(1, 5, [0])]
    found = episodes.Played(rows, None)
    assert episodes.num_new_tokens(found) == 10 + 5 + 1 + 2
    assert episodes.num_prompt_tokens(found) == (10 + 14) + 10 + 5
