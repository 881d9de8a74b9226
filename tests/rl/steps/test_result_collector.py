"""A step of a pipeline as it comes back: what is learnt from, what is missing, what is held."""

from __future__ import annotations

import numpy as np
from trajectories import trajectory

from reprise.rl.data.tasks import Example
from reprise.rl.engine.stats import EngineStats
from reprise.rl.records.trajectory import FinishReason
from reprise.rl.rewards.scores import Score
from reprise.rl.steps.result_collector import StepPrompts, StepResponses, held_state, load_held
from reprise.rl.steps.rollouts import Prompts
from reprise.spec.config import SamplingConfig


def asked(step, first_group, count=2):
    examples = tuple(Example(f"{step}.{g}", "1", None, {}, "t") for g in range(count))
    return StepPrompts(
        0, first_group, Prompts(examples, ((1,),) * count, tuple(range(count)), count)
    )


def scored(group, sample, reward, tokens=(5, 6), **more):
    of = {"group": group, "sample": sample, "reward": reward, "version": 3}
    t = trajectory(2 * group + sample, [1], tokens, logprobs=-0.5, emission=-0.25, **of, **more)
    return t, Score({"f": reward}, reward), f"{group}.{sample}"


# of groups of two: 10 and 11 are of this step, 4 became whole in it
BEFORE, NOW = asked("before", 4), asked("now", 10)
HELD = scored(4, 1, 1.0)


def test_a_group_that_went_on_is_learnt_from_as_a_whole():
    responses = [scored(11, 1, 1.0), scored(10, 0, 1.0), scored(4, 0, 0.0), scored(10, 1, 1.0)]
    collected = StepResponses(NOW, 2, [HELD, *responses, scored(11, 0, 1.0)])
    assert collected.carried == [4] and collected.informative() == {4}
    assert collected.num_to_ask(2) == 2, "what went on is none of the step's own"
    rollouts = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=True)
    assert rollouts.completions == ["10.0", "10.1", "11.0", "11.1", "4.0", "4.1"]
    assert [t.group_id for t in rollouts.trajectories] == [0, 0, 1, 1, 2, 2]
    assert rollouts.prompts.keys == ["now.0", "now.1", "before.0"]
    assert rollouts.used.tolist() == [False] * 4 + [True] * 2 and rollouts.cursor == 7
    assert rollouts.metrics["rollout/carried"] == 2
    assert rollouts.metrics["dynamic_sampling/used_groups"] == 1
    everything = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=False)
    assert everything.used.all() and "dynamic_sampling/phases" not in everything.metrics


def test_groups_are_held_until_they_are_whole():
    collected = StepResponses(NOW, 2, [HELD, scored(10, 0, 1.0), scored(4, 0, 0.0)])
    rollouts = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=False)
    assert rollouts.completions == ["4.0", "4.1"]
    held = collected.held()
    texts = {group: [text for _, _, text in rows] for group, rows in held.items()}
    assert texts == {10: ["10.0"], 11: []}
    assert collected.num_to_ask(2) == 0, "groups that continue are not missing"
    empty = StepResponses(NOW, 2, [scored(10, 0, 1.0)]).rollouts(
        None, EngineStats(), 7, dynamic=True
    )
    assert not empty.trajectories and empty.used.shape == (0,)


def test_another_pass_follows_while_groups_are_missing():
    step = asked("now", 10)
    rows = [scored(10, 0, 1.0), scored(10, 1, 0.0), scored(11, 0, 1.0), scored(11, 1, 1.0)]
    collected = StepResponses(step, 2, rows)
    assert collected.num_to_ask(1) == 0
    assert collected.num_to_ask(2) == 2, "one is missing, and half are of use"
    step.add(9, Prompts(step.prompts.examples[:1], ((1,),), (9,), 12))
    assert step.phases == 2 and step.passed_over == 2 and len(step.prompts) == 3
    collected.scored.extend([scored(12, 0, 0.5), scored(12, 1, 0.0)])
    assert collected.num_to_ask(2) == 0


def test_a_failed_reward_makes_no_group_informative():
    t, _, text = scored(10, 1, 0.0)
    rows = [scored(10, 0, 1.0), (t, Score({"f": None}, 0.0, "f/raised: E"), text)]
    assert StepResponses(asked("now", 10, 1), 2, rows).informative() == set()


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
