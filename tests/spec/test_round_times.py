"""Tables of seconds by bucket, kept as rows."""

import pytest

from spec.round_times import RoundTimes, monotone

TIMES = RoundTimes(
    {(8, 8, 64): 1.0, (8, 32, 64): 2.0},
    {"learned": {(8, 1, 64): 0.5, (8, 5, 64): 2.5, (4, 1, 64): 9.0}, "model": {(8, 2, 64): 7.0}},
    {(8, 64, 64): 3.0},
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
    assert again.rows() == TIMES.rows() and len(TIMES.rows()) == 7
    names = {"packed round", "draws in chunks", "draft learned", "draft model"}
    assert {row[0] for row in TIMES.rows()} == names


def test_chunks_verify_where_a_token_takes_fewer_seconds_there_than_as_a_node():
    assert TIMES.chunks_pay(8, 64, 64)  # 3 / (0.75 · 64) < 2 / (0.6 · 32)
    fast_nodes = RoundTimes({(8, 8, 64): 1.0, (8, 32, 64): 1.1}, None, {(8, 64, 64): 3.0})
    assert not fast_nodes.chunks_pay(8, 64, 64)
    none_measured = RoundTimes({(8, 8, 64): 1.0, (8, 32, 64): 1.4})
    assert not none_measured.chunks_pay(8, 64, 64), "nodes are measured, chunks are not"
    assert none_measured.chunks_pay(8, 128, 64), "neither is"
    assert RoundTimes({}).chunks_pay(8, 64, 64)
    assert TIMES.without_drafts("learned").chunks_pay(8, 64, 64)
    none_measured.put(TIMES)
    assert none_measured.chunks_pay(8, 64, 64)


def test_rows_of_an_unknown_table_are_refused():
    assert RoundTimes.from_rows(TIMES.rows()).rows() == TIMES.rows()
    with pytest.raises(ValueError, match="expected packed round, draws in chunks or draft …, got"):
        RoundTimes.from_rows([*TIMES.rows(), ["lookup", 8, 4, 64, 1.5]])


def test_more_nodes_never_take_less_time():
    """Noise of the clock, in two buckets of positions and two of slots."""
    seconds = {(4, n, 64): s for n, s in zip((4, 8, 16, 32), (2.0, 1.0, 3.0, 3.5), strict=True)}
    seconds |= {(4, n, 128): s for n, s in zip((4, 8, 16, 32), (1.0, 9.0, 4.0, 2.0), strict=True)}
    fitted = monotone(seconds | {(8, 8, 64): 0.1})
    assert [fitted[4, n, 64] for n in (4, 8, 16, 32)] == [1.5, 1.5, 3.0, 3.5]
    assert [fitted[4, n, 128] for n in (4, 8, 16, 32)] == [1.0, 5.0, 5.0, 5.0]
    assert fitted[8, 8, 64] == 0.1 and len(fitted) == 9
