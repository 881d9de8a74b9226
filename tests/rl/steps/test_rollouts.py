"""Prompts and scores as a step of training sees them."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import trajectory

from reprise.rl.data.prompts import DataOrder, UnreadableExample
from reprise.rl.data.tasks import Example
from reprise.rl.exchange.responses import Scorer, failures_text, in_order
from reprise.rl.records.stats import EngineStats
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.signals import Stopped, Watch
from reprise.rl.steps.rollouts import Prompts, finish_step, groups_to_sample, prompts_at


def test_a_run_that_is_asked_to_stop_does_not_wait_for_scores():
    asked = iter([False, True])
    watch = Watch(should_stop=lambda: next(asked))
    scorer = Scorer(None, RewardPool(RewardConfig()), watch.check, 1)
    scorer._waiting[7] = Future(), 0, "text"  # whose score never comes
    with pytest.raises(Stopped):
        scorer.responses([SimpleNamespace(request_id=7, group_id=0, sample_index=0)], None)


def test_a_group_is_scored_once_its_last_response_has_ended():
    sent = []

    class Rewards:
        config = RewardConfig(per="group")

        def submit_group(self, jobs):
            sent.append([job.completion for job in jobs])
            future = Future()
            future.set_result([Score({}, float(len(sent)) + i) for i in range(len(jobs))])
            return future

        def result(self, future, check):
            return future.result()

    scorer = Scorer(SimpleNamespace(decode=lambda ids: str(ids[0])), Rewards(), None, 2)
    scorer.examples = {5: Example("e", "q", "1", {}, "t"), 6: Example("f", "q", "1", {}, "t")}
    responses = {
        (g, i): trajectory(10 * g + i, [1], [10 * g + i], group=g, sample=i, reward=None)
        for g in (5, 6)
        for i in (0, 1)
    }
    for place in ((5, 1), (6, 0)):
        scorer(responses[place])
    assert sent == [] and scorer.waits_for(5) and scorer.waits_for(6)
    scorer(responses[5, 0])
    assert sent == [["50", "51"]], "in the order of the samples"
    assert not scorer.waits_for(5) and scorer.waits_for(6)
    scorer(responses[6, 1])
    found = scorer.responses(responses.values(), None)
    assert [t.reward for t in found.trajectories] == [1.0, 2.0, 2.0, 3.0]
    assert found.texts == ["50", "51", "60", "61"]


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
    assert groups_to_sample(16, generated, used) == wanted


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
    message = "1000 prompts in a row, up to e#.*max_prompt_tokens=0"
    with pytest.raises(UnreadableExample, match=message):
        prompts_at(streaming(limit=0), 5, 4)


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError])
def test_an_example_that_cannot_be_read_is_named(error):
    class Changed(list):
        def __getitem__(self, index):
            raise error("a.jsonl:7: expected one JSON object a line")

    system = streaming()
    system.inputs.task = Changed(system.inputs.task)
    with pytest.raises(UnreadableExample, match="a.jsonl:7: expected"):
        prompts_at(system, 0, 1)


def test_prompts_of_several_passes_are_counted():
    system = streaming()
    first = prompts_at(system, 0, 2)
    more = prompts_at(system, first.end + 1, 1)  # a pipeline has submitted the prompt in between
    both = first + more
    assert (both.start, both.end, both.num_passes, len(both)) == (0, more.end, 2, 3)
    assert both.num_left_out == both.end - 1 - 3, "too long"
    assert both.take([2, 0]).numbers == (more.numbers[0], first.numbers[0])


def asked(*names):
    examples = tuple(Example(name, "1", None, {}, "t") for name in names)
    return Prompts(examples, ((1,),) * len(names), tuple(range(len(names))), num_left_out=3)


@pytest.mark.parametrize("extra", [None, 2])
@pytest.mark.parametrize("carried", [None, asked("before")])
def test_a_step_is_learnt_from_as_a_whole(extra, carried):
    """The groups of the step, then those that it carries; dynamic sampling drops equal rewards."""
    remembered = []

    class Reuse:
        mode = SimpleNamespace(repeats=True)

        def metrics(self, stats, num_tokens, step, rule):
            return {"of reuse": (num_tokens, step, rule)}

        def remember(self, keys, trajectories, step, cache):
            remembered.append((keys, len(trajectories), step, cache))
            return {"remembered": 1.0}

    algorithm = SimpleNamespace(resolved=SimpleNamespace(max_extra_phases=extra))
    system = SimpleNamespace(
        config=SimpleNamespace(algorithm=algorithm),
        reuse=Reuse(),
        speculation=SimpleNamespace(keeps_history=False),
        inputs=SimpleNamespace(left_out=None),
        listeners=[SimpleNamespace(metrics=lambda stats: {"of a feature": 2.0})],
    )
    rewards = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.5, (1, 1): 0.5}
    if carried is not None:
        rewards |= {(2, 0): 0.0, (2, 1): 1.0}
    rows = [
        (trajectory(2 * g + i, [1], [5], group=g, sample=i, reward=r), Score({}, r), f"{g}.{i}")
        for (g, i), r in rewards.items()
    ]
    prompts = asked("0") + asked("1")
    found = in_order(reversed(rows), EngineStats())
    rollouts = finish_step(
        system, prompts, found, 4, cursor=7, cache="cache", num_tokens=9, carried=carried
    )
    assert rollouts.completions == [f"{g}.{i}" for g, i in rewards] and rollouts.cursor == 7
    keys = ["0", "1"] if carried is None else ["0", "1", "before"]
    assert rollouts.prompts.keys == keys and remembered == [(keys, len(rows), 4, "cache")]
    dynamic = {
        "dynamic_sampling/phases": 2.0,
        "dynamic_sampling/generated_groups": 2.0,
        "dynamic_sampling/used_groups": float(carried is not None),
    }
    assert rollouts.metrics == {
        "of reuse": (9, 4, None),
        "remembered": 1.0,
        "rollout/left_out_prompts": 6.0,
        "of a feature": 2.0,
        **({} if extra is None else dynamic),
    }
    assert rollouts.used.tolist() == [extra is None or g == 2 for g, _ in rewards]
