"""Prompts and scores as a step of training sees them."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.prompts import DataOrder
from rl.data.tasks import Example
from rl.responses import Scorer, failures_text
from rl.rewards.config import RewardConfig
from rl.rewards.pool import RewardPool
from rl.rewards.scores import Score
from rl.rollouts import groups_to_ask, prompts_at
from rl.runtime.signals import Stopped, Watch


def test_a_run_that_is_asked_to_stop_does_not_wait_for_scores():
    asked = iter([False, True])
    watch = Watch(should_stop=lambda: next(asked))
    scorer = Scorer(None, RewardPool(RewardConfig()), watch.check)
    scorer._waiting[7] = Future(), "text"  # whose score never comes
    with pytest.raises(Stopped):
        scorer.responses([SimpleNamespace(request_id=7, group_id=0, sample_index=0)], None)


def test_a_failure_that_quotes_a_response_is_one_line():
    hostile = "f/raised: ValueError: no number in 'x\n\nstep 9/9  reward 1.000\r\x1b[2J'"
    scores = [Score({}, None, hostile), Score({}, 1.0), Score({}, 1.0)]
    text = failures_text(scores)
    assert text.startswith("1 of 3 samples: f/raised: ValueError: no number in 'x step 9/9")
    assert "\n" not in text and "\r" not in text
    assert failures_text(scores[1:]) == ""


@pytest.mark.parametrize(
    ("generated", "used", "wanted"),
    [(16, 16, 0), (16, 17, 0), (16, 14, 3), (16, 8, 16), (16, 0, 16), (32, 15, 3), (64, 2, 16)],
)
def test_a_further_pass_asks_what_is_missing_at_the_share_so_far(generated, used, wanted):
    assert groups_to_ask(16, generated, used) == wanted


PROMPTS = ["12", "12345", "1", "123456", "123", "1234567", "1234"]


def streaming(prompts=PROMPTS, limit=4):
    """As much of a run as prompts are drawn from; an id a character."""
    examples = [Example(f"e#{i}", p, None, {}, "t") for i, p in enumerate(prompts)]
    inputs = SimpleNamespace(task=examples, encode=lambda e, _: tuple(map(int, e.prompt)))
    rollout = SimpleNamespace(max_prompt_tokens=limit)
    config = SimpleNamespace(rollout=rollout, task=None)
    return SimpleNamespace(inputs=inputs, config=config, order=DataOrder(len(prompts), 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=6))
def test_prompts_that_are_too_long_are_passed_over_wherever_a_run_is_resumed(counts):
    system, cursor, numbers = streaming(), 0, []
    for count in counts:
        prompts = prompts_at(system, cursor, count)
        assert len(prompts) == count
        assert [e.example_id for e in prompts.examples] == [f"e#{n}" for n in prompts.numbers]
        assert [len(ids) for ids in prompts.tokens] == [len(PROMPTS[n]) for n in prompts.numbers]
        numbers, cursor = [*numbers, *prompts.numbers], prompts.end
    order = system.order.indices(0, cursor).tolist()
    assert numbers == [n for n in order if len(PROMPTS[n]) <= 4]


def test_a_thousand_prompts_in_a_row_that_are_too_long_end_the_run():
    with pytest.raises(ValueError, match="1000 prompts in a row, up to e#.*max_prompt_tokens=0"):
        prompts_at(streaming(limit=0), 5, 4)
