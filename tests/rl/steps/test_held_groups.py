"""Groups of a pipeline that go on in the next step: what is held, and what comes back whole."""

from __future__ import annotations

import numpy as np
from trajectories import trajectory

from reprise.rl.exchange.responses import in_order
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import FinishReason
from reprise.rl.rewards.scores import Score
from reprise.rl.steps.held_groups import held_state, load_held, whole_groups
from reprise.spec.config import SamplingConfig


def scored(group, sample, reward, tokens=(5, 6), **more):
    of = {"group": group, "sample": sample, "reward": reward, "version": 3}
    t = trajectory(2 * group + sample, [1], tokens, logprobs=-0.5, emission=-0.25, **of, **more)
    return t, Score({"f": reward}, reward), f"{group}.{sample}"


def found(*rows):
    return in_order(rows, EngineStats())


def texts(held):
    return {group: [text for _, _, text in rows] for group, rows in held.items()}


def test_a_group_that_went_on_comes_back_whole():
    """Groups have two responses: 10 and 11 are of this step, and 4 becomes whole in it."""
    responses = found(
        scored(11, 1, 1.0), scored(10, 0, 1.0), scored(4, 0, 0.0), scored(10, 1, 1.0),
        scored(11, 0, 1.0),
    )  # fmt: skip
    whole, held = whole_groups(responses, {4: [scored(4, 1, 1.0)]}, [10, 11], 2)
    assert whole.texts == ["4.0", "4.1", "10.0", "10.1", "11.0", "11.1"]
    assert whole.informative == {4} and held == {} and whole.stats is responses.stats


def test_groups_are_held_until_they_are_whole():
    responses = found(scored(10, 0, 1.0), scored(4, 0, 0.0))
    whole, held = whole_groups(responses, {4: [scored(4, 1, 1.0)]}, [10, 11], 2)
    assert whole.texts == ["4.0", "4.1"]
    assert list(held) == [10, 11] and texts(held) == {10: ["10.0"], 11: []}
    further = found(scored(12, 0, 1.0), scored(12, 1, 0.0))
    whole, still = whole_groups(further, held, [12], 2)
    assert whole.texts == ["12.0", "12.1"] and texts(still) == texts(held)
    rest = found(scored(10, 1, 0.0), scored(11, 0, 1.0), scored(11, 1, 1.0))
    whole, held = whole_groups(rest, still, [], 2)
    assert whole.texts == ["10.0", "10.1", "11.0", "11.1"] and held == {}


def test_held_groups_come_back_from_a_checkpoint():
    cut = scored(4, 1, None, finish=FinishReason.LENGTH)
    ended = [scored(4, 3, 1.5, (7, 8, 9)), (cut[0], Score({"f": None}, None, "f/raised: E"), "é")]
    own = SamplingConfig(temperature=0.5)
    groups = load_held(held_state({4: ended, 5: []}), lambda group: own)
    assert list(groups) == [4, 5] and groups[5] == []
    for (t, score, text), (found, found_score, found_text) in zip(ended, groups[4], strict=True):
        assert (found_score, found_text, found.sampling) == (score, text, own)
        for name in vars(t).keys() - {"sampling"}:
            np.testing.assert_array_equal(getattr(found, name), getattr(t, name))
