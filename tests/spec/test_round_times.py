"""Tables of seconds by bucket, and how the rounds of a run correct them."""

from __future__ import annotations

import pytest

from reprise.spec.round_times import PRIOR_ROUNDS, RoundTimes, RunSeconds, StepSeconds, monotone

TIMES = RoundTimes(
    {(8, 8, 64): 1.0, (8, 32, 64): 2.0},
    {"learned": {(8, 1, 64): 0.5, (8, 5, 64): 2.5, (4, 1, 64): 9.0}, "model": {(8, 2, 64): 7.0}},
    {(8, 64, 64): 3.0},
    short_seconds={(8, 8, 64): 0.25},
)


def test_depths_between_two_are_on_their_line():
    found = [TIMES.draft("learned", 8, depth, 64) for depth in (1, 3, 5)]
    assert found == pytest.approx([0.5, 1.5, 2.5])
    assert TIMES.draft("learned", 4, 3, 64) == 9.0  # one point
    assert TIMES.draft("learned", 16, 3, 64) == 0.0  # none
    assert TIMES.draft("model", 8, 3, 64) == 7.0
    assert TIMES.draft_depths("learned") == (1, 5) and TIMES.draft_depths("model") == (2,)
    assert RoundTimes({}).draft_depths("learned") == ()


def test_rows_and_back():
    again = RoundTimes.from_rows(TIMES.rows())
    assert again.rows() == TIMES.rows() and len(TIMES.rows()) == 8
    names = {
        "packed round of short rows",
        "packed round",
        "draws in chunks",
        "draft learned",
        "draft model",
    }
    assert {row[0] for row in TIMES.rows()} == names


def test_seconds_of_a_round_are_on_a_line_over_its_live_positions():
    """An eighth of 64 positions and half of them."""
    assert [TIMES(8, 8, 64, live) for live in (0, 8, 20, 32, 56)] == [0.25, 0.25, 0.625, 1.0, 1.75]
    assert TIMES(8, 32, 64, 8) == TIMES(8, 32, 64) == 2.0, "no short row was measured"
    assert TIMES(4, 4, 64, 8) is None
    twice = TIMES.scaled(2.0, {at: 2 * t for at, t in TIMES.rounds.items()})
    assert twice(8, 8, 64, 8) == 0.5
    # noise: a short row never takes longer
    odd = RoundTimes({(8, 8, 64): 1.0}, short_seconds={(8, 8, 64): 1.5})
    assert odd(8, 8, 64, 8) == odd(8, 8, 64, 60) == 1.5
    with pytest.raises(ValueError, match="expected short rows of rounds in the table"):
        RoundTimes.from_rows([["packed round of short rows", 8, 8, 64, 1.0]])


def test_chunks_verify_where_a_token_takes_fewer_seconds_there_than_as_a_node():
    assert TIMES.chunks_pay(8, 64, 64)  # 3 / (0.75 · 64) < 2 / (0.6 · 32)
    fast_nodes = RoundTimes({(8, 8, 64): 1.0, (8, 32, 64): 1.1}, None, {(8, 64, 64): 3.0})
    assert not fast_nodes.chunks_pay(8, 64, 64)
    none_measured = RoundTimes({(8, 8, 64): 1.0, (8, 32, 64): 1.4})
    assert not none_measured.chunks_pay(8, 64, 64), "nodes are measured, chunks are not"
    assert none_measured.chunks_pay(8, 128, 64), "neither is"
    assert RoundTimes({}).chunks_pay(8, 64, 64)
    assert TIMES.without_drafts("learned").chunks_pay(8, 64, 64)


def test_rows_of_an_unknown_table_are_refused():
    assert RoundTimes.from_rows(TIMES.rows()).rows() == TIMES.rows()
    named = (
        "packed round, packed round of short rows, draws in chunks, draws in chunks with a round, "
        "host of a fetch or draft …"
    )
    with pytest.raises(ValueError, match=f"expected {named}, got 'lookup'"):
        RoundTimes.from_rows([*TIMES.rows(), ["lookup", 8, 4, 64, 1.5]])


def test_more_nodes_never_take_less_time():
    """Noise of the clock, in two buckets of positions and two of slots."""
    seconds = {(4, n, 64): s for n, s in zip((4, 8, 16, 32), (2.0, 1.0, 3.0, 3.5), strict=True)}
    seconds |= {(4, n, 128): s for n, s in zip((4, 8, 16, 32), (1.0, 9.0, 4.0, 2.0), strict=True)}
    fitted = monotone(seconds | {(8, 8, 64): 0.1})
    assert [fitted[4, n, 64] for n in (4, 8, 16, 32)] == [1.5, 1.5, 3.0, 3.5]
    assert [fitted[4, n, 128] for n in (4, 8, 16, 32)] == [1.0, 5.0, 5.0, 5.0]
    assert fitted[8, 8, 64] == 0.1 and len(fitted) == 9


PLAIN, FEW, MANY = (4, 4, 64), (4, 8, 64), (4, 16, 64)
TABLE = RoundTimes({PLAIN: 1.0, FEW: 1.5, MANY: 4.0}, {"model": {(4, 2, 64): 0.5}})


def after(*rounds, saved_s=0.0, losing_steps=0):
    run = RunSeconds(losing_steps)
    for of_step in rounds:
        run.played(StepSeconds(100.0, saved_s, of_step, True))
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


def step(saved_s, has_history=True):
    return StepSeconds(100.0, saved_s, {}, has_history)


def test_drafts_are_off_after_steps_in_a_row_that_lose():
    for saved_s, steps, is_off in [(-2, 3, True), (-2, 2, False), (-0.5, 9, False), (1, 9, False)]:
        assert after(*[{}] * steps, saved_s=saved_s, losing_steps=3).is_off(True) == is_off
    run = after({}, {}, saved_s=-2.0, losing_steps=3)
    assert run.lost(True) == (4.0, 200.0)
    run.played(step(0.0))
    run.played(step(-2.0))
    assert not run.is_off(True), "not in a row"
    assert not after(*[{}] * 9, saved_s=-2.0).is_off(True), "0: never"
    run = after(*[{}] * 3, saved_s=-2.0, losing_steps=3)
    run.played(step(5.0))
    assert run.is_off(True) and run.is_off(False), "for the rest of the run"


def test_drafts_that_lose_without_history_begin_again_with_it():
    run = RunSeconds(2)
    for _ in range(2):
        run.played(step(-2.0, has_history=False))
    assert run.is_off(False) and not run.is_off(True)
    run.played(step(-2.0))
    assert not run.is_off(True), "steps of the first epoch are not counted to the second's"
    run.played(step(-3.0))
    assert run.is_off(True) and run.lost(True) == (5.0, 200.0)
