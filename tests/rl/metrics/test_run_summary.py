"""The summary of a run, from its rows."""

import pytest

from reprise.rl.metrics.run_summary import summary_lines


def row(step, **more):
    names = {"rollout": "time/rollout", "update": "time/update", "total": "step_time"}
    names |= {"accepted": "spec/accepted_tokens", "saved_s": "spec/seconds_saved"}
    names |= {"drawn": "rollout/generated_tokens"}
    return {"step": step} | {names[k]: v for k, v in more.items()}


def test_time_and_drafts_are_summed_over_steps():
    rows = [
        row(1, rollout=9.0, update=6.0, total=20.0, drawn=1500.0, accepted=0.0, saved_s=-0.5),
        row(2, rollout=7.0, update=3.0, total=20.0, drawn=2500.0, accepted=1000.0, saved_s=4.5),
    ]
    time_line, drafts_line = summary_lines(rows, [{"step": 0, "eval_s": 2.5}])
    assert time_line == "time: 40 s in 2 steps (rollout 40%, update 22%), 2.5 s in evaluations"
    # 16 s of rollouts would have been 20 s
    assert drafts_line == (
        "drafts: 25% of 4,000 response tokens were accepted draft tokens; by measured rounds "
        "drafts saved about 4.0 s, 20% of plain rollouts"
    )


def test_seconds_of_disturbed_rounds_are_no_seconds_of_plain_rollouts():
    rows = [row(1, rollout=47.0, total=60.0, drawn=100.0, accepted=30.0, saved_s=4.0)]
    rows[0]["spec/disturbed_seconds"] = 31.0
    assert summary_lines(rows)[1].endswith("drafts saved about 4.0 s, 20% of plain rollouts")


def test_reused_tokens_are_a_share_of_all_response_tokens():
    rows = [row(1, rollout=9.0, total=20.0, drawn=600.0, accepted=300.0, saved_s=1.0)]
    rows[0] |= {"spec/verified_prefix_tokens": 40.0, "spec/cached_responses": 10.0}
    assert (
        "30% of 1,000 response tokens were accepted draft tokens, 40% were reused"
        in (summary_lines(rows)[1])
    )


def test_a_loss_is_called_one():
    rows = [row(1, rollout=10.0, total=10.0, drawn=100.0, accepted=3.0, saved_s=-0.5)]
    # plain rollouts would have taken 9.5 s
    assert summary_lines(rows)[1].endswith("drafts lost about 0.5 s, 5% of plain rollouts")
    rows = [row(1, rollout=8.0, total=10.0, drawn=100.0, accepted=3.0, saved_s=-4.0)]
    assert summary_lines(rows)[1].endswith("drafts lost about 4.0 s, 100% of plain rollouts")


def test_a_run_without_drafts_says_when_drafts_pay():
    rows = [row(1, rollout=8.0, total=10.0, drawn=100.0, accepted=0.0, saved_s=-0.01)]
    assert summary_lines(rows)[1].startswith("drafts: none were verified; they pay if")
    rows[0]["spec/accept_rate"] = 0.0
    assert summary_lines(rows)[1].endswith("drafts lost about 0.0 s, 0% of plain rollouts")


def test_seconds_of_several_workers_are_no_share_of_the_clocks():
    rows = [row(1, rollout=10.0, total=10.0, drawn=9.0, accepted=3.0, saved_s=-15.0)]
    rows[0]["workers/lost"] = 0.0
    assert summary_lines(rows)[1].endswith("drafts lost about 15 s, summed over workers")


def test_a_run_that_cannot_draft_has_no_line_on_drafts_and_none_without_steps():
    assert summary_lines([row(1, rollout=1.0, total=4.0)]) == [
        "time: 4.0 s in 1 steps (rollout 25%)"
    ]
    assert summary_lines([], [{"step": 0, "eval_s": 2.0}]) == []


@pytest.mark.parametrize("value", [None, "9", 1e300, True])
def test_what_no_run_writes_does_not_end_it(value):
    strange = row(2, rollout=value, total=value, saved_s=value, accepted=value, drawn=value)
    assert len(summary_lines([row(1, rollout=1.0, total=2.0), strange])) == 2
