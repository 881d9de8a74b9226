"""Exploration under reuse: with the two remedies nearly as many prompts are solved as without."""

import pytest

from benchmarks.exploration import WAYS, play


@pytest.fixture(scope="module")
def solved():
    ways = ("fresh", "coupled", "coupled_repeating", "lenient", "lenient_repeating")
    return {name: play(WAYS["binary"][name], 30, 40, seed=0).solved[-1] for name in ways}


@pytest.mark.parametrize("mode", ["coupled", "lenient"])
def test_prompts_that_are_unsolved_are_tried_in_other_ways(solved, mode):
    assert solved["fresh"] > 0.95
    assert solved[mode] >= 0.9 * solved["fresh"]
    assert solved[f"{mode}_repeating"] < 0.4, "the toy shows why it matters"


def test_a_share_of_fresh_noise_helps_if_most_groups_teach_something():
    graded = {
        name: play(WAYS["graded"][name], 30, 30, seed=1, is_graded=True)
        for name in ("coupled_groups_only", "coupled_half_fresh")
    }
    assert graded["coupled_half_fresh"].solved[-1] > graded["coupled_groups_only"].solved[-1] + 0.1
    reused = [sum(epochs.reused) for epochs in graded.values()]
    assert reused[0] > reused[1] > 0, "exploring costs reuse"
