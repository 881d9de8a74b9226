"""Passes of chunks against rounds, with seconds by hand."""

import numpy as np
import pytest

from reprise.spec.reuse.chunk_price import (
    DECAY,
    MARGIN,
    Bucket,
    ChunkPrice,
    Pass,
    played_s,
    spread_agreement,
)
from reprise.spec.round_times import RoundTimes

# a plain round of 8 slots takes 0.8 s, one of 4 slots 0.6; chunks have 10 tokens
TIMES = RoundTimes(
    {(8, 8, 64): 0.8, (4, 4, 64): 0.6, (8, 16, 64): 1.0},
    None,
    {(8, 20, 64): 1.0, (8, 80, 64): 3.0},
    beside_seconds={(8, 10, 64): 1.1, (8, 20, 64): 1.5},
)
FULL = Bucket(slots=8, positions=64, busy=8, live=8)
ALONE, BESIDE = (2, 8), (1, 2)


def best(expected, at=FULL, price=None, beside=()):
    price = price or ChunkPrice(TIMES, 10)
    return price.best_pass(np.array(expected, float), at, ALONE, beside)


def test_a_token_is_worth_its_share_of_a_plain_round():
    price = ChunkPrice(TIMES, 10)
    assert price.value(FULL) == pytest.approx(0.1)
    assert price.value(FULL._replace(busy=5)) == pytest.approx(0.16)
    assert price.value(Bucket(4, 64, 4, 4)) == pytest.approx(0.15)


def test_the_pass_with_the_most_tokens_a_second_is_made_if_it_beats_rounds():
    # alone 2: 10/1.0; alone 8: 40/3.0, which is more; rounds bring 10 a second
    assert best([5] * 8) == Pass(8, is_beside=False)
    assert best([9, 9, 1, 1, 1, 1, 1, 1]) == Pass(2, is_beside=False)
    assert best([3.5] * 8) is None


def test_rows_that_bring_less_than_rounds_decode():
    just = 10 * MARGIN / 2  # two chunks alone for a second, a token is worth 0.1 s
    assert best([1.01 * just] * 2) == Pass(2, is_beside=False)
    assert best([0.99 * just] * 2) is None
    assert best([5]) is None, "one row would pay for two chunks"


def test_live_rows_beside_a_pass_bring_a_token_each():
    # one chunk and seven tokens in 1.1 s: e + 7 > 10 · 1.1 · MARGIN
    just = 11 * MARGIN - 7
    assert best([1.01 * just], beside=BESIDE) == Pass(1, is_beside=True)
    assert best([0.99 * just], beside=BESIDE) is None
    assert best([1.01 * just]) is None, "alone it does not pay"
    both = 15 * MARGIN - 6  # two chunks and six tokens in 1.5 s
    assert best([1.01 * both / 2] * 2, beside=BESIDE[1:]) == Pass(2, is_beside=True)
    assert best([0.99 * both / 2] * 2, beside=BESIDE[1:]) is None


def test_rounds_that_drafts_make_faster_are_worth_less():
    price = ChunkPrice(TIMES, 10)
    price.observe(1.0, 1, (8, 8, 64))
    assert price.gain == 1 and best([5.5] * 2, price=price)
    price.observe(2.5, 1, (8, 16, 64))  # of plain rounds 2.5, of 0.8 s each
    want = (DECAY * 0.8 + 2.5 * 0.8) / (DECAY * 0.8 + 1.0)
    assert price.gain == pytest.approx(want)
    assert price.value(FULL) == pytest.approx(0.1 / want)
    assert best([5.5] * 2, price=price) is None
    slow = ChunkPrice(TIMES, 10)
    slow.observe(0.5, 1, (8, 8, 64))
    assert slow.gain == 1, "plain decoding is always to be had"


def test_a_row_may_pay_if_a_full_pass_of_its_kind_would():
    price = ChunkPrice(TIMES, 10)
    just = 10 * 3.0 * MARGIN / 8
    both = np.array([1.01 * just, 0.99 * just])
    assert price.may_pay(both, FULL, ALONE).tolist() == [True, False]
    assert not price.may_pay(both, FULL._replace(slots=4), ALONE).any(), "nothing is measured"


def test_a_pass_that_is_not_measured_is_not_made():
    assert best([9] * 2, FULL._replace(slots=4)) is None
    assert best([9] * 2, FULL._replace(positions=32)) is None
    longer = RoundTimes({(8, 8, 128): 0.8}, None, {(8, 20, 64): 1.0})
    long = FULL._replace(positions=128)
    assert best([9] * 2, long, ChunkPrice(longer, 10)) == Pass(2, is_beside=False)


def plain_s(num_rows):
    return {1: 1.0, 2: 3.0}[num_rows]


@pytest.mark.parametrize(
    ("lengths", "want"),
    [
        ([5], 5 * 1.0),
        ([5, 2], 2 * 3.0 + 3 * 1.0),
        # the third starts after two rounds and ends with the seventh
        ([5, 2, 5], 5 * 3.0 + 2 * 1.0),
        ([5, 2, 3], 5 * 3.0),
        ([0, 0, 4], 4 * 1.0),
        ([], 0.0),
    ],
)
def test_requests_are_played_as_slots_get_free(lengths, want):
    assert played_s(np.array(lengths, int), 2, plain_s) == want


def test_what_stands_is_spread_over_its_law():
    lengths = np.full(10_000, 50)
    kept = spread_agreement(lengths, np.full(10_000, 0.05))
    for k in (1, 10, 50):
        assert (kept >= k).mean() == pytest.approx(0.95**k, abs=0.003)
    assert not spread_agreement(lengths, np.ones(10_000)).any()
    assert (spread_agreement(lengths, np.zeros(10_000)) == 50).all()


def test_tokens_of_short_responses_are_worth_less_than_those_of_the_longest():
    """Two slots at once; a round of both takes 0.8 s, one of a row 0.6."""
    times = RoundTimes({(2, 2, 64): 0.8, (1, 1, 64): 0.6})
    at, lengths = Bucket(2, 64, 2, 2), np.array([100, 20])

    def value(rates):
        price = ChunkPrice(times, 10)
        price.play(lengths, np.array(rates, float), 2, 64)
        return price.value(at)

    assert value([0, 0]) == pytest.approx((20 * 0.8 + 80 * 0.6) / 120)
    assert value([1, 0]) == pytest.approx(20 * (0.8 - 0.6) / 20)
    assert value([0, 1]) == pytest.approx((20 * 0.8 + 80 * 0.6 - 20 * 0.6) / 100)
    assert value([1, 1]) == pytest.approx(0.8 / 2), "nothing is known: a share of a round"


def test_a_pass_also_takes_a_fetch():
    slow = RoundTimes(TIMES.rounds, None, {(8, 20, 64): 1.0}, fetch_seconds={(8, 1, 64): 0.1})
    just = 10 * MARGIN * (1.0 + 0.1) / 2
    assert best([1.01 * just] * 2, price=ChunkPrice(slow, 10)) == Pass(2, is_beside=False)
    assert best([0.99 * just] * 2, price=ChunkPrice(slow, 10)) is None


def test_a_batch_without_measured_passes_has_none():
    price = ChunkPrice(TIMES, 10)
    assert price.has_passes(8) and not price.has_passes(4), "a batch that has shrunk"
