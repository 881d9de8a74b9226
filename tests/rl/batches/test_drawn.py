"""Which distribution the log-probs of a datum are of, found by its tokens and log-probs."""

from __future__ import annotations

import numpy as np
import pytest
from shapes import CHAT

from reprise.rl.batches.data import Datum, pack
from reprise.rl.batches.drawn import ENTRY_BYTES, DrawnResponses
from reprise.rl.records.packing import Shape
from reprise.spec.config import SamplingConfig

PLAIN, HALF = SamplingConfig(), SamplingConfig(temperature=0.5)
CUT, GREEDY = SamplingConfig(top_k=3), SamplingConfig(temperature=0, top_k=3)


def logprobs(count, seed=0):
    return -np.random.default_rng(seed).random(count).astype(np.float32)


def datum(prompt, *parts):
    """Tokens, targets and log-probs of a prompt and parts: tokens with log-probs, or without."""
    ids, values = list(prompt), [0.0] * (len(prompt) - 1)
    for tokens, drawn in parts:
        ids += tokens
        values += [0.0] * len(tokens) if drawn is None else [float(x) for x in drawn]
    return ids[:-1], ids[1:], values


@pytest.fixture
def drawn():
    result = DrawnResponses()
    result.note([1, 2, 3], [4, 5, 6], logprobs(3), HALF)
    result.note([1, 2, 3], [4, 5, 7], logprobs(3, 1), PLAIN)
    return result


def test_a_response_is_found_by_tokens_and_log_probs(drawn):
    assert drawn.find(*datum([1, 2, 3], ([4, 5, 6], logprobs(3)))) == [(slice(2, 5), HALF)]
    assert drawn.find(*datum([1, 2, 3], ([4, 5, 7], logprobs(3, 1)))) == [(slice(2, 5), PLAIN)]
    for other in (
        datum([1, 2, 3], ([4, 5, 6], logprobs(3, 2))),  # scored by another policy, or drawn again
        datum([1, 2, 2], ([4, 5, 6], logprobs(3))),
        datum([3], ([4, 5, 6], logprobs(3))),
    ):
        assert drawn.find(*other) == []


def test_it_may_be_cut_and_turns_may_follow(drawn):
    assert drawn.find(*datum([1, 2, 3], ([4, 5], logprobs(3)[:2]))) == [(slice(2, 4), HALF)]
    first = ([4, 5, 6], logprobs(3))
    drawn.note([1, 2, 3, 4, 5, 6, 9, 9], [8, 4], logprobs(2, 5), CUT)
    turns = datum([1, 2, 3], first, ([9, 9], None), ([8, 4], logprobs(2, 5)))
    assert drawn.find(*turns) == [(slice(2, 5), HALF), (slice(7, 9), CUT)]
    replaced = datum([1, 2, 3], ([4, 5], logprobs(3)[:2]), ([9, 9], None))
    assert drawn.find(*replaced) == [(slice(2, 4), HALF)]


def test_nothing_is_looked_up_while_all_are_of_the_policys_own_distribution(monkeypatch):
    drawn = DrawnResponses()
    for sampling in (PLAIN, GREEDY):
        drawn.note([1, 2], [3], logprobs(1), sampling)
    monkeypatch.setattr("reprise.rl.batches.drawn.hashlib", None)
    assert drawn.find(*datum([1, 2], ([3], logprobs(1)))) == []
    drawn.note_scored([Datum([1, 2], [2, 3], logprobs=[0, 0])], [logprobs(2)])


def test_log_probs_of_0_of_both_are_of_the_policys_own(drawn):
    """A certain token has log-prob 0 at any temperature."""
    zeros = np.zeros(2, np.float32)
    for sampling in (HALF, PLAIN, HALF):
        drawn.note([7], [8, 9], zeros, sampling)
    assert drawn.find(*datum([7], ([8, 9], zeros))) == [(slice(0, 2), PLAIN)]


def test_log_probs_that_a_pass_finds_are_of_the_same_distribution(drawn):
    tokens, targets, values = datum([1, 2, 3], ([4, 5, 6], logprobs(3)))
    again = [0.0, 0.0, *logprobs(3, 8)]
    data = [
        Datum(tokens, targets, logprobs=values),
        Datum(tokens, targets),
        Datum(tokens, targets, logprobs=values, sampling=PLAIN),
    ]
    drawn.note_scored(data, [np.float32(again), *logprobs(10, 9).reshape(2, 5)])
    assert drawn.find(tokens, targets, again) == [(slice(2, 5), HALF)]
    assert drawn.find(tokens, targets, logprobs(10, 9)[:5]) == []


def test_the_oldest_make_room_by_bytes():
    drawn = DrawnResponses(max_bytes=3 * (ENTRY_BYTES + 8 * 4))
    for i in range(10):
        drawn.note([1, i], [5, 6, 7, 8], logprobs(4, i), HALF if i < 8 else PLAIN)
    assert drawn.num_bytes <= 3 * (ENTRY_BYTES + 8 * 4)
    found = [drawn.find(*datum([1, i], ([5, 6, 7, 8], logprobs(4, i)))) for i in range(10)]
    assert [len(x) for x in found] == [0] * 7 + [1] * 3
    for i in range(10, 12):
        drawn.note([1, i], [5, 6, 7, 8], logprobs(4, i), PLAIN)
    assert drawn.find(*datum([1, 9], ([5, 6, 7, 8], logprobs(4, 9)))) == []  # none is processed
    drawn.note([1], list(range(999)), logprobs(999), HALF)  # more than fits
    assert drawn.num_bytes == 0 and not drawn._responses and not drawn._lengths


def test_packed_places_have_the_distribution_of_their_log_probs(drawn):
    tokens, targets, values = datum([1, 2, 3], ([4, 5, 6], logprobs(3)), ([9], None))
    by_hand = Datum(tokens, targets, logprobs=values)
    told = Datum(tokens, targets, logprobs=values, sampling=CUT)
    [packed] = pack([by_hand, told, Datum(tokens, targets)], CHAT, Shape(1, 32, 4), drawn)
    processing, batch = packed.batch.processing_BT, packed.batch
    index = batch.index_EM[packed.places[packed.sample_indices.argsort()], :6]
    temperature, top_k = (x.reshape(-1)[index] for x in (processing.temperature, processing.top_k))
    np.testing.assert_allclose(temperature, [[1, 1, 0.5, 0.5, 0.5, 1], [1] * 6, [1] * 6])
    assert top_k.tolist() == [[0] * 6, [3] * 6, [0] * 6]
