"""Prefixes of cached responses: what stands is what the rule says, the rest is plain decoding."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noted_drafts import Asked
from parity_model import (
    CONFIG,
    MODEL,
    POSITIONS,
    SAMPLINGS,
    STOP,
    TOLERANCE,
    differences,
    misscored,
    naive_rollout,
)
from test_parity_speculation import TIMES, make

from reprise.models.decoder import transformer
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rounds import Rounds
from reprise.rl.records.trajectory import FinishReason, Origin
from reprise.rl.slots import cached_prefixes
from reprise.rl.slots.cached_prefixes import CachedPrefixes
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.budget.budget import SeeingBudget
from reprise.spec.budget.goodput import make_budget
from reprise.spec.decoupled.copies import CopiesDrafter, Progress
from reprise.spec.drafter import Source
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.reuse.prefix_rule import PrefixRule, log, parse_mode
from reprise.spec.reuse.rollout_cache import CachedResponse, Scores
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import given_log_probs, masses, processed_logits

pytestmark = pytest.mark.parity

OLD_LOGPROB = -2.5
# by the first, which has no seconds of chunks, cached tokens are nodes; else they are in chunks
NODES = RoundTimes({(b, 2 * b, s): 1.0 for b in (1, 2, 4, 8) for s in POSITIONS})
WAYS = {"nodes": NODES, "chunks": None}
PLAIN_ROUNDS = {(8, 8, 48): 1.0, (4, 4, 48): 0.7}


def priced(alone_s, beside_s):
    """Seconds by which passes of so many chunks of eight tokens are priced, in rounds of 1 s."""
    alone = {(8, 8 * n, 48): s for n, s in alone_s.items()}
    beside = {(8, 8 * n, 48): s for n, s in beside_s.items()}
    return RoundTimes(PLAIN_ROUNDS, None, alone, beside_seconds=beside)


PRICED = {
    "always": priced({4: 1e-3, 8: 1e-3}, {1: 1e-3, 4: 1e-3}),
    "never": priced({4: 1e3, 8: 1e3}, {1: 1e3, 4: 1e3}),
    "full passes alone": priced({4: 1e3, 8: 2.2}, {1: 1e3, 4: 1e3}),
    "few rows beside": priced({4: 1e3, 8: 5.0}, {1: 1.2}),
}
both_ways = pytest.mark.parametrize("times", WAYS.values(), ids=WAYS)


@pytest.fixture(scope="module")
def reusing(engine):
    return engine


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


def agreement(tokens, want):
    """How many first tokens are those that the request gives."""
    pairs = list(zip(tokens.tolist(), want.response_ids, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


@functools.partial(jax.jit, static_argnames="sampling")
def _given(params, tokens_1T, targets_1T, *, sampling):
    logits_1TV = transformer.logits(MODEL, params, tokens_1T)
    fill = jnp.ones(tokens_1T.shape, jnp.float32)
    temperature, cuts = fill * sampling.temperature, (sampling.top_k, fill * sampling.top_p)
    processed = processed_logits(
        logits_1TV, temperature, jnp.full(tokens_1T.shape, cuts[0]), cuts[1]
    )
    return given_log_probs(logits_1TV, processed, masses(processed), targets_1T, temperature)


def given_logprobs(params, prompt_ids, tokens, sampling):
    """What a pass over the whole sequence says of each cached token."""
    text = np.zeros(65, np.int32)
    first, end = len(prompt_ids), len(prompt_ids) + len(tokens)
    text[:end] = [*prompt_ids, *tokens]
    found = _given(params, text[None, :-1], text[None, 1:], sampling=sampling)
    new, possible = (np.asarray(x)[0, first - 1 : end - 1] for x in found)
    return new, possible


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
    counts = reusing.stats.cached
    assert counts.kept_tokens == counts.whole == 0 < counts.responses < len(requests)


def test_without_a_rule_cached_responses_are_ignored(golden, rollout, requests, engine):
    got = rollout("plain", with_cached(requests, some_tokens), engine=engine)
    assert not differences(golden("plain"), got) and not engine.stats.cached.responses


@both_ways
@pytest.mark.parametrize("name", ["plain", "greedy", "blocks_cool"])
def test_coupled_accepts_what_it_draws_itself(
    golden, rollout, requests, reusing, params, name, times
):
    want = golden(name)
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout(name, given, engine=reusing, rule=rule("coupled"), times=times)
    assert not differences(want, got)
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    counts = reusing.stats.cached
    assert 0 < counts.whole < counts.responses and 0 < counts.kept_tokens < counts.tokens
    agreeing = [agreement(usable(r, r.cached.tokens), want[r.request_id]) for r in given]
    assert counts.kept_tokens == sum(agreeing)
    assert reusing.stats.accepted_tokens <= counts.kept_tokens
    in_chunks = sum(r.cached_in_chunks for r in reusing.stats.timeline)
    if times is NODES:
        assert reusing.stats.accepted_tokens > 0 == in_chunks
    else:  # a row that is decided on in chunks has no drafts of it
        decided = counts.kept_tokens + counts.responses - counts.whole
        assert reusing.stats.accepted_tokens == 0 and in_chunks == decided
    assert all((t.policy_versions == 0).all() for t in got)
    assert all(np.array_equal(t.logprobs, t.emission_logprobs) for t in got)


@pytest.mark.parametrize("begun", [False, True], ids=["cached", "begun"])
@pytest.mark.parametrize("decision", PRICED)
def test_tokens_do_not_depend_on_what_is_verified_in_chunks(
    golden, rollout, requests, reusing, monkeypatch, decision, begun
):
    """All passes, none, and some: the same tokens, and the same counts of what stands."""
    want, seen = golden("plain"), collections.Counter()
    given = with_cached(requests, lambda r: changed(want, r))
    agreeing = sum(agreement(usable(r, r.cached.tokens), want[r.request_id]) for r in given)
    for way in ("alone", "beside"):
        calls = getattr(Rounds, f"_chunks_{way}")
        noted = functools.partialmethod(_noted, calls, seen, way)
        monkeypatch.setattr(Rounds, f"_chunks_{way}", noted)
    options = {"rule": rule("coupled")}
    if begun:
        early = [dataclasses.replace(r, begun=tuple(r.cached.tokens.tolist())) for r in given]
        given = [dataclasses.replace(r, cached=None) for r in early]
        options = {"begun": True}
    drafter = make("all", want, requests)
    for drafts in ({}, {"drafter": drafter, "budget": make_budget("goodput", TIMES)}):
        got = rollout("plain", given, times=PRICED[decision], **drafts, **options)
        assert not differences(want, got)
        stats = reusing.stats
        counts = stats.begun if begun else stats.cached
        assert counts.kept_tokens == agreeing
        seen["chunks"] += sum(r.cached_in_chunks for r in stats.timeline)
        seen["decided"] += counts.decided_tokens
    if decision == "always":
        # rows that are left out of a pass decode a token meanwhile
        assert 0.9 * seen["decided"] < seen["chunks"] <= seen["decided"]
        assert seen["alone"] and seen["beside"]
    elif decision == "never":
        assert not seen["chunks"]
    else:
        assert 0 < seen["chunks"] < seen["decided"]


def keeps_what_it_looked_ahead(table, row):
    """A row that decodes instead goes on behind its cached tokens, which nobody has drawn."""
    table.total_tokens_B[row] = table.known_tokens_B[row] + 1
    table.missing_tokens_B[row] = 0
    table.cached.watch(row)


def stands_behind_a_difference(cached, chunks_TX, drawn_X, kind_X, *rows):
    return kind_X


@pytest.mark.parametrize(
    ("decision", "owner", "name", "fault"),
    [
        ("never", SlotTable, "decode_instead", keeps_what_it_looked_ahead),
        ("always", CachedPrefixes, "stand", stands_behind_a_difference),
    ],
    ids=["rows that decode instead", "passes"],
)
def test_planted_faults_of_priced_passes_are_found(
    golden, rollout, requests, monkeypatch, decision, owner, name, fault
):
    want = golden("plain")
    given = with_cached(requests, lambda r: changed(want, r))
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):  # of the engine itself, or here
        got = rollout("plain", given, rule=rule("coupled"), times=PRICED[decision])
        assert not differences(want, got)


def _noted(rounds, calls, seen, way, rows):
    seen[way] += 1
    return calls(rounds, rows)


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


@both_ways
@pytest.mark.parametrize(("name", "mode"), [("plain", "lenient:1"), ("cool", "lenient:e^0.5")])
def test_the_kept_prefix_is_what_the_rule_says_of_whole_passes(
    golden, rollout, requests, reusing, params, name, mode, times
):
    want, mine = golden(name), rule(mode)
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout(name, given, engine=reusing, rule=mine, times=times)
    assert not wrongly_kept(params, given, got, SAMPLINGS[name], mine)
    kept = [int((t.origins == Origin.REUSED).sum()) for t in got]
    assert len(set(kept)) > 3


@both_ways
def test_a_planted_fault_bounds_one_place_off_would_be_found(
    golden, rollout, requests, reusing, params, monkeypatch, times
):
    name = "_give" if times is NODES else "_give_chunks"
    give = getattr(cached_prefixes, name)

    def off(table, at_B, end_B, tokens_BL, min_BL, *found):
        give(table, at_B, end_B, tokens_BL, np.roll(min_BL, 1, axis=1), *found)

    monkeypatch.setattr(cached_prefixes, name, off)
    want, mine = golden("plain"), rule("lenient:1")
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout("plain", given, engine=reusing, rule=mine, times=times)
    assert wrongly_kept(params, given, got, SAMPLINGS["plain"], mine)


def wrongly_kept(params, given, got, sampling, mine):
    """Requests that kept more or fewer cached tokens than the rule says; rounding may decide."""
    found = []
    for r, t in zip(given, got, strict=True):
        if r.cached is None:
            continue
        tokens, n = usable(r, r.cached.tokens), int((t.origins == Origin.REUSED).sum())
        least = mine.min_logprobs(r.request_id, r.cached, len(tokens))
        new, possible = given_logprobs(params, r.prompt_ids, tokens, sampling)
        sure = np.abs(new - least) > TOLERANCE
        keeps = possible & (new >= least)
        if not (keeps | ~sure)[:n].all() or (n < len(tokens) and (keeps & sure)[n]):
            found.append(f"request {r.request_id} kept {n}: {new}, at least {least}")
    return found


@both_ways
def test_prefixes_and_drafters_together(golden, rollout, requests, reusing, times):
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
            times=times,
        )
        assert not differences(want, got)
    assert reusing.stats.accepted_tokens > 0


def test_drafters_and_budgets_are_told_of_what_they_were_asked_for(
    golden, rollout, requests, reusing
):
    """Beside cached responses, in rounds of these alone, and where copies have other drafters."""
    want, progress = golden("cool"), Progress()
    given = with_cached(requests, lambda r: changed(want, r))
    seventh = lambda r: (r, int(r // 1000 % 7 == 0))  # noqa: E731
    copies = CopiesDrafter(Asked(NgramDrafter()), [Asked(NgramDrafter())], seventh, progress)
    budget, drafter = NotedBudget(), Asked(copies)
    drafts = {"drafter": drafter, "budget": budget, "times": NODES}
    got = rollout("cool", given, rule=rule("coupled"), **drafts)
    assert not differences(want, got)
    assert drafter.told == budget.told > 5
    cached = [r.cached_nodes for r in reusing.stats.timeline if r.num_nodes > r.num_slots]
    assert 0 in cached and max(cached) > 0


class NotedBudget(SeeingBudget):
    """Takes all draft tokens, and fails if it is told of cached ones."""

    told = 0

    def observe(self, live, drafts, acceptance):
        assert len(live) == len(drafts.count_A) == len(acceptance.accepted_AN)
        assert not (drafts.sources_AN == Source.CACHED).any()
        self.told += 1


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 1, "min_slots": 1},
        {"page_tokens": 3},
        {"max_round_nodes": 16},
        pytest.param({"slots": 4, "min_slots": 2, "max_nodes": 32}, marks=pytest.mark.soak),
        {"pages": 26, "min_slots": 2},
    ],
)
def test_few_slots_small_rounds_and_few_pages(golden, rollout, requests, change):
    engine = Engine(MODEL, dataclasses.replace(CONFIG, **change))
    want = golden("cool")
    given = with_cached(requests, lambda r: changed(want, r))
    got = rollout("cool", given, engine=engine, rule=rule("coupled"))
    assert not differences(want, got)


def test_whole_responses_take_few_rounds(golden, rollout, requests, reusing):
    want = golden("plain")
    given = with_cached(requests, lambda r: want[r.request_id].response_ids)
    rollout("plain", given, engine=reusing, rule=rule("full"))
    of_chunks = reusing.stats
    assert of_chunks.cached.kept_tokens == sum(r.cached_in_chunks for r in of_chunks.timeline)
    got = rollout("plain", given, engine=reusing, rule=rule("full"), times=NODES)
    assert not differences(want, got)
    assert all((t.origins == Origin.REUSED).all() for t in got)
    counts, nodes = reusing.stats.cached, sum(r.cached_nodes for r in reusing.stats.timeline)
    assert counts.whole == counts.responses == len(requests)
    # the first token of each round is given behind the root
    assert 0 < counts.kept_tokens - nodes < counts.kept_tokens / 2


def test_a_truncated_response_resumes_where_the_limit_has_grown(golden, rollout, requests, reusing):
    want = golden("plain")
    given = with_cached(requests, lambda r: want[r.request_id].beyond[:4])
    got = rollout("plain", given, engine=reusing, rule=rule("full"))
    assert not differences(want, got)
    longer = [t for t in got if t.num_tokens > 4]
    assert longer and {t.finish_reason for t in got} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all((t.origins[:4] == Origin.REUSED).all() for t in longer)
