"""The figures of a run and the share of its evaluations, by hand."""

import argparse
from pathlib import Path

import pytest

from benchmarks import training
from benchmarks.training import evaluation_cost, run_figures


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


def test_the_share_of_evaluations_is_of_all_steps_and_evaluations():
    rows = [
        {"step": 0, "eval_s": 4.0},
        {"step": 1, "step_time": 10.0},
        {"step": 2, "step_time": 20.0, "eval_s": 6.0},
    ]
    found = evaluation_cost(rows, 50.0)
    assert (found["share_of_run"], found["share_of_wall"]) == (0.25, 0.2)
    assert (found["steps"], found["evaluations"]) == (2, {"0": 4.0, "2": 6.0})


def test_the_share_of_the_gap_to_a_teacher_is_of_the_reward_before(monkeypatch):
    runs = [
        {"seed": 0, "before": [0.1, 0.0, 0.2], "gain": 0.3},
        {"seed": 1, "before": [0.2, 0.1, 0.3], "gain": 0.1},
    ]
    monkeypatch.setattr(training, "learns", lambda arguments, folder: {"runs": runs})
    monkeypatch.setattr(training, "evaluate", lambda settings, *policy: [0.6, 0.5, 0.7])
    named = argparse.Namespace(config="configs/distill_countdown.gin", questions=4, samples=1)
    found = training.distils(named, Path())
    assert [run["closed"] for run in found["runs"]] == [0.6, 0.25]
    assert (found["closed_min"], found["teacher"]) == (0.25, [0.6, 0.5, 0.7])
