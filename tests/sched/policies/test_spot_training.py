"""Who trains the drafter, and when: by hand, and under random events by books of its own."""

import dataclasses

import numpy as np
import pytest

from sched.policies.spot_training import Halt, Join, Lead, Promote, SpotCoordinator, WorkerState

BUSY, IDLE, TRAINING = WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING


def begun(workers=3, min_idle_workers=1, data=True):
    """A rollout runs, all have work, and there is data."""
    coordinator = SpotCoordinator(min_idle_workers)
    assert coordinator.data_ready(data) == []
    for worker in range(workers):
        assert coordinator.joined(worker) == []
    assert coordinator.rollout_began() == []
    return coordinator


def test_the_first_idle_worker_leads_and_later_ones_join():
    c = begun()
    assert c.idle(1) == [Lead(1)]
    assert c.idle(0) == [Join(0, 1)] and c.idle(2) == [Join(2, 1)]
    assert [c.state(w) for w in range(3)] == [TRAINING] * 3
    assert c.leader() == 1 and c.members() == (1, 0, 2)


def test_nobody_trains_below_the_threshold():
    c = begun(4, min_idle_workers=3)
    assert c.idle(2) == c.idle(0) == [] and c.state(2) is IDLE
    assert c.work_arrived(0) == [] and c.state(0) is BUSY
    assert c.idle(1) == []
    assert c.idle(3) == [Lead(2), Join(1, 2), Join(3, 2)]
    # below it again: the session goes on, and takes members
    assert c.work_arrived(1) == [Halt(1)] and c.work_arrived(3) == [Halt(3)]
    assert c.state(2) is TRAINING and c.idle(0) == [Join(0, 2)]


def test_work_halts_a_member_at_once():
    c = begun()
    c.idle(0), c.idle(1)
    assert c.work_arrived(1) == [Halt(1)]
    assert c.state(1) is BUSY and c.members() == (0,)
    assert c.work_arrived(1) == [], "more work is no transition"
    assert c.idle(1) == [Join(1, 0)]


def test_a_session_whose_leader_leaves_is_taken_over_or_ends():
    c = begun()
    for worker in (1, 2, 0):
        c.idle(worker)
    assert c.work_arrived(1) == [Halt(1), Promote(2)]
    assert c.lost(2) == [Promote(0)], "the dead are told nothing"
    assert c.idle(1) == [Join(1, 0)]
    assert c.lost(1) == []
    assert c.work_arrived(0) == [Halt(0)] and c.leader() is None
    assert c.idle(0) == [Lead(0)]


def test_all_halts_when_the_rollout_ends():
    c = begun()
    for worker in (1, 2):
        c.idle(worker)
    assert c.rollout_ended() == [Halt(2), Halt(1)]
    assert c.leader() is None and c.state(1) is BUSY, "it winds down"
    assert c.idle(1) == c.idle(2) == c.idle(0) == []
    assert c.data_ready(True) == []
    for worker in (0, 1):
        assert c.work_arrived(worker) == []
    assert c.rollout_began() == [] and c.state(2) is IDLE, "it may be about to get work"
    assert c.idle(1) == [Lead(2), Join(1, 2)]


def test_nothing_trains_without_data():
    c = begun(data=False)
    assert c.idle(0) == c.idle(1) == []
    assert c.data_ready(True) == [Lead(0), Join(1, 0)] and c.data_ready(True) == []
    assert c.data_ready(False) == [Halt(1), Halt(0)] and c.data_ready(False) == []
    assert c.data_ready(True) == [], "they have not said that they are idle"
    assert c.idle(1) == [Lead(1)]


def test_idle_and_busy_workers_may_be_lost():
    c = begun(3, min_idle_workers=2)
    c.idle(0)
    assert c.lost(0) == c.lost(1) == [] and c.idle(2) == []
    assert c.joined(0) == [] and c.state(0) is BUSY
    assert c.idle(0) == [Lead(2), Join(0, 2)]


@pytest.mark.parametrize(
    "event",
    [
        lambda c: (c.data_ready(False), c.idle(0), c.idle(0)),  # is idle already
        lambda c: c.idle(1),  # trains: it has to be halted first
        lambda c: c.idle(9),
        lambda c: c.lost(9),
        lambda c: c.work_arrived(9),
        lambda c: c.joined(2),
        lambda c: c.rollout_began(),
        lambda c: (c.rollout_ended(), c.rollout_ended()),
    ],
)
def test_impossible_events_are_refused(event):
    c = begun(4, min_idle_workers=3)
    for worker in (1, 2, 3):
        c.idle(worker)
    c.work_arrived(2), c.work_arrived(3)
    assert [c.state(w) for w in range(4)] == [BUSY, TRAINING, BUSY, BUSY]
    with pytest.raises(AssertionError):
        event(c)


def test_a_threshold_is_at_least_one():
    with pytest.raises(ValueError, match="min_idle_workers >= 1, got 0"):
        SpotCoordinator(0)


# -- random events -----------------------------------------------------------------------


@dataclasses.dataclass
class Fleet:
    """Workers that do as they are told. What a coordinator tells them wrongly fails here."""

    coordinator: SpotCoordinator
    min_idle: int
    states: dict[int, WorkerState] = dataclasses.field(default_factory=dict)
    leaders: dict[int, int] = dataclasses.field(default_factory=dict)  # of those that train
    runs: bool = False
    data: bool = False

    def play(self, event, worker):
        """Tells of an event, if it can be."""
        c, state = self.coordinator, self.states.get(worker)
        if event == "joined" and state is None:
            self.states[worker] = BUSY
            self.obey(c.joined(worker))
        elif event == "lost" and state:
            del self.states[worker]
            gone = self.leaders.pop(worker, None)
            self.obey(c.lost(worker), taken_over=gone)
        elif event == "idle" and state is BUSY:
            self.states[worker] = IDLE
            self.obey(c.idle(worker))
            self.check_nobody_is_left_out()
        elif event == "work" and state:
            actions = c.work_arrived(worker)
            assert (Halt(worker) in actions) == (state is TRAINING)
            self.obey(actions, taken_over=self.leaders.get(worker))
            self.states[worker] = BUSY
        elif event == "rollout":
            self.runs = not self.runs
            self.obey(c.rollout_began() if self.runs else c.rollout_ended())
        elif event == "data":
            self.data = not self.data
            self.obey(c.data_ready(self.data))
            self.check_nobody_is_left_out()
        self.check()

    def obey(self, actions, taken_over=None):
        for action in actions:
            worker = action.worker_id
            match action:
                case Lead():
                    assert self.states[worker] is IDLE
                    self.states[worker], self.leaders[worker] = TRAINING, worker
                case Join(_, leader):
                    assert self.states[worker] is IDLE and self.leaders.get(leader) == leader
                    self.states[worker], self.leaders[worker] = TRAINING, leader
                case Halt():
                    assert self.states[worker] is TRAINING
                    self.states[worker] = BUSY  # until it is wound down
                    del self.leaders[worker]
                case Promote():
                    members = [w for w, leader in self.leaders.items() if leader == taken_over]
                    assert worker in members and taken_over not in members
                    self.leaders |= dict.fromkeys(members, worker)

    def check(self):
        for worker, leader in self.leaders.items():
            assert self.states[worker] is TRAINING and self.runs and self.data
            assert self.leaders.get(leader) == leader, "a member without a live leader"
        assert len(set(self.leaders.values())) <= 1, "two leaders"
        c = self.coordinator
        assert {w: c.state(w) for w in self.states} == self.states
        assert sorted(c.members()) == sorted(self.leaders)
        assert c.leader() == next(iter(self.leaders.values()), None)

    def check_nobody_is_left_out(self):
        idle = [w for w, state in self.states.items() if state is IDLE]
        if self.runs and self.data:
            assert not idle or len(idle) + len(self.leaders) < self.min_idle
            assert not (self.leaders and idle)


EVENTS = ["joined", "lost", "idle", "idle", "idle", "work", "work", "rollout", "data"]


def play(seed, make=SpotCoordinator, events=300):
    rng = np.random.default_rng(seed)
    min_idle = int(rng.integers(1, 5))
    fleet = Fleet(make(min_idle), min_idle)
    for worker in range(4):
        fleet.play("joined", worker)
    fleet.play("rollout", 0), fleet.play("data", 0)
    trained = 0
    for event in rng.choice(EVENTS, events):
        # the rollout and the data change now and then only
        if event not in ("rollout", "data") or not fleet.data & fleet.runs or rng.random() < 0.2:
            fleet.play(event, int(rng.integers(6)))
        trained = max(trained, len(fleet.leaders))
    return trained


@pytest.mark.parametrize("seed", range(100))
def test_random_events(seed):
    play(seed)


def test_random_events_have_sessions_of_many():
    assert max(play(seed) for seed in range(20)) >= 5


class Mute(SpotCoordinator):
    """Forgets to say the last thing that it decides."""

    forgets: type

    def work_arrived(self, worker_id):
        return [a for a in super().work_arrived(worker_id) if not isinstance(a, self.forgets)]


class Alone(SpotCoordinator):
    """Everyone leads."""

    def idle(self, worker_id):
        actions = super().idle(worker_id)
        return [Lead(a.worker_id) if isinstance(a, Join) else a for a in actions]


class Eager(SpotCoordinator):
    """Trains whether or not a rollout runs."""

    def rollout_ended(self):
        super().rollout_ended()
        return []


class Hasty(SpotCoordinator):
    """Counts who was halted as idle at once."""

    def rollout_ended(self):
        actions = super().rollout_ended()
        for action in actions:
            self._enter(action.worker_id, IDLE)
        return actions


@pytest.mark.parametrize(
    "faulty",
    [
        type("MuteHalt", (Mute,), {"forgets": Halt}),
        type("MutePromote", (Mute,), {"forgets": Promote}),
        Alone,
        Eager,
        Hasty,
    ],
)
def test_a_faulty_coordinator_is_found(faulty):
    with pytest.raises(AssertionError):
        for seed in range(100):
            play(seed, faulty)
