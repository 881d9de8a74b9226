"""Pieces that hold each element of each array exactly once, and pieces that do not."""

import pytest

from rl.weights.errors import DamagedWeights
from rl.weights.offers import Expected, check_cover
from rl.weights.pieces import PieceInfo

EXPECTED = {"a": Expected((4, 6), "float32"), "none": Expected((0, 2), "float32")}
NONE = ("none", (0, 0), (0, 2))


def pieces(places):
    """One piece for each (name, start, shape)."""
    return [PieceInfo(*place, "float32", "0" * 64) for place in places]


def a(row, column, *shape):
    return ("a", (row, column), shape)


@pytest.mark.parametrize(
    "places",
    [
        [a(0, 0, 4, 6), NONE],
        [a(0, 0, 2, 6), a(2, 0, 2, 6), NONE],
        [NONE, *(a(r, c, 2, 3) for r in (0, 2) for c in (0, 3))],
    ],
)
def test_whole_arrays_and_grids_of_shards(places):
    check_cover(pieces(places), EXPECTED)


@pytest.mark.parametrize(
    "places",
    [
        [],
        [a(0, 0, 2, 6)],
        [a(0, 0, 2, 6), a(0, 0, 2, 6)],
        [a(0, 0, 2, 6), a(1, 0, 2, 6)],
        [a(0, 0, 3, 6), a(3, 0, 1, 6)],
        [a(0, 0, 2, 3), a(2, 0, 2, 3), a(0, 3, 2, 3)],
        [a(0, 0, 4, 4), a(0, 2, 4, 4)],
    ],
)
def test_gaps_and_overlaps_are_named(places):
    with pytest.raises(DamagedWeights, match=r"a: expected pieces that make up shape \[4, 6\]"):
        check_cover(pieces([*places, NONE]), EXPECTED)


def test_an_array_without_elements_has_to_be_there():
    with pytest.raises(DamagedWeights, match="none: expected pieces"):
        check_cover(pieces([a(0, 0, 4, 6)]), EXPECTED)
