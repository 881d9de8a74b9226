"""The baseline deals groups to instances, and requests to the ranks of each."""

from __future__ import annotations

import pytest

from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.protocol import Submitted, WorkerJoined, WorkerLost
from reprise.sched.request import RequestSpec


def begun(workers, **more):
    scheduler = GroupFifo(seed=0, **more)
    for number in range(workers):
        scheduler.handle(WorkerJoined(number, 1000, 10), 0.0)
    return scheduler


def workers_of(actions):
    """Group → the workers of its requests; four a group."""
    found = {}
    for action in actions:
        found.setdefault(action.request_id // 4, []).append(action.worker_id)
    return found


ASKS = tuple(RequestSpec(number, number // 4, 5, 10) for number in range(16))


def test_a_group_stays_together():
    found = workers_of(begun(2).handle(Submitted(ASKS), 0.0))
    assert sorted(found) == [0, 1, 2, 3]
    assert all(len(set(workers)) == 1 for workers in found.values())
    assert sorted(workers[0] for workers in found.values()) == [0, 0, 1, 1]


def test_on_ranks_a_group_stays_within_its_instance():
    found = workers_of(begun(4, ranks_per_instance=2).handle(Submitted(ASKS), 0.0))
    assert sorted(map(tuple, found.values())) == [(0, 1, 0, 1)] * 2 + [(2, 3, 2, 3)] * 2


def test_the_rank_that_is_left_takes_the_requests_of_its_instance():
    scheduler = begun(2, ranks_per_instance=2)
    scheduler.handle(Submitted(ASKS[:4]), 0.0)
    assert {a.worker_id for a in scheduler.handle(WorkerLost(0), 0.0)} == {1}


def test_an_instance_has_a_rank():
    with pytest.raises(ValueError, match="ranks_per_instance >= 1, got 0"):
        GroupFifo(seed=0, ranks_per_instance=0)
