"""Rules and lenience of cached prefixes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from reprise.spec.reuse.prefix_rule import (
    GAIN,
    LARGEST_LOG,
    PrefixRule,
    log,
    parse_mode,
    parse_schedule,
)
from reprise.spec.reuse.rollout_cache import CachedResponse, Scores

FALSE_ALARM = 1e-6


def cached(tokens, logprobs):
    old = np.asarray(logprobs, np.float32)
    scores = Scores(old, old, np.zeros(len(old), np.int32))
    return CachedResponse(0, np.asarray(tokens, np.int32), 1.0, scores)


def kept(rule, request_id, response, logprobs, possible=True):
    """How many first tokens the rule keeps, of these log-probabilities now."""
    least = rule.min_logprobs(request_id, response, len(response.tokens))
    assert least.dtype == np.float32
    keeps = (least == -np.inf) | (np.asarray(possible) & (np.asarray(logprobs) >= least))
    return len(keeps) if keeps.all() else int(np.argmin(keeps))


def rule(text, *, step=1, seed=0, greedy=False):
    mode = parse_mode(text)
    return PrefixRule(mode, log(mode.lenience), seed, step, greedy)


TOKENS = [5, 6, 7, 8]
EVEN = cached(TOKENS, [-1.0] * 4)


def test_modes_by_name():
    assert parse_mode("lenient:1.5").lenience == 1.5
    assert parse_mode("delayed:e^0.5").lenience == pytest.approx(math.exp(0.5))
    assert parse_mode("lenient:inf").lenience == math.inf
    assert [parse_mode(m).back for m in ("lenient:1", "delayed:1", "full")] == [0, 1, 0]
    assert not parse_mode("off").enabled and parse_mode("random").enabled
    assert parse_mode("coupled").couples_noise and not parse_mode("full").couples_noise
    noise = parse_mode("repeated_noise")
    assert noise.couples_noise and not noise.enabled, "the noise of coupled, and no reuse"
    for bad in ("coupled:", "coupled:8", "full:1", "repeated_noise:1"):
        with pytest.raises(ValueError, match="mode must be"):
            parse_mode(bad)
    for bad in ("lenient", "lenient:", "lenient:-1", "lenient:nan", "lenient:x", "delayed:e^"):
        with pytest.raises(ValueError, match="lenien|mode must be"):
            parse_mode(bad)
    with pytest.raises(ValueError, match="mode must be one of off, lenient:LAMBDA"):
        parse_mode("reuse")


@pytest.mark.parametrize("text", ["lenient:1", "lenient:2", "delayed:1"])
def test_tokens_that_became_likelier_are_kept(text):
    found = [-0.5, -0.9, -1.0, -0.1]
    assert {kept(rule(text, step=s), 9, EVEN, found) for s in range(50)} == {4}


def test_tokens_that_cannot_be_drawn_any_more_are_rejected():
    found = [-0.1] * 4, [True, True, False, True]
    assert kept(rule("lenient:9"), 0, EVEN, *found) == 2
    assert kept(rule("lenient:inf"), 0, EVEN, *found) == 4  # the ablation keeps all
    assert kept(rule("full"), 0, EVEN, *found) == 4
    assert kept(rule("lenient:0"), 0, EVEN, [9.0] * 4) == 0


def test_at_temperature_zero_the_most_likely_tokens_stand():
    found = [-9.0] * 4, [True, True, True, False]
    assert kept(rule("lenient:1", greedy=True), 0, EVEN, *found) == 3
    assert kept(rule("lenient:1"), 0, EVEN, *found) < 3  # at another one, e^−8 a token


def test_tokens_that_are_not_looked_at_have_no_bound():
    for text in ("random", "lenient:1", "lenient:0", "full"):
        assert rule(text).min_logprobs(0, EVEN, 2).shape == (2,)
        assert rule(text).min_logprobs(0, cached([], []), 0).shape == (0,)
    assert rule("coupled").mode.couples_noise and not rule("lenient:1").mode.couples_noise


@pytest.mark.statistical
@pytest.mark.parametrize(("lenience", "log_ratio"), [(1.0, -0.7), (2.0, -1.2), (0.5, 0.3)])
def test_a_token_stands_with_the_probability_of_equation_3(lenience, log_ratio):
    """20,000 requests; false-alarm rate 1e-6, two-sided by the binomial law."""
    prob = min(1.0, lenience * math.exp(log_ratio))
    ours = rule(f"lenient:{lenience}")
    one, n = cached([5], [-1.0]), 20_000
    count = sum(kept(ours, r, one, [-1.0 + log_ratio]) for r in range(n))
    low, high = binom.interval(1 - FALSE_ALARM, n, prob)
    assert low <= count <= high


@pytest.mark.statistical
def test_draws_are_fresh_each_step_and_differ_by_request():
    """Public code seeds them alike in every step: then the same tokens would fall each time."""
    found = [-1.7] * 4  # e^−0.7 a token
    by_step = [kept(rule("lenient:1", step=s), 0, EVEN, found) for s in range(64)]
    by_request = [kept(rule("lenient:1"), r, EVEN, found) for r in range(64)]
    assert len(set(by_step)) > 2 and len(set(by_request)) > 2
    again = [kept(rule("lenient:1", step=5), 3, EVEN, found) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.statistical
def test_random_reuse_rejects_at_a_uniform_place():
    """10,000 requests of 4 tokens; false-alarm rate 1e-6 for each of the four counts."""
    n = 10_000
    found = [kept(rule("random"), r, EVEN, [-9.0] * 4) for r in range(n)]
    low, high = binom.interval(1 - FALSE_ALARM, n, 0.25)
    counts = np.bincount(found, minlength=4)
    assert len(counts) == 4 and (counts >= low).all() and (counts <= high).all()


def test_constant():
    schedule = parse_schedule("constant")
    assert schedule.at(2.0, 0.7, 9) == 0.7 and schedule.after(0.7, 0.9) == 0.7


def test_linear_in_the_lenience():
    schedule = parse_schedule("linear:3:4")
    got = [math.exp(schedule.at(1.0, 0.0, step)) for step in (1, 2, 3, 5, 99)]
    assert got == pytest.approx([1.0, 1.5, 2.0, 3.0, 3.0])
    assert parse_schedule("linear:0:2").at(1.0, 0.0, 3) == -math.inf
    assert schedule.after(0.7, 0.9) == 0.7


def test_a_clip_fraction_is_steered_to_its_target():
    schedule = parse_schedule("clip_fraction:0.02")
    assert schedule.after(0.5, 0.02) == 0.5
    assert schedule.after(0.5, 0.0) == pytest.approx(0.5 + GAIN)
    assert schedule.after(0.5, 0.04) == pytest.approx(0.5 - GAIN / 2)
    assert schedule.after(LARGEST_LOG, 0.0) == LARGEST_LOG
    assert schedule.at(1.0, 0.3, 7) == 0.3
    log = 1.0
    for _ in range(200):  # a policy that clips in proportion to the lenience
        log = schedule.after(log, 0.01 * math.exp(log))
    assert 0.01 * math.exp(log) == pytest.approx(0.02, rel=0.01)


def test_names():
    assert log(0) == -math.inf and log(1.0) == 0
    bad_ones = ("linear", "linear:1", "linear:x:3", "linear:1:0", "linear:inf:3", "linear:-1:3")
    for bad in (*bad_ones, "clip_fraction", "clip_fraction:0", "clip_fraction:1", "cosine"):
        with pytest.raises(ValueError, match="schedule must be one of constant, linear:END:STEPS"):
            parse_schedule(bad)
