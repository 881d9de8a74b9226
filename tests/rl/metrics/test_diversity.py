"""Distinct-1 and Self-BLEU by hand."""

import math

import numpy as np
import pytest

from rl.metrics.diversity import FLOOR, MAX_TOKENS, distinct_1, self_bleu


def arrays(*rows):
    return [np.asarray(row, np.int32) for row in rows]


def test_distinct_1():
    assert distinct_1(arrays([1, 2, 2], [2, 3, 1, 1, 1])) == 3 / 8
    assert distinct_1(arrays(range(5))) == 1.0
    assert distinct_1(arrays([7] * (2 * MAX_TOKENS))) == 1 / MAX_TOKENS


def test_self_bleu_of_equal_and_of_different_responses():
    assert self_bleu(arrays([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), [0, 0]) == pytest.approx(1.0)
    assert self_bleu(arrays([1], [1]), [0, 0]) == pytest.approx(1.0)  # no longer n-grams
    # one match of nothing: the floor, over the n-grams that there are
    floor = [FLOOR / n for n in (4, 3, 2, 1)]
    want = math.exp(sum(map(math.log, floor)) / 4)
    assert self_bleu(arrays([1, 2, 3, 4], [5, 6, 7, 8]), [0, 0]) == pytest.approx(want)


def test_matches_are_clipped_and_short_responses_are_penalised():
    got = self_bleu(arrays([1, 1, 1], [1, 2, 1, 1, 1, 1], [9]), [0, 0, 0])
    wanted = [
        1.0,  # 1, 1 1 and 1 1 1 are all in the second; the third is as near in length: 1 < 3
        # three of five 1s count, 2 does not; one 1 1 1 of four trigrams; c = 6, r = 3
        math.exp(np.mean(np.log([3 / 6, 2 / 5, 1 / 4, FLOOR / 3]))),
        math.exp(1 - 3 / 1) * FLOOR,  # c = 1, r = 3
    ]
    assert got == pytest.approx(np.mean(wanted))


def test_groups_are_apart_and_only_children_have_no_score():
    rows = arrays([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8], [1, 1])
    assert self_bleu(rows, [0, 0, 1, 1, 2]) == pytest.approx(1.0)
    assert math.isnan(self_bleu(rows[:2], [0, 1]))
