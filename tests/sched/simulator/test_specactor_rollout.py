"""A rollout with a drafter beside the model: by hand, and what must not depend on the strategy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sched.policies.specactor import DevicePlan, sequential_tokens
from sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape
from sched.simulator.specactor_rollout import (
    DECOUPLED,
    DISAGGREGATED,
    OBSERVED_TOKENS,
    PLAIN,
    SEQUENTIAL,
    Hardware,
    RequestTrace,
    SpecActorRollout,
    Strategy,
)

# a verification takes 1 s, a drafted token 0.25 s, whatever the batch
DEVICE = Accelerator("x", 1e30, 1e30, 1e9, 1e30)
SHAPE = ModelShape("y", 0.0, 0.0, 1, 1.0, 0.0, 0)


def instance(seconds):
    return Instance(DEVICE, SHAPE, 1, Efficiency(1, 1, seconds, 0, 1))


HARDWARE = Hardware(4, instance(1.0), {"small": instance(0.25), "ngram": None})


def trace(lengths, p=0.8, others=0.5):
    lengths = np.array(lengths)
    acceptance = np.stack([np.full(len(lengths), p), np.full(len(lengths), others)], axis=1)
    return RequestTrace(lengths, acceptance, acceptance[:, 0], 5)


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
    hardware = Hardware(2, slow, {"small": instance(1.0)})
    found = DevicePlan(1, 1, 2, 0.0)
    mixed = dataclasses.replace(trace([100, 100], p=0.0), measured_R=np.zeros(2))
    took = SpecActorRollout(hardware, mixed, Strategy(DECOUPLED, found), step_s=0.1).seconds()
    # two requests share the verifier: T = 2 + V, V = 3 nodes · 2 requests · V / T
    assert took == pytest.approx(100 * 6, rel=0.05)


def test_units_hold_a_verifier_and_where_they_are_apart_its_drafter():
    found = DevicePlan(1, 1, 4, 0.0)
    for mode, units in ((PLAIN, 4), (SEQUENTIAL, 4), (DISAGGREGATED, 2), (DECOUPLED, 2)):
        assert SpecActorRollout(HARDWARE, trace([5] * 4), Strategy(mode, found)).num_units == units


def test_requests_below_the_average_get_plans_of_their_own():
    acceptance = np.array([[0.95, 0.0], [0.05, 0.0]])
    mixed = dataclasses.replace(
        trace([3000, 3000]), acceptance_RM=acceptance, measured_R=acceptance[:, 0]
    )
    found = DevicePlan(1, 1, 8, 0.0)
    fixed = SpecActorRollout(HARDWARE, mixed, Strategy(DECOUPLED, found), step_s=1.0).seconds()
    strategy = Strategy(DECOUPLED, found, reconfigure=True)
    # the second one is hardly ever right: after 1,000 tokens it is not drafted ahead for
    saved = SpecActorRollout(HARDWARE, mixed, strategy, step_s=1.0).seconds()
    assert fixed * OBSERVED_TOKENS / 3000 < saved < 0.7 * fixed
    # what is right counts as what was measured says: nothing changes where that is the same
    same = dataclasses.replace(mixed, measured_R=np.full(2, 0.5))
    assert SpecActorRollout(HARDWARE, same, strategy, step_s=1.0).seconds() == fixed


def test_freed_units_help_with_what_is_accepted_better():
    found = DevicePlan(1, 1, 2, 0.0)
    lengths = (10, 10, 10, 200)
    alone = seconds(Strategy(SEQUENTIAL, found), lengths, p=0.2, others=0.9)
    helped = seconds(Strategy(SEQUENTIAL, found, helpers=4), lengths, p=0.2, others=0.9)
    assert helped < 0.6 * alone
    useless = seconds(Strategy(SEQUENTIAL, found, helpers=4), lengths, p=0.9, others=0.0)
    assert useless == pytest.approx(seconds(Strategy(SEQUENTIAL, found), lengths, p=0.9), abs=0.2)


def test_requests_without_room_wait():
    small = dataclasses.replace(DEVICE, memory_bytes=110.0)
    hardware = Hardware(
        1, Instance(small, SHAPE, 1, Efficiency(1, 1, 1.0, 0, 1)), {"small": instance(0.25)}
    )
    strategy = Strategy(PLAIN, DevicePlan(0, 1, 0, 0.0))
    # two of 5 + 100 positions, and room for 110: first both, then the first, then the second
    phase = SpecActorRollout(hardware, trace([100, 100]), strategy, step_s=0.1)
    assert phase.seconds() == pytest.approx(150, rel=0.02)


def test_idle_units_are_counted():
    phase = SpecActorRollout(
        HARDWARE, trace([10, 10, 10, 40]), Strategy(PLAIN, DevicePlan(0, 1, 0, 0.0)), step_s=0.1
    )
    phase.seconds()
    assert phase.idle_fraction == pytest.approx(30 * 3 / 4 / 40, abs=0.01)
