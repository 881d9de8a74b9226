"""A step of a pipeline as it comes back: what is learnt from, what is missing, what goes on."""

from __future__ import annotations

from trajectories import trajectory

from rl.collected import StepPrompts, StepResponses, load_unfinished, unfinished_state, whole_groups
from rl.data.tasks import Example
from rl.engine.stats import EngineStats
from rl.rewards.scores import Score
from rl.rollouts import Prompts


def asked(step, first_group, count=2):
    examples = tuple(Example(f"{step}.{g}", "1", None, {}, "t") for g in range(count))
    return StepPrompts(
        0, first_group, Prompts(examples, ((1,),) * count, tuple(range(count)), count)
    )


def scored(group, sample, reward, tokens=(5, 6)):
    of = {"group": group, "sample": sample, "reward": reward, "version": 3}
    t = trajectory(2 * group + sample, [1], tokens, logprobs=-0.5, emission=-0.25, **of)
    return t, Score({}, reward), f"{group}.{sample}"


# of groups of two: 10 and 11 are of this step, 4 went on from the one before
BEFORE, NOW = asked("before", 4), asked("now", 10)
SIBLINGS = {4: [scored(4, 1, 1.0)[0]]}


def test_a_group_that_went_on_is_judged_and_compared_with_its_siblings():
    responses = [scored(11, 1, 1.0), scored(10, 0, 1.0), scored(4, 0, 0.0), scored(10, 1, 1.0)]
    collected = StepResponses(NOW, SIBLINGS, [*responses, scored(11, 0, 1.0)])
    assert collected.carried == [4] and collected.informative() == {4}
    assert collected.num_missing(2) == 2, "what went on is none of the step's own"
    rollouts = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=True)
    assert rollouts.completions == ["10.0", "10.1", "11.0", "11.1", "4.0"]
    assert [t.group_id for t in rollouts.trajectories] == [0, 0, 1, 1, 2]
    assert rollouts.prompts.keys == ["now.0", "now.1", "before.0"]
    assert rollouts.used.tolist() == [False] * 4 + [True] and rollouts.cursor == 7
    assert [(t.group_id, t.sample_index) for t in rollouts.siblings] == [(2, 1)]
    assert rollouts.metrics["rollout/carried"] == 1
    assert rollouts.metrics["dynamic_sampling/used_groups"] == 1
    everything = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=False)
    assert everything.used.all() and "dynamic_sampling/phases" not in everything.metrics


def test_groups_are_kept_for_later_epochs_once_they_are_whole():
    collected = StepResponses(NOW, SIBLINGS, [scored(10, 0, 1.0), scored(4, 0, 0.0)])
    rollouts = collected.rollouts(BEFORE, EngineStats(), 7, dynamic=False)
    kept = whole_groups(rollouts, 2)
    assert sorted((rollouts.prompts.keys[t.group_id], t.sample_index) for t in kept) == [
        ("before.0", 0),
        ("before.0", 1),
    ]
    left = collected.unfinished(2)
    assert {group: [t.sample_index for t in ts] for group, ts in left.items()} == {10: [0], 11: []}


def test_another_pass_follows_while_groups_are_missing():
    step = asked("now", 10)
    collected = StepResponses(
        step, {}, [scored(10, 0, 1.0), scored(10, 1, 0.0), scored(11, 0, 1.0)]
    )
    assert collected.num_missing(2) == 1 and collected.num_missing(1) == 0
    step.add(9, Prompts(step.prompts.examples[:1], ((1,),), (9,), 12))
    assert step.phases == 2 and step.passed_over == 2 and len(step.prompts) == 3
    collected.scored.extend([scored(12, 0, 0.5), scored(12, 1, 0.0)])
    assert collected.num_missing(2) == 0


def test_unfinished_groups_come_back_from_a_checkpoint():
    ended = [scored(4, 3, 1.5, (7, 8, 9))[0], scored(4, 1, None)[0]]
    state = unfinished_state({4: ended, 5: []})
    groups = load_unfinished(state)
    assert list(groups) == [4, 5] and groups[5] == []
    found = {t.sample_index: t for t in groups[4]}
    assert found[1].reward is None and found[3].reward == 1.5
    for t in ended:
        for name in ("response_ids", "logprobs", "emission_logprobs", "policy_versions"):
            assert getattr(found[t.sample_index], name).tolist() == getattr(t, name).tolist()
