"""Payloads cut into parts and joined again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl.weights.parts import Slice, cut, joined, slices_of


def test_small_buffers_share_a_part_and_long_ones_have_several():
    assert cut([3, 0, 4, 2], 8) == [[Slice(0, 0, 3), Slice(2, 0, 4)], [Slice(3, 0, 2)]]
    assert cut([2, 20], 8) == [
        [Slice(0, 0, 2)],
        [Slice(1, 0, 8)],
        [Slice(1, 8, 16)],
        [Slice(1, 16, 20)],
    ]
    assert cut([0, 0], 8) == cut([], 8) == []


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_every_byte_is_in_one_part_and_no_part_is_too_large(sizes, part_bytes):
    rng = np.random.default_rng(0)
    buffers = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    parts = cut(sizes, part_bytes)
    assert all(sum(s.num_bytes for s in part) <= part_bytes for part in parts)
    found = joined(sizes, ((part, slices_of(buffers, part)) for part in parts))
    assert len(found) == len(buffers)
    assert all(np.array_equal(a, b) for a, b in zip(found, buffers, strict=True))
