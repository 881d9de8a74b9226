"""Prefixes of cached responses: what stands is what the rule says, the rest is plain decoding."""

import dataclasses

import numpy as np
import pytest
from parity_model import (
    BASE,
    MODEL,
    SAMPLINGS,
    STOP,
    TOLERANCE,
    differences,
    misscored,
    naive_rollout,
)
from test_parity_speculation import TIMES, make

from rl.engine import cache_ops
from rl.engine.engine import Engine
from rl.trajectory import FinishReason, Origin
from spec.budget.by_name import make_budget
from spec.reuse.lenience import log
from spec.reuse.prefix_rule import PrefixRule, parse_mode
from spec.reuse.rollout_cache import CachedResponse, Scores

pytestmark = pytest.mark.parity

OLD_LOGPROB = -2.5
PASSES = dataclasses.replace(BASE, verify_tokens=256)  # four rows of 64


@pytest.fixture(scope="module")
def reusing(engine):
    return Engine(MODEL, PASSES)


def rule(mode, **fields):
    mode = parse_mode(mode)
    return PrefixRule(mode, log(mode.lenience), 3, 2, **fields)


def with_cached(requests, tokens_of):
    """The requests, each with what `tokens_of(request)` was its response; None for none."""

    def one(r):
        tokens = tokens_of(r)
        if tokens is None:
            return r
        tokens = np.asarray(tokens, np.int32)
        old = np.full(len(tokens), OLD_LOGPROB, np.float32)
        scores = Scores(old, old - 1, np.full(len(tokens), -7, np.int32))
        return dataclasses.replace(r, cached=CachedResponse(r.sample_index, tokens, 1.0, scores))

    return [one(r) for r in requests]


def some_tokens(request):
    """Any tokens, of any length, with ends among them; every fifth request has none."""
    rng = np.random.default_rng(request.request_id)
    if request.request_id // 1000 % 5 == 4:
        return None
    return rng.integers(0, MODEL.vocab_size, rng.integers(0, 30))


def changed(golden, request):
    """What the request gives, with a token changed somewhere."""
    tokens = np.array(golden[request.request_id].beyond[:20], np.int32)
    at = request.request_id // 1000 % 23  # some are not changed at all
    if at < len(tokens):
        tokens[at] = (tokens[at] + 1) % MODEL.vocab_size
    return tokens


def usable(request, tokens, limit=24):
    """The cached tokens up to the first end, and to the request's limit."""
    tokens = np.asarray(tokens)[: request.max_new_tokens or limit]
    ends = np.nonzero(np.isin(tokens, STOP))[0]
    return tokens[: ends[0] + 1] if len(ends) else tokens


@pytest.mark.parametrize("name", ["plain", "cool", "top_k", "greedy", "gumbel"])
def test_lenience_zero_is_plain_decoding(golden, rollout, requests, reusing, params, name):
    given = with_cached(requests, some_tokens)
    got = rollout(name, given, engine=reusing, rule=rule("lenient:0"))
    assert not differences(golden(name), got)
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    counts = reusing.stats.verified
    assert counts.kept_tokens == counts.whole == 0 < counts.responses < len(requests)


def test_without_a_rule_cached_responses_are_ignored(golden, rollout, requests, engine):
    got = rollout("plain", with_cached(requests, some_tokens), engine=engine)
    assert not differences(golden("plain"), got) and not engine.stats.verified.responses


def test_a_planted_fault_keys_gathered_one_place_off_would_be_found(
    golden, rollout, requests, reusing, params, monkeypatch
):
    gather = cache_ops.gather_rows

    def off(cache, packed, index_BS, *rest):
        return gather(cache, packed, np.roll(index_BS, 1, axis=1), *rest)

    monkeypatch.setattr(cache_ops, "gather_rows", off)
    want = golden("plain")
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout("plain", given, engine=reusing, rule=rule("coupled"))
    assert differences(want, got)
    assert max(misscored(params, got, SAMPLINGS["plain"]).values()) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["plain", "greedy", "gumbel_cool"])
def test_coupled_accepts_what_it_draws_itself(golden, rollout, requests, reusing, params, name):
    want = golden(name)
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout(name, given, engine=reusing, rule=rule("coupled"))
    assert not differences(want, got)
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    counts = reusing.stats.verified
    assert 0 < counts.whole < counts.responses and 0 < counts.kept_tokens < counts.tokens
    kept = sum(int((t.origins == Origin.ACCEPTED).sum()) for t in got)
    assert kept == counts.kept_tokens
    assert all((t.policy_versions == 0).all() for t in got)
    assert all(np.array_equal(t.logprobs, t.emission_logprobs) for t in got)


@pytest.mark.parametrize("name", ["plain", "cool", "greedy"])
@pytest.mark.parametrize("mode", ["lenient:e^1", "lenient:e^3", "random", "full", "lenient:inf"])
def test_kept_prefixes_stay_and_the_rest_is_decoded(rollout, requests, reusing, params, mode, name):
    given = with_cached(requests, some_tokens)
    greedy = name == "greedy"
    got = rollout(name, given, engine=reusing, rule=rule(mode, greedy=greedy), policy_version=4)
    prefixes = {}
    for request, t in zip(given, got, strict=True):
        reused = t.origins == Origin.REUSED
        n = int(reused.sum())
        assert reused[:n].all()
        prefixes[t.request_id] = t.response_ids[:n]
        if request.cached is None:
            assert n == 0
            continue
        stands = usable(request, request.cached.tokens)
        np.testing.assert_array_equal(t.response_ids[:n], stands[:n])
        if mode in ("full", "lenient:inf"):
            assert n == len(stands)
        # what an older policy drew is known as such
        assert (t.policy_versions[:n] == -7).all() and (t.policy_versions[n:] == 4).all()
        assert (t.emission_logprobs[:n] == OLD_LOGPROB - 1).all()
        np.testing.assert_array_equal(t.emission_logprobs[n:], t.logprobs[n:])
    want = naive_rollout(MODEL, params, requests, SAMPLINGS[name], prefixes)
    for t in got:
        assert tuple(t.response_ids.tolist()) == want[t.request_id].response_ids
        assert t.finish_reason is want[t.request_id].finish_reason
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    if not greedy or not mode.startswith("lenient:e"):  # no random token is the most likely one
        assert sum(map(len, prefixes.values())) > 0


def test_prefixes_and_drafters_together(golden, rollout, requests, reusing):
    want = golden("cool")
    given = with_cached(requests, lambda r: changed(want, r))
    for budget in ("fixed:7", "goodput"):
        got = rollout(
            "cool",
            given,
            engine=reusing,
            rule=rule("coupled"),
            drafter=make("all", want, requests),
            budget=make_budget(budget, TIMES),
        )
        assert not differences(want, got)
    assert reusing.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 1, "min_slots": 1},
        {"min_positions": 32},
        {"verify_tokens": 32},
        {"verify_row_tokens": 128},
        {"slots": 4, "min_slots": 2, "verify_tokens": 1024},
    ],
)
def test_few_slots_small_passes_and_caches_that_grow(golden, rollout, requests, change):
    engine = Engine(MODEL, dataclasses.replace(PASSES, **change))
    want = golden("cool")
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout("cool", given, engine=engine, rule=rule("coupled"))
    assert not differences(want, got)


def test_a_whole_response_that_ended_never_enters_a_row(golden, rollout, requests, reusing):
    want = golden("plain")
    given = with_cached(requests, lambda r: want[r.request_id].response_ids)
    seen = []
    got = rollout("plain", given, engine=reusing, rule=rule("full"), on_finish=seen.append)
    assert not differences(want, got)
    assert sorted(t.request_id for t in seen) == sorted(r.request_id for r in requests)
    assert reusing.stats.fetches == 0 and not reusing.stats.timeline


def test_a_truncated_response_resumes_where_the_limit_has_grown(golden, rollout, requests, reusing):
    want = golden("plain")
    given = with_cached(requests, lambda r: want[r.request_id].beyond[:4])
    got = rollout("plain", given, engine=reusing, rule=rule("full"))
    assert not differences(want, got)
    longer = [t for t in got if t.num_tokens > 4]
    assert longer and {t.finish_reason for t in got} == set(FinishReason)
    assert all((t.origins[:4] == Origin.REUSED).all() for t in longer)
