"""Where a run's tail begins, on hand-made records."""

import numpy as np
import pytest

from benchmarks.speculation import end_seconds, last_tenth, tail_figures
from reprise.rl.records.stats import RoundRecord


def record(began_s, ended_s, rounds_by_id):
    """A call between two times; its requests took part in so many of its rounds."""
    ids_A, rounds_A = np.array(list(rounds_by_id)), np.array(list(rounds_by_id.values()))
    marks = began_s, began_s, began_s, began_s, ended_s, ended_s
    return RoundRecord(*marks, 16, 16, 64, ids_A, np.full_like(ids_A, 7), rounds_A, rounds_A)


def run(*calls):
    """Calls that follow one another from second 10 on: (seconds, rounds of each request)."""
    records, at_s = [], 10.0
    for seconds, rounds_by_id in calls:
        records.append(record(at_s, at_s + seconds, rounds_by_id))
        at_s += seconds
    return records


PLAIN = run(
    (4.0, dict.fromkeys(range(20), 4)),
    (3.0, {3: 2, 7: 4, 8: 4, 9: 1}),  # 3 and 9 end here
    (2.0, {7: 1, 8: 4}),  # and these two in the same call
)


def test_both_runs_are_cut_at_the_requests_that_end_last_in_plain_decoding():
    tail = last_tenth(PLAIN)
    assert tail == {7, 8}
    assert end_seconds(PLAIN, tail) == (9.0, 2.0)
    # 8 ends earlier here than others do: only 7 runs alone, for half a second
    drafted = run((4.0, dict.fromkeys(range(20), 1)), (1.0, {3: 1, 7: 1}), (0.5, {7: 1}))
    assert end_seconds(drafted, tail) == (5.5, 0.5)
    # and here others are the last ones
    others = run((4.0, dict.fromkeys(range(20), 1)), (1.0, {7: 1, 8: 1}), (2.0, {3: 1}))
    assert end_seconds(others, tail) == (7.0, 0.0)


def test_the_order_inside_a_call_is_that_of_rounds():
    calls = run((1.0, {i: 9 - i % 2 for i in range(12)}))
    assert last_tenth(calls) == {8, 10}
    assert end_seconds(calls, last_tenth(calls)) == (1.0, 0.0)
    assert last_tenth(run((1.0, {5: 3}))) == {5}
    assert end_seconds(run((1.5, {5: 3})), frozenset({5})) == (1.5, 1.5)  # of one the tail is all


def test_figures_of_the_tail_are_medians_of_pairs():
    ends = [[(9.0, 2.0), (5.0, 1.0)], [(9.0, 4.0), (6.0, 1.0)], [(9.0, 0.0), (7.0, 1.0)]]
    figures = tail_figures(ends)
    assert (figures["plain_end_s"], figures["speculative_end_s"]) == (9.0, 6.0)
    assert (figures["plain_tail_s"], figures["speculative_tail_s"]) == (2.0, 1.0)
    assert figures["tail_reduction"] == 0.5
    assert figures["tail_reduction_quartiles"] == pytest.approx([0.25, 0.625])
