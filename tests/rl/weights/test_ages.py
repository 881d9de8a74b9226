"""How far behind subscribers are, with the time given."""

import pytest

from rl.weights.ages import Age, Ages


def test_seconds_run_from_the_first_newer_version():
    ages = Ages(most_versions_behind=1)
    ages.published(3, 100.0)
    ages.taken("a", 3)
    assert ages.of("a", 150.0) == Age(0, 0.0)
    ages.published(4, 160.0)
    ages.published(5, 170.0)
    assert ages.of("a", 175.0) == Age(2, 15.0)
    ages.taken("b", 4)  # it was the newest when it was asked for
    assert ages.all(180.0) == {"a": Age(2, 20.0), "b": Age(1, 10.0)}


@pytest.mark.parametrize(("most", "expected"), [(0, True), (1, False), (2, False)])
def test_the_bound(most, expected):
    ages = Ages(most)
    assert ages.must_fetch("a", 0.0)
    ages.published(0, 0.0)
    assert ages.must_fetch("a", 0.0) and ages.of("a", 0.0) is None
    ages.taken("a", 0)
    assert not ages.must_fetch("a", 0.0)
    ages.published(1, 1.0)
    assert ages.must_fetch("a", 1.0) is expected
    ages.forget("a")
    assert ages.must_fetch("a", 1.0)
