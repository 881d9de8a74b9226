"""The share of a run that its evaluations take, by hand."""

from benchmarks.eval_cost import cost


def test_the_share_is_of_all_steps_and_evaluations():
    figures = {"eval/questions": 64, "eval/mean_reward_low": 0.5, "eval/mean_reward_high": 0.75}
    rows = [
        {"step": 0, "eval_s": 4.0, "eval/mean_reward": 0.25, **figures},
        {"step": 1, "step_time": 10.0},
        {"step": 2, "step_time": 20.0, "eval_s": 6.0, "eval/mean_reward": 0.625, **figures},
    ]
    found = cost(rows, 50.0)
    assert (found["share_of_run"], found["share_of_wall"]) == (0.25, 0.2)
    assert (found["steps"], found["evaluations"]) == (2, {"0": 4.0, "2": 6.0})
    assert (found["reward_before"], found["reward_after"]) == (0.25, 0.625)
