"""Distinct-1 and Self-BLEU by hand."""

import collections
import math

import numpy as np
import pytest

from reprise.rl.metrics.diversity import FLOOR, MAX_TOKENS, ORDER, distinct_1, self_bleu


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


def slow_self_bleu(responses, group_ids):
    """Self-BLEU word for word as its formula, with a counter for each n-gram."""
    scores = []
    for i, response in enumerate(responses):
        pairs = enumerate(zip(responses, group_ids, strict=True))
        siblings = [r for j, (r, group) in pairs if group == group_ids[i] and j != i]
        if not siblings:
            continue
        logs = []
        for n in range(1, min(ORDER, len(response)) + 1):

            def grams(tokens, n=n):
                found = (tuple(tokens[k : k + n]) for k in range(len(tokens) - n + 1))
                return collections.Counter(found)

            counts = grams(response.tolist())
            of_siblings = [grams(r.tolist()) for r in siblings]
            matches = sum(min(c, max(s[g] for s in of_siblings)) for g, c in counts.items())
            logs.append(math.log(max(matches, FLOOR) / sum(counts.values())))
        lengths = [len(r) for r in siblings]
        closest = min((abs(length - len(response)), length) for length in lengths)[1]
        scores.append(math.exp(min(0, 1 - closest / len(response)) + np.mean(logs)))
    return float(np.mean(scores)) if scores else math.nan


@pytest.mark.parametrize("vocab", [1, 3, 12, 2**31])
def test_self_bleu_is_that_of_an_implementation_by_counters(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(12):
        num = int(rng.integers(1, 14))
        responses = [rng.integers(0, vocab, rng.integers(1, 30)) for _ in range(num)]
        group_ids = rng.integers(0, 4, num).tolist()
        found, wanted = self_bleu(responses, group_ids), slow_self_bleu(responses, group_ids)
        assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)
