"""Rows of responses: their shape, and where prompts and responses lie in them."""

from __future__ import annotations

import numpy as np

from reprise.rl.records import packing
from reprise.rl.records.packing import Response, Shape


def response(group, prompt, tokens):
    return Response("", group, np.array(prompt, np.int32), np.array(tokens, np.int32))


def test_one_shape_holds_the_longest_sample_in_about_the_tokens_asked_for():
    assert packing.batch_shape(512, 200) == Shape(rows=2, length=256, samples=32)
    assert packing.batch_shape(512, 64) == Shape(8, 64, 128)
    assert packing.batch_shape(512, 65) == Shape(4, 128, 64)
    assert packing.batch_shape(64, 1000) == Shape(1, 1024, 16)  # never below one row


def test_rows_are_a_multiple_of_the_meshs_ways():
    assert packing.batch_shape(1024, 100, row_multiple=3) == Shape(6, 128, 96)
    assert packing.batch_shape(64, 128, row_multiple=8) == Shape(8, 128, 128)  # never below it


def test_prompts_and_responses_lie_where_the_layout_says():
    shape = Shape(2, 6, 12)
    responses = [response(0, [5, 6], [1, 2, 3]), response(1, [7], [4]), response(0, [5, 6], [8])]
    [rows] = packing.plan(responses, shape)
    layout = packing.lay_out(responses, rows, shape)
    assert layout.order.tolist() == [0, 2, 1]
    assert layout.starts.tolist() == [1, 4, 5] and layout.prompt_starts.tolist() == [0, 0, 5]
    assert layout.tokens_BT[0].tolist() == [5, 6, 1, 2, 6, 7]
    assert layout.targets_BT[0].tolist() == [0, 1, 2, 3, 8, 4]
    assert layout.used_positions == 6 and not layout.packing.prompt_BT[1].any()


def test_prompts_and_responses_begin_with_blocks():
    shape = Shape(1, 20, 4, block=4)
    responses = [response(0, range(10, 17), [1, 2, 3]), response(0, range(10, 17), [4])]
    [rows] = packing.plan(responses, shape)
    layout, pad = packing.lay_out(responses, rows, shape), 0
    own = [14, 15, 16, 1, 2, pad, pad, pad, 14, 15, 16, pad]
    assert layout.tokens_BT.tolist() == [[10, 11, 12, 13, *own, *[pad] * 4]]
    assert layout.targets_BT.tolist() == [[0] * 6 + [1, 2, 3] + [0] * 5 + [4] + [0] * 5]
    assert layout.packing.positions_BT[0].tolist() == [*range(12), *range(4, 8), *[0] * 4]
    assert layout.packing.branch_BT[0].tolist() == [0] * 4 + [1] * 8 + [2] * 4 + [0] * 4
    assert layout.packing.prompt_BT[0].tolist() == [1] * 16 + [0] * 4
    assert layout.starts.tolist() == [6, 14] and layout.used_positions == 16
    places = zip(responses, layout.prompt_starts, layout.starts, strict=True)
    found = [shape.prompt_places(*of).tolist() for of in places]
    assert found == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 12, 13]]


def test_rows_of_one_plan_are_laid_out_one_by_one_as_well():
    responses = [response(g, [5, 6], range(1, 5)) for g in range(4)]
    [rows] = packing.plan(responses, Shape(4, 6, 24))
    together = packing.lay_out(responses, rows, Shape(4, 6, 24))
    for b, row in enumerate(rows):
        alone = packing.lay_out(responses, [row], Shape(1, 6, 6))
        np.testing.assert_array_equal(alone.tokens_BT[0], together.tokens_BT[b])
        assert alone.starts[0] + 6 * b == together.starts[b]
