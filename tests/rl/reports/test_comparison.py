"""Ratios of several runs, against a calculation by hand."""

from reprise.rl.reports.comparison import comparison
from reprise.rl.reports.runs import Run

NAMES = ("time/rollout", "step_time", "rollout/generated_tokens", "reward")


def run(label, rows, evals=()):
    steps = [{"step": i + 1} | dict(zip(NAMES, row, strict=True)) for i, row in enumerate(rows)]
    return Run(label, steps, [], evals)


def evaluation(step, value, low, high):
    figure = "eval/one/pass@8"
    return {"step": step, figure: value, f"{figure}_low": low, f"{figure}_high": high}


def test_runs_are_compared_over_the_steps_that_all_have():
    first = run("plain", [(4.0, 6.0, 100.0, 0.5), (4.0, 4.0, 300.0, 0.75), (90.0, 90.0, 9.0, 0.0)])
    second = run("drafts", [(2.0, 4.0, 100.0, 0.5), (3.0, 3.5, 100.0, 1.0)])
    assert comparison([first, second]) == [
        {
            "run": "plain", "steps": "2", "rollout s": "8 (1.00)", "step s": "10 (1.00)",
            "generated tokens": "400 (1.00)", "mean reward": "0.625 (1.00)",
        },
        {
            "run": "drafts", "steps": "2", "rollout s": "5 (0.62)", "step s": "7.5 (0.75)",
            "generated tokens": "200 (0.50)", "mean reward": "0.75 (1.20)",
        },
    ]  # fmt: skip
    assert comparison([first]) == []


def test_the_last_evaluations_have_their_intervals():
    rows = [(1.0, 1.0, 1.0, 0.0)]
    first = run("a", rows, [evaluation(0, 0.1, 0.0, 0.2), evaluation(9, 0.4, 0.3, 0.5)])
    second = run("b", rows, [evaluation(9, 0.6, 0.5, 0.7)])
    cells = [row["eval/one/pass@8"] for row in comparison([first, second])]
    assert cells == ["0.4 [0.3, 0.5] (1.00)", "0.6 [0.5, 0.7] (1.50)"]
    assert [row["mean reward"] for row in comparison([first, second])] == ["0", "0"]


def test_a_run_without_seconds_of_rollouts_has_none_to_compare():
    """Rollouts of a pipeline overlap with updates."""
    first = run("sync", [(4.0, 6.0, 1.0, 1.0)])
    second = Run("pipeline", [{"step": 1, "step_time": 3.0, "reward": 1.0}], [])
    rows = comparison([first, second])
    assert [row["rollout s"] for row in rows] == ["4 (1.00)", ""]
    assert [row["step s"] for row in rows] == ["6 (1.00)", "3 (0.50)"]
