"""The figures of a run, by hand."""

import pytest

from benchmarks.training import run_figures


def test_the_gain_at_least_compares_the_near_ends_of_the_intervals():
    def evaluation(low, mean, high):
        name = "eval/mean_reward"
        return {name: mean, f"{name}_low": low, f"{name}_high": high, "eval_s": 1800.0}

    def step(number, reward):
        return {
            "step": number,
            "reward": reward,
            "step_time": 900.0 * number,
            "completions/count": 8,
            "num_tokens": 100 * number,
        }

    found = run_figures(
        [
            {"step": 0, **evaluation(0.05, 0.1, 0.15)},
            step(1, 0.25),
            step(2, 0.75) | evaluation(0.35, 0.5, 0.65),
        ]
    )
    assert found["gain"] == pytest.approx(0.4) and found["gain_at_least"] == pytest.approx(0.2)
    assert (found["steps"], found["responses"], found["response_tokens"]) == (2, 16, 200)
    assert (found["hours"], found["step_time_s"]) == (1.75, 1350.0)
    assert found["curve"]["evaluations"] == {"0": [0.1, 0.05, 0.15], "2": [0.5, 0.35, 0.65]}
    assert found["curve"]["training"] == [0.5]
