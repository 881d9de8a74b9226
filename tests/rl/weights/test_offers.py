"""Offers that together hold each element of each array exactly once, and those that do not."""

import pytest

from rl.weights.errors import CarrierError, DamagedWeights
from rl.weights.offers import Expected, Offer, VersionId, check_cover
from rl.weights.pieces import PieceInfo

EXPECTED = {"a": Expected((4, 6), "float32"), "none": Expected((0, 2), "float32")}
NONE = ("none", (0, 0), (0, 2))


def offers(*of_sources, versions=None):
    """One offer for each list of (name, start, shape)."""
    found = []
    for source, places in enumerate(of_sources):
        to = VersionId(versions[source] if versions else 1, "0" * 64)
        pieces = tuple(PieceInfo(*place, "float32", "0" * 64) for place in places)
        found.append(Offer(to, None, source, len(of_sources), 1, pieces, ()))
    return found


def a(row, column, *shape):
    return ("a", (row, column), shape)


@pytest.mark.parametrize(
    "places",
    [
        [[a(0, 0, 4, 6), NONE]],
        [[a(0, 0, 2, 6)], [a(2, 0, 2, 6), NONE]],
        [[a(r, c, 2, 3) for r in (0, 2)] + [NONE] for c in (0,)] + [[a(0, 3, 2, 3), a(2, 3, 2, 3)]],
    ],
)
def test_whole_arrays_and_grids_of_shards(places):
    check_cover(offers(*places), EXPECTED)


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
        check_cover(offers([*places, NONE]), EXPECTED)


def test_an_array_without_elements_has_to_be_there():
    with pytest.raises(DamagedWeights, match="none: expected pieces"):
        check_cover(offers([a(0, 0, 4, 6)]), EXPECTED)


def test_sources_and_versions_agree():
    halves = [[a(0, 0, 2, 6)], [a(2, 0, 2, 6), NONE]]
    with pytest.raises(CarrierError, match=r"of one version, got versions \[1, 2\]: ask again"):
        check_cover(offers(*halves, versions=[2, 1]), EXPECTED)
    with pytest.raises(DamagedWeights, match=r"one offer of each of 2 source\(s\), .* \[0\]"):
        check_cover(offers(*halves)[:1], EXPECTED)
