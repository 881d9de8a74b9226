"""Which workers train the drafter, and when: by hand, and under random events by other books."""

from __future__ import annotations

import numpy as np
import pytest

from reprise.sched.policies.spot_training import SpotCoordinator


def begun(workers=3, min_idle_workers=1, data=True):
    """A rollout runs, all have work, and there is data."""
    coordinator = SpotCoordinator(min_idle_workers)
    coordinator.data_ready(data)
    for worker in range(workers):
        coordinator.joined(worker)
    coordinator.rollout_began()
    return coordinator


def idle(coordinator, *workers):
    """Report workers as idle; return the session's members, the leader first."""
    for worker in workers:
        coordinator.idle(worker)
    return list(coordinator.members)


def test_the_first_idle_worker_leads_and_later_ones_follow():
    c = begun()
    assert idle(c, 1) == [1] and idle(c, 0, 2) == [1, 0, 2]
    assert [c.leads(w) for w in range(3)] == [False, True, False]
    assert all(c.is_idle(w) for w in range(3))


def test_none_trains_below_the_threshold():
    c = begun(4, min_idle_workers=3)
    assert idle(c, 2, 0) == [] and c.is_idle(2) and c.leads(2) is None
    c.work_arrived(0)
    assert not c.is_idle(0)
    assert idle(c, 1) == [] and idle(c, 3) == [2, 1, 3]
    c.work_arrived(1), c.work_arrived(3)
    # below it again: the session continues, and takes members
    assert c.members == [2] and idle(c, 0) == [2, 0]


def test_a_session_whose_leader_leaves_is_taken_over_or_ends():
    c = begun()
    idle(c, 1, 2, 0)
    c.work_arrived(1)
    assert c.leads(2) is True
    c.lost(2)
    assert c.leads(0) is True and idle(c, 1) == [0, 1]
    c.lost(1)
    c.work_arrived(0)
    assert c.members == [] and idle(c, 0) == [0]


@pytest.mark.parametrize(
    "event",
    [
        lambda c: (c.data_ready(False), c.idle(0), c.idle(0)),  # it is idle already
        lambda c: c.idle(1),  # it trains: it has to stop first
        lambda c: c.idle(9),
        lambda c: c.lost(9),
        lambda c: c.work_arrived(9),
        lambda c: c.joined(2),
        lambda c: c.joined(1),
    ],
)
def test_impossible_events_are_refused(event):
    c = begun(4, min_idle_workers=3)
    idle(c, 1, 2, 3)
    c.work_arrived(2), c.work_arrived(3)
    assert [c.is_idle(w) for w in range(4)] == [False, True, False, False]
    with pytest.raises((AssertionError, KeyError)):
        event(c)


def test_a_threshold_is_at_least_one():
    with pytest.raises(ValueError, match="min_idle_workers >= 1, got 0"):
        SpotCoordinator(0)


# -- random events -----------------------------------------------------------------------

EVENTS = ["joined", "lost", "idle", "idle", "idle", "work", "work", "rollout", "data"]


def play(seed, events=300):
    """Play random events; return the largest session. Each state follows from the events alone."""
    rng = np.random.default_rng(seed)
    min_idle = int(rng.integers(1, 5))
    # worker → whether it has no work; the session
    c, states, trains = SpotCoordinator(min_idle), {}, []
    runs = data = False
    largest = 0
    first = [("joined", w) for w in range(4)] + [("rollout", 0), ("data", 0)]
    for event, worker in first + [(e, int(rng.integers(6))) for e in rng.choice(EVENTS, events)]:
        if event in ("rollout", "data") and runs and data and rng.random() > 0.2:
            continue  # these change now and then only
        may_begin = event == "data"  # a rollout that starts brings work first
        if event == "joined" and worker not in states:
            c.joined(worker)
            states[worker] = False
        elif event == "lost" and worker in states:
            c.lost(worker)
            del states[worker]
        elif event == "idle" and states.get(worker) is False:
            c.idle(worker)
            states[worker] = may_begin = True
        elif event == "work" and worker in states:
            c.work_arrived(worker)
            states[worker] = False
        elif event == "rollout":
            runs = not runs
            c.rollout_began() if runs else c.rollout_ended()
        elif event == "data":
            data = not data
            c.data_ready(data)
        if trains and not (runs and data):
            states |= dict.fromkeys(trains, False)  # until they report that they have stopped
        trains = [w for w in trains if states.get(w)] if runs and data else []
        waiting = [w for w, is_idle in states.items() if is_idle and w not in trains]
        if runs and data and may_begin and (trains or len(waiting) >= min_idle):
            trains += waiting
        assert sorted(c.members) == sorted(trains), (event, worker)
        assert {w: c.is_idle(w) for w in states} == states
        leads = [w for w in states if c.leads(w)]
        assert len(leads) == bool(trains) and {w for w in states if c.leads(w) is not None} == set(
            trains
        )
        largest = max(largest, len(trains))
    return largest


def test_random_events():
    assert max(map(play, range(60))) >= 5, "sessions of many are to be met"
