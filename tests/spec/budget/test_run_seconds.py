"""A run's own rounds: how they correct its table of seconds, and when its drafts end."""

import pytest

from spec.budget.run_seconds import PRIOR_ROUNDS, RunSeconds, StepSeconds
from spec.round_times import RoundTimes

PLAIN, FEW, MANY = (4, 4, 64), (4, 8, 64), (4, 16, 64)
TABLE = RoundTimes({PLAIN: 1.0, FEW: 1.5, MANY: 4.0}, {"model": {(4, 2, 64): 0.5}})


def after(*rounds, saved_s=0.0, losing_steps=0):
    run = RunSeconds(losing_steps)
    for of_step in rounds:
        run.played(StepSeconds(100.0, saved_s, of_step))
    return run


def test_without_a_round_the_table_stands():
    assert after().corrected(TABLE) is TABLE
    assert after({(8, 8, 64): (9, 1.0)}).corrected(TABLE) is TABLE, "a bucket that it has not"


def test_a_slower_run_slows_what_was_not_run_as_well():
    got = after({PLAIN: (10, 3.0)}).corrected(TABLE)
    assert [got(*b) for b in (PLAIN, FEW, MANY)] == [3.0, 4.5, 12.0]
    assert got.draft("model", 4, 2, 64) == 1.5


def test_a_bucket_goes_to_what_was_measured_as_it_is_run():
    n = int(PRIOR_ROUNDS)
    once = after({PLAIN: (n, 1.0), FEW: (n, 3.0)}).corrected(TABLE)
    k = (1.0 + 3.0) / (1.0 + 1.5)
    assert once(*PLAIN) == pytest.approx((k + 1) / 2)
    assert once(*FEW) == pytest.approx((1.5 * k + 3) / 2)
    assert once(*MANY) == pytest.approx(4 * k)
    often = after(*[{PLAIN: (1000, 1.0), FEW: (1000, 3.0)}] * 9).corrected(TABLE)
    assert often(*PLAIN) == pytest.approx(1, abs=0.01)
    assert often(*FEW) == pytest.approx(3, abs=0.02)


def test_new_rounds_count_more_than_old_ones():
    run = after({PLAIN: (100, 1.0)}, *[{PLAIN: (100, 2.0)}] * 12)
    assert run.corrected(TABLE)(*PLAIN) == pytest.approx(2, abs=0.02)


def test_a_measured_round_never_falls_with_more_nodes():
    got = after({PLAIN: (10**6, 3.0), FEW: (10**6, 1.0)}).corrected(TABLE)
    assert got(*PLAIN) == got(*FEW) == pytest.approx(2, abs=0.01) and got(*MANY) > 2


def test_drafts_are_off_after_steps_in_a_row_that_lose():
    for saved_s, steps, is_off in [(-2, 3, True), (-2, 2, False), (-0.5, 9, False), (1, 9, False)]:
        assert after(*[{}] * steps, saved_s=saved_s, losing_steps=3).is_off == is_off
    run = after({}, {}, saved_s=-2.0, losing_steps=3)
    assert run.lost == (4.0, 200.0)
    run.played(StepSeconds(100.0, 0.0, {}))
    run.played(StepSeconds(100.0, -2.0, {}))
    assert not run.is_off, "not in a row"
    assert not after(*[{}] * 9, saved_s=-2.0).is_off, "0: never"
    run = after(*[{}] * 3, saved_s=-2.0, losing_steps=3)
    run.played(StepSeconds(100.0, 5.0, {}))
    assert run.is_off, "for the rest of the run"
