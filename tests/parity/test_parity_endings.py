"""Requests that differ in temperature, limits and stops: the same tokens, however they are made."""

import dataclasses

import numpy as np
import pytest
from parity_chunks import CONFIG, in_chunks
from parity_drafters import RandomTrees
from parity_model import MODEL, SAMPLINGS, STOP, differences
from test_parity_reuse import changed, rule, with_cached
from test_parity_speculation import TIMES, make

from reprise.models.text.token_bytes import TokenBytes
from reprise.rl.engine.engine import Engine
from reprise.rl.records.trajectory import FinishReason
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.budget.goodput import make_budget

pytestmark = pytest.mark.parity

# halves of characters, several letters, none
TEXTS = [
    (b"a", b"b", b"ab", "é".encode()[:1], "é".encode()[1:], b"", b"c")[i % 7] for i in range(40)
]
WORDS = TokenBytes(  # the last tokens have no text
    np.frombuffer(b"".join(TEXTS), np.uint8), np.cumsum([0, *map(len, TEXTS)], dtype=np.int64)
)
NAMES = ("plain", "cool", "top_k", "greedy")
STOPS = {"plain": ("aba", "é"), "cool": ("bb", "cab"), "top_k": (), "greedy": ("a", "abc")}
IDS = {"plain": (), "cool": (17,), "top_k": (20, 21, 22, 23), "greedy": ()}


def name_of(request):
    return NAMES[request.request_id // 1000 % len(NAMES)]


def sampling_of(name):
    limit = 13 if name == "cool" else 24
    return dataclasses.replace(
        SAMPLINGS[name], stop=STOPS[name], stop_ids=IDS[name], max_new_tokens=limit
    )


def ends(name, tokens):
    text = b"".join(TEXTS[i] if i < len(TEXTS) else b"" for i in tokens).decode(errors="replace")
    return tokens[-1] in (*STOP, *IDS[name]) or any(stop in text for stop in STOPS[name])


@pytest.fixture(scope="module")
def mixed(requests):
    return [dataclasses.replace(r, sampling=sampling_of(name_of(r))) for r in requests]


@pytest.fixture(scope="module")
def want(golden, mixed):
    """Each request's text is read anew from its beginning for every token."""
    found = {}
    for r in mixed:
        one = golden(name_of(r))[r.request_id]
        limit = r.max_new_tokens or r.sampling.max_new_tokens
        n = next((n for n in range(1, limit + 1) if ends(name_of(r), one.beyond[:n])), None)
        reason = FinishReason.LENGTH if n is None else FinishReason.STOP
        n = n or limit
        # beyond an end token golden has no log-probabilities; nothing goes on there
        found[r.request_id] = dataclasses.replace(
            one,
            response_ids=one.response_ids[:n],
            logprobs=one.logprobs[:n],
            finish_reason=reason,
        )
    by_text = [
        r
        for r in mixed
        if found[r.request_id].finish_reason is FinishReason.STOP
        and found[r.request_id].response_ids[-1] not in (*STOP, *IDS[name_of(r)])
    ]
    assert len(by_text) >= 8 and len({name_of(r) for r in by_text}) == 3
    return found


def test_plain_and_with_drafts(rollout, mixed, want, engine):
    assert not differences(want, rollout("plain", mixed, words=WORDS))
    for budget in ("fixed:7", "goodput"):
        drafts = {"drafter": make("all", want, mixed), "budget": make_budget(budget, TIMES)}
        assert not differences(want, rollout("plain", mixed, words=WORDS, **drafts))
        assert engine.stats.accepted_tokens > 0
    assert sum(len(w.response_ids) for w in want.values()) == engine.stats.tokens


@pytest.mark.parametrize("mode", ["coupled", "full"])
def test_from_cached_responses(rollout, mixed, want, mode, engine):
    """Cached responses that go on behind a stop, or end where there is none any more."""
    wrong = changed if mode == "coupled" else lambda golden, r: golden[r.request_id].beyond[:20]
    given = with_cached(mixed, lambda r: wrong(want, r))
    got = rollout("plain", given, rule=rule(mode), words=WORDS)
    kept = engine.stats.cached
    assert kept.kept_tokens > 0 and kept.whole > 0
    tokens = {t.request_id: tuple(t.response_ids.tolist()) for t in got}
    assert tokens == {i: w.response_ids for i, w in want.items()}
    assert all(t.finish_reason is want[t.request_id].finish_reason for t in got)
    if mode == "coupled":
        assert not differences(want, got)


def test_in_chunks(params, mixed, want):
    engine = Engine(MODEL, CONFIG)
    for options in ({}, {"drafter": RandomTrees(want), "budget": FixedBudget()}):
        got, _ = in_chunks(engine, params, "plain", mixed, 0, words=WORDS, **options)
        assert not differences(want, got)


def test_a_planted_fault_text_that_begins_anew_with_every_fetch_would_be_found(
    rollout, mixed, want, monkeypatch
):
    from reprise.rl.slots.ending import Endings

    cut = Endings.cut

    def forgets(self, tokens_BN, count_B, rule_B, state_B, stopped_B):
        state_B[:] = 0
        cut(self, tokens_BN, count_B, rule_B, state_B, stopped_B)

    monkeypatch.setattr(Endings, "cut", forgets)
    assert differences(want, rollout("plain", mixed, words=WORDS))
