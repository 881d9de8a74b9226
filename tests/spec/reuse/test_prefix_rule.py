"""How much of a cached response stands: by hand, and by the law of the acceptance draws."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, Verified, parse_mode
from spec.reuse.rollout_cache import CachedResponse, Scores

FALSE_ALARM = 1e-6


def cached(tokens, logprobs):
    old = np.asarray(logprobs, np.float32)
    scores = Scores(old, old, np.zeros(len(old), np.int32))
    return CachedResponse(0, np.asarray(tokens, np.int32), 1.0, scores)


def verified(logprobs, drawn, possible=None):
    new = np.asarray(logprobs, np.float32)
    can = np.ones(len(new), bool) if possible is None else np.asarray(possible)
    return Verified(new, can, np.asarray(drawn, np.int32), new)


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
    for bad in ("coupled:", "coupled:8", "full:1"):
        with pytest.raises(ValueError, match="mode must be"):
            parse_mode(bad)
    for bad in ("lenient", "lenient:", "lenient:-1", "lenient:nan", "lenient:x", "delayed:e^"):
        with pytest.raises(ValueError, match="lenien|mode must be"):
            parse_mode(bad)
    with pytest.raises(ValueError, match="mode must be one of off, lenient:LAMBDA"):
        parse_mode("reuse")


@pytest.mark.parametrize("text", ["lenient:1", "lenient:2", "delayed:1"])
def test_tokens_that_became_likelier_are_kept(text):
    found = verified([-0.5, -0.9, -1.0, -0.1], [0, 0, 0, 0])
    kept = [rule(text, step=s).kept(9, EVEN, found) for s in range(50)]
    assert set(kept) == {4}


def test_tokens_that_cannot_be_drawn_any_more_are_rejected():
    found = verified([-0.1] * 4, TOKENS, possible=[True, True, False, True])
    assert rule("lenient:9").kept(0, EVEN, found) == 2
    assert rule("lenient:inf").kept(0, EVEN, found) == 4  # the ablation keeps all
    assert rule("full").kept(0, EVEN, found) == 4
    assert rule("lenient:0").kept(0, EVEN, verified([9.0] * 4, TOKENS)) == 0


def test_at_temperature_zero_the_most_likely_tokens_stand():
    found = verified([-9.0] * 4, [5, 6, 7, 1], possible=[True, True, True, False])
    assert rule("lenient:1", greedy=True).kept(0, EVEN, found) == 3
    assert rule("lenient:1").kept(0, EVEN, found) < 3  # at another one, e^−8 a token


def test_coupled_tokens_stand_while_they_are_drawn_again():
    assert rule("coupled").kept(0, EVEN, verified([-9.0] * 4, [5, 6, 0, 8])) == 2
    assert rule("coupled").kept(0, EVEN, verified([-9.0] * 4, TOKENS)) == 4
    assert rule("coupled").kept(0, cached([], []), verified([], [])) == 0
    assert rule("coupled").mode.couples_noise and not rule("lenient:1").mode.couples_noise


@pytest.mark.statistical
@pytest.mark.parametrize(("lenience", "log_ratio"), [(1.0, -0.7), (2.0, -1.2), (0.5, 0.3)])
def test_a_token_stands_with_the_probability_of_equation_3(lenience, log_ratio):
    """20,000 requests; false-alarm rate 1e-6, two-sided by the binomial law."""
    prob = min(1.0, lenience * math.exp(log_ratio))
    ours = rule(f"lenient:{lenience}")
    one, found = cached([5], [-1.0]), verified([-1.0 + log_ratio], [5])
    n = 20_000
    kept = sum(ours.kept(r, one, found) for r in range(n))
    low, high = binom.interval(1 - FALSE_ALARM, n, prob)
    assert low <= kept <= high


@pytest.mark.statistical
def test_draws_are_fresh_each_step_and_differ_by_request():
    """Public code seeds them alike in every step: then the same tokens would fall each time."""
    found = verified([-1.7] * 4, TOKENS)  # e^−0.7 a token
    by_step = [rule("lenient:1", step=s).kept(0, EVEN, found) for s in range(64)]
    by_request = [rule("lenient:1").kept(r, EVEN, found) for r in range(64)]
    assert len(set(by_step)) > 2 and len(set(by_request)) > 2
    assert rule("lenient:1", step=5).kept(3, EVEN, found) == rule("lenient:1", step=5).kept(
        3, EVEN, found
    )


@pytest.mark.statistical
def test_random_reuse_rejects_at_a_uniform_place():
    """10,000 requests of 4 tokens; false-alarm rate 1e-6 for each of the four counts."""
    n = 10_000
    kept = [rule("random").kept(r, EVEN, verified([-9.0] * 4, TOKENS)) for r in range(n)]
    low, high = binom.interval(1 - FALSE_ALARM, n, 0.25)
    counts = np.bincount(kept, minlength=4)
    assert len(counts) == 4 and (counts >= low).all() and (counts <= high).all()
