"""Rows whose keys and values are not all there yet."""

import numpy as np
import pytest

from rl.engine import preemption
from rl.engine.cache_ops import COLUMNS
from rl.engine.ending import Endings
from rl.engine.slot_table import SlotTable
from rl.trajectory import PartialRequest, Prefix, Request
from spec.config import SamplingConfig

PROMPT = (1, 2, 3, 4, 5, 6)


@pytest.fixture
def table():
    """Row 2 lacks its whole prompt, then row 1, and row 0 lacks nothing."""
    made = SlotTable(4, 16, Endings(SamplingConfig(max_new_tokens=8)))
    for row, filled_tokens in ((2, 0), (1, 0), (0, None)):
        made.enter(row, PartialRequest(Request(row, PROMPT)), filled_tokens)
    return made


def test_a_row_takes_part_in_rounds_once_nothing_lacks(table):
    active = COLUMNS.index("active")
    assert list(table.lacking()) == [2, 1] and table.prompts == [0, None, None, None]
    assert table.live().request_ids_A.tolist() == [0]
    assert table.device_columns()[:, active].tolist() == [1, 0, 0, 0]
    assert [table.filled(2, n) for n in (3, 4, 7)] == [3, 1, 1]  # a window may reach beyond
    assert list(table.lacking()) == [1] and table.prompts[2] == 0
    assert table.live().request_ids_A.tolist() == [0, 2]
    assert table.device_columns()[:, active].tolist() == [1, 0, 1, 0]


def test_a_prompt_is_held_before_the_response_that_follows_it(table):
    response = np.array([7, 8, 9], np.int32)
    prefix = Prefix(response, response, response, response, response, 0, None)
    table.enter(3, PartialRequest(Request(3, PROMPT), prefix), len(PROMPT) - 1)
    assert table.prompts[3] == 0 and list(table.lacking()) == [2, 1, 3]
    assert table.filled(3, 8) == 3 and 3 not in table.lacking()


def test_a_row_that_is_left_on_the_way_holds_nothing(table):
    table.filled(2, 4)
    assert preemption.needed_B(table, 4).tolist() == [10, 10, 10, 0]  # what lacks has its place
    assert table.preempt(2, 0).token_ids == PROMPT
    assert table.prompts[2] is None and list(table.lacking()) == [1] and 2 in table.free_rows()
    table.enter(2, PartialRequest(Request(5, (1, 2))))
    assert table.live().request_ids_A.tolist() == [0, 5]


def test_rows_that_are_moved_take_along_what_they_lack(table):
    table.filled(1, 2)
    table.keep([1, 0])
    table.widen(4)
    assert list(table.lacking()) == [0] and table.live().rows_A.tolist() == [1]
    assert table.filled(0, 5) == 3


def test_two_requests_may_have_the_same_noise(table):
    """Of one example in two steps of a pipeline: the device knows names of noise alone."""
    table.enter(3, PartialRequest(Request(5 * 2**31 + 2, PROMPT)))
    names = table.device_columns()[:, COLUMNS.index("request_id")]
    assert names.tolist() == [0, 1, 2, 2]
    assert table.live().request_ids_A.tolist() == [0, 5 * 2**31 + 2]
