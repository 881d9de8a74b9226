"""A drafter on the device is asked where its draft tokens pay for its seconds, by hand."""

import numpy as np
import pytest
from live_by_hand import live_slots

from reprise.spec.budget.config import LEARNED, MODEL
from reprise.spec.budget.goodput import DeviceDraftGate
from reprise.spec.drafter import Source, no_drafts
from reprise.spec.round_times import RoundTimes

# a round of 4 nodes takes 2 seconds; the drafter takes 1 more
TIMES = RoundTimes({(4, 4, 64): 2.0}, {LEARNED: {(4, 3, 64): 1.0}})
ONE = np.ones(2)


def drafts(learned_prob, other_prob):
    """A draft token by the learned drafter and one by another for each of two requests."""
    found = no_drafts(2, 3)
    found.count_A[:] = 2
    found.tokens_AN[:, :2] = [5, 6]
    found.prob_AN[:, :2] = [learned_prob, other_prob]
    found.sources_AN[:, :2] = [Source.LEARNED, Source.GROUP]
    return found


def sleeps_after(gate, found, times=TIMES, scale=ONE):
    gate.observe(times, live_slots(2), found, found.count_A, scale, (4, 4, 64))
    return bool(gate.skips())


@pytest.mark.parametrize(
    ("learned", "other", "sleeps"),
    [
        # with it (2 + 2·(0.9 + 0)) / 3 = 1.27 tokens a second, without 2 / 2
        (0.9, 0.0, False),
        # with it (2 + 2·0.4) / 3 = 0.93 against 1
        (0.4, 0.0, True),
        # without it (2 + 2·0.8) / 2 = 1.8; with it (2 + 2·(0.9 + 0.8)) / 3 is the same
        (0.91, 0.8, False),
        (0.89, 0.8, True),
    ],
)
def test_a_drafter_that_does_not_pay_is_left_out(learned, other, sleeps):
    assert sleeps_after(DeviceDraftGate(), drafts(learned, other)) is sleeps


def test_past_acceptance_of_drafts_counts():
    assert sleeps_after(DeviceDraftGate(), drafts(0.9, 0.0), scale=0.4 * ONE)


def test_waits_get_longer_and_end():
    gate, bad = DeviceDraftGate(), drafts(0.1, 0.0)
    slept = []
    for _ in range(5):
        gate.observe(TIMES, live_slots(2), bad, bad.count_A, ONE, (4, 4, 64))
        rounds = 0
        while gate.skips():
            rounds += 1
        slept.append(rounds + 1)
    assert slept == [8, 16, 32, 64, 64]
    assert not sleeps_after(gate, drafts(0.9, 0.0))
    assert sleeps_after(gate, drafts(0.1, 0.0)) and gate._left[LEARNED] < 8


def test_drafters_without_drafts_or_seconds_are_not_compared():
    other = drafts(0.1, 0.5)
    other.sources_AN[:] = Source.OWN
    assert not sleeps_after(DeviceDraftGate(), other)
    assert not sleeps_after(DeviceDraftGate(), drafts(0.1, 0.0), RoundTimes({(4, 4, 64): 2.0}))


@pytest.mark.parametrize(
    ("learned", "model", "sleeping"),
    [
        # all: (2 + 2·1.2) / 4 = 1.1 tokens a second; without one (2 + 2·0.6) / 3 = 1.07
        (0.6, 0.6, set()),
        # all: (2 + 2·1.3) / 4 = 1.15; without the model (2 + 2·0.9) / 3 = 1.27, so without it
        (0.9, 0.4, {"model"}),
        (0.4, 0.9, {"learned"}),
        # all: (2 + 2·0.6) / 4 = 0.8; without one 2.6 / 3 = 0.87: each looks at itself alone
        (0.3, 0.3, {"learned", "model"}),
    ],
)
def test_each_of_two_is_compared_with_a_round_without_it(learned, model, sleeping):
    times = RoundTimes({(4, 4, 64): 2.0}, {n: {(4, 3, 64): 1.0} for n in (LEARNED, MODEL)})
    found, gate = drafts(learned, model), DeviceDraftGate()
    found.sources_AN[:, 1] = Source.MODEL
    gate.observe(times, live_slots(2), found, found.count_A, ONE, (4, 4, 64))
    assert gate.skips() == sleeping
