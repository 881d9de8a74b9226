"""The drafters of a run, its history from step to step, and its checkpoints."""

import re
from pathlib import Path

import numpy as np
import pytest
from live_by_hand import live_texts
from trajectories import trajectory

from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.reuse import remember
from reprise.rl.speculation.sources import Speculation, history_rule
from reprise.spec.budget.aimd import Aimd
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.budget.goodput import Goodput
from reprise.spec.drafter import Source
from reprise.spec.retrieval.history import PAPER_RULE, RULE
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.round_times import RoundTimes

PROMPTS = {"a": (1, 2, 3), "b": (4, 5)}
KEYS = list(PROMPTS)


def answer(group, response):
    prompt = list(PROMPTS.values())[group]
    return trajectory(group, prompt, response, group=group, sample=0, logprobs=0.0)


def live(group, response):
    """One live request that has answered so far."""
    prompt = list(PROMPTS.values())[group]
    text = [*prompt, *response]
    return live_texts(text, groups=[group], prompt=len(prompt), first_id=group)


def open_speculation(cache=None, **settings):
    cache = RolloutCache() if cache is None else cache
    return Speculation(SpeculationConfig(**settings), cache, times=RoundTimes({}))


def learn(speculation, trajectories):
    remember(speculation._cache, KEYS, trajectories, scored=False)
    return speculation.history_metrics()


def drafts(drafter, slots):
    drafts = drafter.propose(slots, np.array([8], np.int32), 8)
    n = int(drafts.count_A[0])
    return drafts.tokens_AN[0, :n].tolist(), set(drafts.sources_AN[0, :n].tolist())


def drafting(speculation):
    return speculation.drafter_factory(KEYS, list(PROMPTS.values()))(None)


def test_answers_of_a_step_are_drafted_in_the_next_each_to_its_prompt():
    with open_speculation(sources=("history",)) as speculation:
        drafter, _ = drafting(speculation)
        assert drafts(drafter, live(0, [10])) == ([], set())
        metrics = learn(speculation, [answer(0, [10, 11, 12]), answer(1, [20, 21])])
        speculation.prepare(PROMPTS)
        assert metrics["spec/history_bytes"] > 0
        drafter, _ = drafting(speculation)
        assert drafts(drafter, live(0, [10])) == ([11, 12], {Source.HISTORY})
        assert drafts(drafter, live(1, [20])) == ([21], {Source.HISTORY})
        # replaced, not added to
        metrics = learn(speculation, [answer(0, [10, 13])])
        # the last rollout's history: five tokens, and their prompts' tails
        assert metrics["spec/history_index_tokens"] == 5 + sum(map(len, PROMPTS.values()))
        assert metrics["spec/history_index_seconds"] > 0
        drafter, _ = drafting(speculation)
        assert drafts(drafter, live(0, [10]))[0] == [13]
        assert drafts(drafter, live(1, [20]))[0] == [21]


def test_an_index_that_was_built_for_other_prompts_is_not_used():
    with open_speculation(sources=("history",)) as speculation:
        drafting(speculation)
        learn(speculation, [answer(0, [10, 11])])
        speculation.prepare({"b": PROMPTS["b"]})
        drafter, _ = drafting(speculation)
        assert drafts(drafter, live(0, [10]))[0] == [11]


def test_a_restored_history_drafts_again():
    cache, other = RolloutCache(), RolloutCache()
    with open_speculation(cache, sources=("history",)) as speculation:
        drafting(speculation)
        learn(speculation, [answer(0, [10, 11])])
        speculation.prepare(PROMPTS)
        speculation.settle()
    other.load_state(cache.state())
    with open_speculation(other, sources=("history",)) as resumed:
        assert drafts(drafting(resumed)[0], live(0, [10]))[0] == [11]


def test_a_spilled_history_that_is_damaged_is_told_of_once_and_left_out(tmp_path):
    cache = RolloutCache(1, tmp_path / "rollouts")
    with open_speculation(cache, sources=("history",)) as speculation:
        drafting(speculation)
        learn(speculation, [answer(0, [10, 11]), answer(1, [20, 21])])
        drafting(speculation)
        files = [p for p in (tmp_path / "rollouts").rglob("*") if p.is_file()]
        assert len(files) == 2
        for path in files:
            path.write_bytes(b"something else")
        drafter, _ = drafting(speculation)
        problems = cache.new_problems()
        assert len(problems) == 2 and all("cached responses to" in p for p in problems)
        assert cache.new_problems() == []
        assert drafts(drafter, live(0, [10])) == ([], set())


@pytest.mark.parametrize(
    ("policy", "kind"), [("fixed:3", FixedBudget), ("aimd", Aimd), ("goodput", Goodput)]
)
def test_budgets_go_by_name(policy, kind):
    with open_speculation(budget=policy) as speculation:
        assert isinstance(drafting(speculation)[1], kind)


def test_histospec_drafts_by_the_rule_of_the_paper():
    assert history_rule(SpeculationConfig(sources=("histospec",))) == PAPER_RULE
    assert history_rule(SpeculationConfig(sources=("history",))) == RULE


def test_off_drafts_nothing_and_keeps_nothing():
    with open_speculation(budget="off", sources=()) as speculation:
        assert drafting(speculation) == (None, None)
        assert speculation.history_metrics() == {} and not speculation.keeps_history


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": "fixed"}, r"budget must be one of .*, got 'fixed'"),
        ({"sources": ("history", "history")}, r"sources must be different ones, got"),
        ({"sources": ("web",)}, r"expected sources of last, .* or PATH.py:name, got 'web'"),
        ({"sources": ()}, r"no sources to draft from"),
        ({"sources": ("history", "histospec")}, r"sources must have history or histospec"),
        ({"losing_steps": -1}, r"losing_steps must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        SpeculationConfig(**settings)


ASSIGNED = re.compile(r"speculation\.\w+(, [\w.]+)* [-+|]?= ")


def test_nothing_outside_sets_an_attribute_of_it():
    """It is finished when it is constructed."""
    assert ASSIGNED.search("self._speculation.times = 1") and ASSIGNED.search(
        "speculation.a, b = c"
    )
    root = Path(__file__).parents[3]
    paths = [path for room in ("rl", "benchmarks", "tests") for path in (root / room).rglob("*.py")]
    found = [path for path in paths if path.name != Path(__file__).name]
    assert [p for p in found if ASSIGNED.search(p.read_text(encoding="utf-8"))] == []
