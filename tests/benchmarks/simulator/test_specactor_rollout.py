"""A rollout with a drafter beside the model: by hand, and what must not depend on the strategy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.simulator import specactor_rollout
from benchmarks.simulator.specactor_devices import DevicePlan, Hardware, RequestTrace
from benchmarks.simulator.specactor_rollout import (
    DECOUPLED,
    DISAGGREGATED,
    PLAIN,
    SEQUENTIAL,
    Helpers,
    SpecActorRollout,
    Strategy,
)
from reprise.sched.policies.specactor import Profile, sequential_tokens
from reprise.sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape

# a verification takes 1 s, a drafted token 0.25 s, whatever the batch
DEVICE = Accelerator("x", 1e30, 1e30, 1e9, 1e30)
SHAPE = ModelShape("y", 0.0, 0.0, 1, 1.0, 0.0, 0)


def instance(seconds):
    return Instance(DEVICE, SHAPE, 1, Efficiency(1, 1, seconds, 0, 1))


HARDWARE = Hardware(4, instance(1.0), {"small": instance(0.25), "ngram": None})


def trace(lengths, p=0.8, others=0.5):
    lengths = np.array(lengths)
    acceptance = np.stack([np.full(len(lengths), p), np.full(len(lengths), others)], axis=1)
    return RequestTrace(lengths, acceptance, acceptance.mean(axis=0), 5, 3000)


def seconds(strategy, lengths=(100, 100, 100, 100), **more):
    return SpecActorRollout(HARDWARE, trace(lengths, **more), strategy, step_s=0.1).seconds()


def test_every_mode_takes_the_seconds_of_its_rounds():
    found = DevicePlan(1, 1, 4, 0.0)
    assert seconds(Strategy(PLAIN, found)) == pytest.approx(100, abs=0.2)
    sequential = 100 / sequential_tokens(0.8, 4) * (4 * 0.25 + 1)
    assert seconds(Strategy(SEQUENTIAL, found)) == pytest.approx(sequential, abs=0.2)
    # half of the devices draft: the same rounds, as batches cost nothing here
    assert seconds(Strategy(DISAGGREGATED, found)) == pytest.approx(sequential, abs=0.2)
    # of windows drafted ahead, the drafting is hidden: those after a whole one and its next token
    ahead = 0.8**5 / (1 - 0.8**4 + 0.8**5)
    tokens = (1 - ahead) * sequential_tokens(0.8, 4) + ahead * sequential_tokens(0.8, 3)
    decoupled = 100 / tokens * ((1 - ahead) * 2 + ahead * 1)
    assert seconds(Strategy(DECOUPLED, found)) == pytest.approx(decoupled, abs=0.2)
    assert decoupled < sequential


def test_a_rejected_request_is_in_no_verification_while_it_drafts_again():
    """Verifying takes as long as the nodes it has; nobody is right, so half wait for drafts."""
    shape = ModelShape("y", 0.5, 0.0, 1, 1.0, 0.0, 0)
    device = dataclasses.replace(DEVICE, operations_per_s=1.0)
    slow = Instance(device, shape, 1, Efficiency(1, 1, 0.0, 0, 1))  # a second a node
    hardware = Hardware(2, slow, {"small": instance(1.0), "ngram": None})
    found = DevicePlan(1, 1, 2, 0.0)
    wrong = trace([100, 100], p=0.0)
    took = SpecActorRollout(hardware, wrong, Strategy(DECOUPLED, found), step_s=0.1).seconds()
    # two requests share the verifier: T = 2 + V, V = 3 nodes · 2 requests · V / T
    assert took == pytest.approx(100 * 6, rel=0.05)


MIXED = dataclasses.replace(
    trace([1500, 1500]),
    acceptance_RM=np.array([[0.95, 0.0], [0.05, 0.0]]),
    profiled_M=np.array([0.5, 0.0]),
)
FOUND = DevicePlan(1, 1, 8, 0.0)


def played(asked, reconfigure_tokens, **more):
    strategy = Strategy(DECOUPLED, FOUND, reconfigure_tokens)
    return SpecActorRollout(HARDWARE, asked, strategy, step_s=1.0, **more).seconds()


def test_requests_below_the_average_get_plans_of_their_own():
    fixed = played(MIXED, 0)
    # the second one is hardly ever right: after 500 tokens it is not drafted ahead for
    later = played(MIXED, 500)
    assert fixed * 500 / 1500 < later < 0.7 * fixed
    # and after 100 tokens already, where that is asked for
    assert played(MIXED, 100) < 0.85 * later
    assert played(MIXED, 2000) == fixed, "nothing is due"


def test_plans_go_by_what_was_observed_and_not_by_acceptance(monkeypatch):
    fixed, informed = played(MIXED, 0), played(MIXED, 100)
    draws = specactor_rollout.np.random.default_rng

    class Misleading:
        """Rounds that look as if every second draft token were right."""

        def __init__(self, seed):
            draws(seed)

        def binomial(self, seen, p):
            return seen // 2

    monkeypatch.setattr(specactor_rollout.np.random, "default_rng", Misleading)
    # both are about the average: a rollout that knew their acceptance would be as fast as before
    misled = played(MIXED, 100)
    assert misled > 1.2 * informed and misled == pytest.approx(fixed, rel=0.1)


def test_the_profile_is_told_all_that_windows_show(monkeypatch):
    """Of w = 2, p = 0.5: 2, 1 and 1 tokens are seen of 3, 2 and 1, with 1/4, 1/4 and 1/2."""
    seen = []
    monkeypatch.setattr(Profile, "observe", lambda self, r, m, a, n: seen.append((r, m, a, n)))
    found = DevicePlan(1, 1, 2, 0.0)
    for mode, share in ((SEQUENTIAL, 1.5 / 1.75), (DECOUPLED, 1.0), (PLAIN, 0.0)):
        seen.clear()
        asked = trace([501] * 4, p=0.5)
        SpecActorRollout(HARDWARE, asked, Strategy(mode, found, 500), step_s=0.1).seconds()
        assert [(r, m) for r, m, _, _ in seen] == [(r, "small") for r in range(4)]
        assert [n for *_, n in seen] == pytest.approx([500 * share] * 4, abs=1.5)


LAST = (10, 10, 10, 200)  # three units are free from then on


def helped_seconds(hardware=HARDWARE, *, lengths=LAST, p=0.2, others=0.9, helpers=4, **more):
    strategy = Strategy(SEQUENTIAL, DevicePlan(1, 1, 2, 0.0), helpers=helpers)
    asked = dataclasses.replace(trace(lengths, p=p, others=others), **more)
    return SpecActorRollout(hardware, asked, strategy, step_s=0.1).seconds()


def test_freed_units_help_with_what_is_accepted_better():
    alone = helped_seconds(helpers=0)
    assert helped_seconds() < 0.6 * alone
    useless = helped_seconds(p=0.9, others=0.0)
    assert useless == pytest.approx(helped_seconds(p=0.9, helpers=0), abs=0.2)


def costly(*, weight_bytes=0.0, host=math.inf, memory_bytes=1e9):
    """Verifications of a second; a byte of the drafter's weights takes one to load, too."""
    device = dataclasses.replace(DEVICE, host_bytes_per_s=host, memory_bytes=memory_bytes)
    verifier = Instance(device, SHAPE, 1, Efficiency(1, 1, 1.0, 0, 1))
    small = dataclasses.replace(SHAPE, weight_bytes=weight_bytes)
    slow = dataclasses.replace(DEVICE, host_bytes_per_s=1.0)
    drafter = Instance(slow, small, 1, Efficiency(1, 1, 0.0, 0, 1))
    return Hardware(4, verifier, {"ngram": None, "small": drafter})


def test_a_drafter_is_loaded_first():
    free, loaded = (helped_seconds(costly(weight_bytes=b)) for b in (0.0, 20.0))
    # for 20 s the request makes 1.24 tokens a second instead of a helper's
    helped = sequential_tokens(0.9, 8)
    assert loaded - free == pytest.approx(20 * (1 - 1.24 / helped), abs=0.2)
    # and each unit's devices have it from then on: a second request finds it there
    hardware = costly(weight_bytes=20.0)
    two = {"lengths": (1, 1, 1, 1, 1, 1, 200, 200)}
    again = helped_seconds(hardware, **two)
    assert again == pytest.approx(helped_seconds(hardware, **two, helpers=1), abs=0.3)


def test_keys_and_values_are_copied_or_computed_first():
    hardware = costly(host=10.0)
    assert hardware.kv_seconds("ngram", 100) == pytest.approx(1.0), "computing them takes 1 s"
    assert hardware.kv_seconds("ngram", 5) == pytest.approx(0.5), "copying them takes less"
    slow_network = dataclasses.replace(hardware, network_bytes_per_s=5.0)
    assert slow_network.kv_seconds("ngram", 4) == pytest.approx(0.8)
    # the drafter computes its own, in a quarter of a second
    drafted = dataclasses.replace(hardware, drafters={"ngram": None, "small": instance(0.25)})
    assert drafted.kv_seconds("small", 5) == pytest.approx(0.75)


def test_nobody_is_helped_who_would_lose_by_it(monkeypatch):
    helped = []
    monkeypatch.setattr(Helpers, "_add", lambda self, key, unit, running: helped.append(key))

    def is_helped(**settings):
        helped.clear()
        limit = settings.pop("limit_tokens", 3000)
        helped_seconds(costly(**settings), limit_tokens=limit)
        return bool(helped)

    # 2,990 tokens may remain: 2,411 s, and 488 s with help
    assert is_helped(weight_bytes=20.0) and is_helped(weight_bytes=1900.0)
    assert not is_helped(weight_bytes=2000.0)
    # at most 190 remain: 153 s, and 31 s
    assert is_helped(weight_bytes=110.0, limit_tokens=200)
    assert not is_helped(weight_bytes=130.0, limit_tokens=200)
    # keys and values count as well
    monkeypatch.setattr(Hardware, "kv_seconds", lambda self, method, positions: 2000.0)
    assert not is_helped()


def test_helpers_have_room_for_requests_that_go_to_the_limit():
    alone = helped_seconds(costly(), helpers=0)
    # 5 + 200 positions, of the verifier and of the drafter
    for memory_bytes, helps in ((411.0, True), (409.0, False)):
        took = helped_seconds(costly(memory_bytes=memory_bytes), limit_tokens=200)
        assert (took < 0.9 * alone) == helps, memory_bytes
    weights = Instance(DEVICE, dataclasses.replace(SHAPE, weight_bytes=10.0), 1)
    small = dataclasses.replace(HARDWARE, drafters={"ngram": None, "small": weights})
    # a drafter's weights, and its keys and values, take of the room
    assert small.helper_tokens("ngram") == small.verifier.kv_tokens
    assert small.helper_tokens("small") == (small.verifier.kv_tokens - 10) // 2


def test_requests_without_room_wait():
    small = dataclasses.replace(DEVICE, memory_bytes=110.0)
    verifier = Instance(small, SHAPE, 1, Efficiency(1, 1, 1.0, 0, 1))
    hardware = Hardware(1, verifier, HARDWARE.drafters)
    strategy = Strategy(PLAIN, DevicePlan(0, 1, 0, 0.0))
    # two of 5 + 100 positions, and room for 110: first both, then the first, then the second
    phase = SpecActorRollout(hardware, trace([100, 100]), strategy, step_s=0.1)
    assert phase.seconds() == pytest.approx(150, rel=0.02)
