"""Requests with reuse: keys of noise, prompts and groups that changed, state."""

import dataclasses
import math

import numpy as np
import pytest
from trajectories import trajectory

from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Origin
from reprise.rl.speculation.config import MAX_SAMPLES, ReuseConfig, check_coupling
from reprise.rl.speculation.reuse import Reuse, remember
from reprise.spec.reuse.agreement import FIRST_RATE, Agreement, RunMisses, miss_rates
from reprise.spec.reuse.renewal import Renewal, renewed_name
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.round_times import RunSeconds, StepSeconds
from reprise.spec.verification.sampling import NOISE_NAMES

KEYS, PROMPTS, NUMBERS = ["a", "b"], [(1, 2, 3), (4, 5)], [7, 11]


def answer(group, sample, tokens, prompt=None, reward=1.0):
    logprobs = -np.arange(1, len(tokens) + 1)
    return trajectory(
        10 * group + sample,
        PROMPTS[group] if prompt is None else prompt,
        tokens,
        group=group,
        sample=sample,
        logprobs=logprobs,
        emission=logprobs - 1,
        version=3,
        reward=reward,
    )


def make(mode="lenient:1", schedule="constant", cache=None, *, share=0.0, renews=False, age=None):
    config = ReuseConfig(mode, schedule, share, renews, age)
    cache = RolloutCache(epochs=config.epochs) if cache is None else cache
    return Reuse(config, cache, seed=3, greedy=False), cache


def group(number):
    return [answer(g, i, [number, g, i]) for g in (0, 1) for i in (0, 1)]


def requests(reuse, size=2, keys=KEYS, prompts=PROMPTS, numbers=NUMBERS, step=1):
    return reuse.requests(keys, prompts, numbers, size, step=step)


def tokens_of(request):
    return None if request.cached is None else request.cached.tokens.tolist()


def test_first_samples_come_first_and_each_gets_its_own_response():
    reuse, cache = make()
    assert [tokens_of(r) for r in requests(reuse)] == [None] * 4
    remember(cache, KEYS, group(50), scored=True)
    got = requests(reuse)
    assert [(r.group_id, r.sample_index) for r in got] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [tokens_of(r) for r in got] == [[50, 0, 0], [50, 1, 0], [50, 0, 1], [50, 1, 1]]
    assert [r.request_id for r in got] == [0, 2, 1, 3]
    scores = got[0].cached.scores
    assert scores.logprobs.tolist() == [-1, -2, -3]
    assert scores.emission_logprobs.tolist() == [-2, -3, -4]
    assert scores.policy_versions.tolist() == [3, 3, 3]
    assert reuse.new_problems() == []


def test_delayed_reuse_takes_the_epoch_before_the_last():
    reuse, cache = make("delayed:1")
    remember(cache, KEYS, group(50), scored=True)
    assert [tokens_of(r) for r in requests(reuse)] == [None] * 4
    remember(cache, KEYS, group(60), scored=True)
    assert tokens_of(requests(reuse)[0]) == [50, 0, 0]


def test_a_changed_prompt_group_size_or_missing_score_is_told_and_answered_afresh():
    reuse, cache = make()
    remember(cache, KEYS, group(50), scored=True)
    got = requests(reuse, prompts=[(1, 2, 9), (4, 5)])
    assert [tokens_of(r) for r in got] == [None, [50, 1, 0], None, [50, 1, 1]]
    [problem] = reuse.new_problems()
    assert "'a'" in problem and "prompt is another" in problem
    got = requests(reuse, size=3)
    assert [r.cached is not None for r in got] == [True] * 4 + [False] * 2
    problems = reuse.new_problems()
    assert len(problems) == 2 and "'a' has 2 cached responses where 3 are asked for" in problems[0]
    remember(cache, KEYS, group(50), scored=False)
    assert not any(r.cached for r in requests(reuse))
    assert len(reuse.new_problems()) == 2 and reuse.new_problems() == []


def test_delayed_reuse_takes_no_responses_to_another_prompt():
    reuse, cache = make("delayed:2")
    old = [answer(0, i, [9, 7], prompt=(9, 9, 9), reward=float(i)) for i in (0, 1)]
    new = [answer(0, i, [1, 7], reward=float(i)) for i in (0, 1)]
    remember(cache, KEYS[:1], old, scored=True)
    remember(cache, KEYS[:1], new, scored=True)
    assert [tokens_of(r) for r in requests(reuse, keys=KEYS[:1], prompts=PROMPTS[:1])] == [None] * 2
    assert reuse.new_problems() == ["'a' is answered afresh: its cached prompt is another one"]


def test_renewals_are_recorded_as_the_requests_had_them():
    """In a pipeline a step before has brought the same prompt's responses meanwhile."""
    reuse, cache = make("coupled", renews=True)
    equal = [answer(0, i, [5, i]) for i in (0, 1)]
    later = [answer(0, i, [6, i]) for i in (0, 1)]
    [first, _] = requests(reuse, keys=KEYS[:1], prompts=PROMPTS[:1], step=2)
    reuse.remember(KEYS[:1], equal, 1, cache)  # renewals 0; their rewards are equal
    assert cache.get("a").renewals == 0
    metrics = reuse.remember(KEYS[:1], later, 2, cache)
    assert cache.get("a").renewals == first.request_id // NOISE_NAMES == 0
    assert "spec/repeated_fraction" not in metrics  # the requests of step 2 had no responses
    [third, _] = requests(reuse, keys=KEYS[:1], prompts=PROMPTS[:1], step=3)
    assert third.request_id // NOISE_NAMES == 1


def test_responses_of_another_policy_or_tokenizer_are_told_and_answered_afresh(tmp_path):
    cache = RolloutCache(policy="tiny")
    remember(cache, KEYS, group(50), scored=True)
    other = RolloutCache(policy="large")
    other.load_state(cache.state())
    reuse, _ = make(cache=other)
    assert not any(r.cached for r in requests(reuse))
    problems = other.new_problems()
    assert len(problems) == 2 and "like 'large', got 'tiny'" in problems[0]


def test_many_problems_are_counted():
    reuse, cache = make()
    keys, n = [f"k{i}" for i in range(9)], 9
    prompts = [(i + 1,) for i in range(n)]
    answers = [answer(i, 0, [1], prompt=(99,)) for i in range(n)]
    remember(cache, keys, answers, scored=True)
    requests(reuse, 1, keys, prompts, list(range(n)))
    assert len(problems := reuse.new_problems()) == 4 and problems[-1] == "6 more prompts likewise"


def test_noise_has_the_names_of_example_and_sample_in_every_epoch():
    reuse, _ = make("coupled")
    ids = [r.request_id for r in requests(reuse)]
    again = requests(reuse, keys=KEYS[::-1], prompts=PROMPTS[::-1], numbers=NUMBERS[::-1])
    assert sorted(ids) == sorted(r.request_id for r in again) and len(set(ids)) == 4
    of_a = {r.sample_index: r.request_id for r in requests(reuse) if r.group_id == 0}
    assert of_a == {r.sample_index: r.request_id for r in again if r.group_id == 1}
    # a group that grows keeps the names that it had
    assert set(ids) < {r.request_id for r in requests(reuse, size=3)}
    assert (reuse.key(1) == reuse.key(9)).all()
    fresh, _ = make("lenient:1")
    assert not (fresh.key(1) == fresh.key(9)).all() and not (fresh.key(1) == reuse.key(1)).all()


def test_a_group_that_taught_nothing_draws_with_fresh_noise_from_then_on():
    reuse, cache = make("coupled", renews=True)
    ids, got = {}, {}
    for step in (1, 2, 3):  # only the first answers to "b" teach nothing
        for r in requests(reuse, step=step):
            got[step, r.group_id, r.sample_index] = r
            ids[step, r.group_id, r.sample_index] = r.request_id
        rewards = {(g, i): float(i and (g == 0 or step > 1)) for g in (0, 1) for i in (0, 1)}
        done = [answer(g, i, [9], reward=reward) for (g, i), reward in rewards.items()]
        metrics = reuse.remember(KEYS, done, step, cache)
        assert metrics["spec/renewed_groups"] == (step == 1)
        assert metrics.get("spec/repeated_fraction") == (None if step == 1 else 1.0)
    for i in (0, 1):
        assert ids[1, 0, i] == ids[2, 0, i] == ids[3, 0, i]
        assert ids[1, 1, i] != ids[2, 1, i] == ids[3, 1, i]
        assert [got[s, 0, i].cached is not None for s in (1, 2, 3)] == [False, True, True]
        assert [got[s, 1, i].cached is not None for s in (1, 2, 3)] == [False, False, True]
    assert len({number % NOISE_NAMES for number in ids.values()}) == 6
    resumed = RolloutCache()
    resumed.load_state(cache.state())
    after = requests(make("coupled", renews=True, cache=resumed)[0], step=4)
    assert [r.request_id for r in after] == [r.request_id for r in requests(reuse, step=4)]


def test_rewards_that_are_missing_teach_nothing_and_groups_of_one_are_left_alone():
    reuse, cache = make("repeated_noise", renews=True)
    before = [r.request_id for r in requests(reuse)]
    group = [answer(0, 0, [9]), answer(0, 1, [9], reward=None), answer(1, 0, [9], reward=None)]
    reuse.remember(KEYS, group, 1, cache)
    after = [r.request_id for r in requests(reuse, step=2)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True] * 2


@pytest.mark.parametrize("mode", ["coupled", "lenient:1", "delayed:1"])
def test_a_share_of_each_group_is_answered_afresh_in_every_epoch(mode):
    reuse, cache = make(mode, share=0.125)
    names = []
    for step in (1, 2, 3, 4):
        got = [r for r in requests(reuse, 4, step=step) if r.group_id == 0]
        assert [r.cached is not None for r in got] == [step > 1 + reuse.mode.back] * 3 + [False]
        names.append([r.request_id % NOISE_NAMES for r in got])
        every = [answer(g, i, [5, 6]) for g in (0, 1) for i in range(4)]
        reuse.remember(KEYS, every, step, cache)
    if mode == "coupled":
        *repeating, fresh = zip(*names, strict=True)
        assert all(len(set(of_one)) == 1 for of_one in repeating) and len(set(fresh)) == 4


@pytest.mark.parametrize(
    ("share", "size", "num_fresh"),
    [
        (0.125, 8, 1),
        (0.125, 16, 2),
        (0.125, 9, 2),
        (0.01, 2, 1),
        (1.0, 4, 3),
        (0.5, 1, 0),
        (0, 8, 0),
    ],
)
def test_a_share_is_rounded_up_and_never_the_whole_group(share, size, num_fresh):
    assert sum(Renewal(share, False).is_fresh(i, size) for i in range(size)) == num_fresh


def test_names_of_one_renewal_are_different_and_those_of_several_are_unrelated():
    names = np.array([[renewed_name(n, r) for n in range(2000)] for r in (0, 1, 2, 70)])
    assert (names >= 0).all() and (names < NOISE_NAMES).all()
    assert len(np.unique(names)) == names.size, "of 2³¹, chance has one pair in 67 tries"
    apart = np.diff(names[1:].astype(float), axis=1)
    assert (np.sign(apart) > 0).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("sched_mode", ["coupled", "lenient:1", "full"])
def test_a_response_with_a_token_that_is_too_old_is_generated_anew(sched_mode):
    reuse, cache = make(sched_mode, age=5)
    remember(cache, KEYS, group(50), scored=True)  # drawn by version 3
    assert all(r.cached for r in requests(reuse, step=9))
    kept = [r.cached is not None for r in requests(reuse, step=10)]
    assert kept == [sched_mode == "coupled"] * 4, "its tokens are draws of the present policy"


def test_the_age_of_kept_tokens_is_a_metric():
    reuse, cache = make("lenient:1")
    drawn = [answer(g, i, [1, 2, 3, 4]) for g in (0, 1) for i in (0, 1)]
    for t in drawn[:2]:
        t.origins[:3] = Origin.REUSED
        t.policy_versions[:] = [1, 1, 4, 6]
    metrics = reuse.remember(KEYS, drawn, 7, cache)
    assert (metrics["spec/reused_age"], metrics["spec/reused_age_max"]) == (4.0, 5.0)
    assert "spec/reused_age" not in make("coupled")[0].remember(KEYS, drawn, 7, cache)
    assert make("off")[0].remember(KEYS, drawn, 7, cache) == {}


def test_repeated_noise_is_that_of_coupled_and_nothing_is_reused():
    coupled, cache = make("coupled")
    alone, _ = make("repeated_noise", cache=cache)
    remember(cache, KEYS, group(50), scored=True)
    plain = [dataclasses.replace(r, cached=None) for r in requests(coupled)]
    assert requests(alone) == plain != requests(coupled)
    assert (alone.key(3) == coupled.key(3)).all() and alone.rule(3) is None


@pytest.mark.parametrize("mode", ["coupled", "full"])
def test_an_example_that_comes_twice_in_a_step_is_answered_afresh_the_second_time(mode):
    reuse, cache = make(mode)
    remember(cache, KEYS, group(50), scored=True)
    got = requests(reuse, keys=["a", "b", "a"], prompts=[*PROMPTS, PROMPTS[0]], numbers=[7, 11, 7])
    assert len({r.request_id for r in got}) == 6
    assert [r.cached is not None for r in got] == [True, True, False] * 2


def test_noise_is_named_anew_each_time_that_a_step_has_an_example():
    reuse, _ = make("coupled")
    (once,) = reuse.requests(["a"], PROMPTS[:1], [7], 1, step=1)
    again = {"before": ["b", "a"], "step": 1}
    twice, thrice = reuse.requests(["a", "a"], PROMPTS[:1] * 2, [7, 7], 1, **again)
    assert [r.request_id - once.request_id for r in (twice, thrice)] == [512, 513]
    largest = reuse.requests(["a"], PROMPTS[:1], [7], 256, before=["a", "a"], step=1)[-1]
    assert largest.request_id - once.request_id == 1023, "the next example's begin at 1024"


def test_noise_without_a_key_is_refused():
    coupled = ReuseConfig("coupled")
    check_coupling(coupled, 100, 50, 8)
    check_coupling(ReuseConfig("full"), 10, 50, 9999)
    for arguments in ((2**22, 5, 8), (100, 5, MAX_SAMPLES + 1)):
        with pytest.raises(ValueError, match="has names for 2097152 examples with 512 samples"):
            check_coupling(coupled, *arguments)
    check_coupling(coupled, 10, 6, 256, max_times=3)
    with pytest.raises(ValueError, match="may have one 3 times need 2 × 257"):
        check_coupling(coupled, 10, 6, 257, max_times=3)
    with pytest.raises(ValueError, match="at most twice in a step"):
        check_coupling(coupled, 10, 11, 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "some"}, "mode must be one of off, lenient:LAMBDA"),
        ({"mode": "lenient:1", "schedule": "cosine"}, "schedule must be one of constant"),
        ({"mode": "full", "schedule": "linear:1:5"}, "mode 'full' has none"),
        ({"mode": "lenient:0", "schedule": "clip_fraction:0.1"}, "between 0 and inf"),
        ({"mode": "lenient:inf", "schedule": "linear:1:5"}, "cannot start from"),
        ({"fresh_share": 1.5}, "expected 0 to 1, got 1.5"),
        ({"max_age_steps": 0}, "max_age_steps of 1 or more, got 0"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        ReuseConfig(**settings)


def test_the_rule_of_a_step_and_the_state_that_it_takes():
    assert make("off")[0].rule(1) is None
    steered, _ = make("lenient:2", "clip_fraction:0.1")
    assert steered.rule(1).log_lenience == pytest.approx(math.log(2))
    steered.after_update({"clip_ratio/region_mean": 0.0})
    steered.after_update({})  # a batch without a usable sample
    after = steered.rule(2).log_lenience
    assert after == pytest.approx(math.log(2) + 0.1)
    other, _ = make("lenient:2", "clip_fraction:0.1")
    other.load_state(steered.state())
    assert other.rule(2) == dataclasses.replace(steered.rule(2))
    linear, _ = make("lenient:1", "linear:3:2")
    assert [math.exp(linear.rule(s).log_lenience) for s in (1, 2, 3)] == pytest.approx([1, 2, 3])


def test_metrics():
    stats = EngineStats()
    for num_tokens, kept in ((10, 10), (10, 4), (10, 0)):
        stats.cached.add(num_tokens, kept)
    got = make("lenient:2")[0].metrics(stats, 56, step=1)
    assert got["spec/reused_fraction"] == 14 / 56
    assert got["spec/full_reuse_fraction"] == 1 / 3
    assert got["spec/verified_prefix_tokens"] == 14 / 3
    assert got["spec/cached_accept_rate"] == 14 / 16  # two tokens were refused
    assert got["spec/lenience"] == pytest.approx(2)
    assert make("off")[0].metrics(stats, 56, step=1) == {}
    assert "spec/lenience" not in make("coupled")[0].metrics(stats, 56, step=1)


def test_rates_follow_from_the_last_agreement_of_responses_also_after_a_resume():
    reuse, cache = make("coupled", share=0.3)  # the last of three samples draws fresh noise
    epochs = [[[5, 6, 7], [5, 6], [1]], [[5, 6, 8], [5, 6], [1]], [[5, 9], [5, 6], [1]]]

    def play(reuse, cache, step):
        got = requests(reuse, 3, step=step)
        tokens = epochs[step - 1]
        done = [answer(g, i, tokens[i], reward=float(i)) for g in (0, 1) for i in range(3)]
        reuse.remember(KEYS, done, step, cache)
        rates = [r.cached.miss_rate for r in got if r.cached and r.group_id == 0]
        return [got[0].cached and got[0].cached.agreement, rates]

    assert play(reuse, cache, 1) == [None, []]
    assert play(reuse, cache, 2) == [None, [FIRST_RATE] * 2], "nothing has been repeated yet"
    resumed_cache = RolloutCache()
    resumed_cache.load_state(cache.state())
    resumed, _ = make("coupled", cache=resumed_cache, share=0.3)
    resumed.load_state(reuse.state())
    first, [one, other] = play(reuse, cache, 3)
    assert first == Agreement(2, 3) and cache.get("a").responses[2].agreement is None
    of_run = RunMisses(2.0, 10.0).rate  # one of three and none of two, of each group
    want = miss_rates({0: Agreement(2, 3), 1: Agreement(2, 2)}, of_run)
    assert [one, other] == pytest.approx([want[0], want[1]]) and one > other
    assert play(resumed, resumed_cache, 3) == [first, [one, other]]
    assert resumed.state() == reuse.state()


def test_coupled_reuse_that_loses_ends_and_lenient_goes_on():
    seconds = RunSeconds(losing_steps=2)
    modes = {mode: ReuseConfig(mode) for mode in ("coupled", "lenient:1")}
    reuses = {
        mode: Reuse(config, RolloutCache(), seed=3, greedy=False, seconds=seconds)
        for mode, config in modes.items()
    }
    for saved_s, is_off in ((-1, False), (0, False), (1, False), (-1, False), (-1, True)):
        seconds.played(StepSeconds(10.0, 0.0, {}, True, saved_s))
        assert (reuses["coupled"].rule(2) is None) == is_off
        assert reuses["lenient:1"].rule(2) is not None
    seconds.played(StepSeconds(10.0, 0.0, {}, True, 5.0))
    assert reuses["coupled"].rule(2) is None, "for the rest of the run"
