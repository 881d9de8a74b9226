"""Probes: what the device's rule would have brought, of tokens drawn another way."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec.drafter import LiveSlots
from spec.retrieval.device_lookup import CONTEXT_TOKENS, NO_TOKEN, Texts, chains, find
from spec.retrieval.lookup_probe import LEAST_TOKENS, MOST_REQUESTS, probe
from spec.retrieval.lookup_texts import LookupTexts
from spec.tree import PADDING

PROMPT = [1, 2, 3]


def live(responses, ids=None):
    A, P = len(responses), len(PROMPT)
    tokens_BL = np.zeros((A, 64), np.int32)
    for row, response in zip(tokens_BL, responses, strict=True):
        row[: P + len(response)] = [*PROMPT, *response]
    total = np.array([P + len(r) for r in responses])
    ids = np.arange(A) if ids is None else np.asarray(ids)
    rows = np.arange(A)
    return LiveSlots(rows, ids, ids, rows, np.full(A, P), total, rows, tokens_BL)


def texts(*pieces):
    return LookupTexts(
        {0: [np.asarray(p, np.int32) for p in pieces]}, siblings=False, num_tokens=64
    )


def test_by_hand():
    """Text 4 5 6 7 8 9, response 4 5 6 7 | 0 | 9 9 9: rounds of four nodes."""
    start = probe(texts([4, 5, 6, 7, 8, 9]), live([[]]), 1)
    known, got = start.judge(live([[4, 5, 6, 7, 0, 9, 9, 9]]), 4)
    # 4 5 6 are right, 7 comes for nothing; 8 is wrong (0 comes); the text goes on with 9, and
    # ends (9 comes for nothing); the last 9 has nothing to go by
    assert known.request_ids_A.tolist() == [0]
    assert got.reached_AJ.tolist() == [[4, 2, 1]] and got.accepted_AJ.tolist() == [[2, 1, 1]]


def test_too_early_and_too_late():
    start = probe(texts([4, 5, 6]), live([[], []]), 2)
    assert start.judge(live([[4] * (LEAST_TOKENS - 1)] * 2), 4) is None
    known, _ = start.judge(live([[4] * LEAST_TOKENS] * 2, ids=[7, 1]), 4)
    assert known.request_ids_A.tolist() == [1]  # the other one has ended
    known, acceptance = start.judge(live([[4]], ids=[9]), 4)
    assert len(known) == 0 and acceptance.rounds == 0


def test_what_follows_the_known_tokens_is_left_open():
    start = probe(texts([4, 5, 6, 7, 8, 9, 10, 11, 12]), live([[]]), 1)
    _, got = start.judge(live([[4, 5, 6, 7, 8, 9, 10, 11]]), 16)
    assert got.accepted_AJ[0].tolist() == [1] * 8 + [0] * 7
    assert got.reached_AJ[0].tolist() == [1] * 8 + [0] * 7


def test_at_most_some_requests_are_probed_each_with_all_siblings():
    many = live([[7]] * 40)
    many = dataclasses.replace(many, group_ids_A=0 * many.group_ids_A)
    got = probe(LookupTexts(num_tokens=256), many, 40)
    assert 1 < len(got.request_ids_A) <= MOST_REQUESTS
    assert ((got.text_AL == 7).sum(axis=1) == 40).all()


@pytest.mark.parametrize("seed", range(30))
def test_as_the_device_would(seed):
    """The device's own steps over the same tokens count the same."""
    rng = np.random.default_rng(seed)
    L, N, tokens = 40, int(rng.choice([2, 4, 8])), 30
    text_L = rng.integers(-1, 3, L).astype(np.int32)
    response = rng.integers(0, 3, tokens).tolist()
    if seed % 2:  # long matches
        response[5:20] = np.maximum(text_L[10:25], 0).tolist()
    start = probe(texts([]), live([[]]), 1)
    first = int(rng.integers(1, L + 1))
    start = dataclasses.replace(start, text_AL=text_L[None], next_A=np.array([first]))
    _, got = start.judge(live([response]), N)
    reached_J, accepted_J, tried = np.zeros(N - 1, int), np.zeros(N - 1, int), 0
    said, at, following = [*PROMPT, *response], len(PROMPT), first
    while at < len(said):
        context = [NO_TOKEN] * CONTEXT_TOKENS + said[:at]
        place = find(
            Texts(
                jnp.asarray(text_L)[None],
                jnp.asarray(context[-CONTEXT_TOKENS:])[None],
                jnp.asarray([following]),
            )
        )
        drafts = np.asarray(chains(jnp.asarray(text_L)[None], place, N).tokens_BN)[0, 1:]
        hits = 0
        while hits < N - 1 and at + hits < len(said) and drafts[hits] == said[at + hits]:
            hits += 1
        reached_J[:hits] += 1
        accepted_J[:hits] += 1
        if at + hits == len(said):
            break
        reached_J[hits : hits + 1] += 1
        tried += int((drafts != PADDING).sum())
        at += hits + 1
        following = int(place[0]) + hits + 1 if int(place[0]) < L else L
    assert got.reached_AJ[0].tolist() == reached_J.tolist()
    assert got.accepted_AJ[0].tolist() == accepted_J.tolist()
    assert got.tried == tried
