"""Who enters, and who is given up, by hand."""

import numpy as np
import pytest

from rl import kv_budget
from rl.slot_table import SlotTable
from rl.trajectory import Begun, Chunk, Prefix, Request

LIMIT = 10


def table(*lengths, order=None):
    """Rows with prompts of two tokens and responses of these lengths, of at most LIMIT."""
    rows = SlotTable(len(lengths), 12)
    for row in order or range(len(lengths)):
        if lengths[row] is not None:
            rows.enter(row, Request(row, (1, 2)), LIMIT)
            rows.total_tokens_B[row] += lengths[row]
    return rows


def chunk(num_tokens=0, max_tokens=None):
    prefix = None
    if num_tokens:
        zeros = np.zeros(num_tokens, np.int32)
        prefix = Prefix(zeros, zeros, zeros, zeros, zeros, 0, None)
    return Chunk(Begun(Request(9, (1, 2, 3)), prefix), max_tokens)


def test_a_row_needs_what_a_fetch_adds_up_to_its_limit():
    assert kv_budget.needed_B(table(0, 7, None, 10), 4).tolist() == [6, 12, 0, 12]


@pytest.mark.parametrize(
    ("budget", "count"), [(6, 0), (13, 0), (14, 1), (20, 1), (21, 2), (26, 3), (99, 3)]
)
def test_chunks_enter_while_they_fit_beside_what_runs(budget, count):
    """The row needs 2 + 1 + 4; the chunks 3 + 4, 3 + 4, and 3 + 1 + 1 of the last one's limit."""
    waiting = [chunk(), chunk(), chunk(1, max_tokens=1)]
    assert kv_budget.num_fitting(waiting, table(1), 4, budget, LIMIT) == count


def test_one_enters_where_nothing_runs():
    assert kv_budget.num_fitting([chunk(), chunk()], table(None), 4, 3, LIMIT) == 1


@pytest.mark.parametrize(
    ("budget", "rows"), [(30, []), (21, []), (20, [1]), (14, [1]), (13, [1, 2]), (1, [1, 2])]
)
def test_the_newest_are_given_up_until_the_others_fit(budget, rows):
    """Three rows of 2 + 1 + 4 each; row 0 came first, then row 2, then row 1."""
    full = table(1, 1, 1, order=(0, 2, 1))
    assert kv_budget.rows_to_give_up(full, 4, budget) == rows
