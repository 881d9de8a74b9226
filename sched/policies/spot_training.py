"""Opportunistic drafter training: which idle rollout workers train, and who leads them.

A state machine like the schedulers (sched/protocol.py): every event is answered with actions,
and nothing happens by itself. Source: TLT, section 4.2, Worker Coordinator.
"""

from __future__ import annotations

import dataclasses
import enum

# --- actions ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Lead:
    """Set up a training session, and train."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Train in the session of `leader_id`."""

    worker_id: int
    leader_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Halt:
    """Stop training at once; report `idle` when that is done and there is no work."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Promote:
    """Take over the session, whose leader has left."""

    worker_id: int


Action = Lead | Join | Halt | Promote

# --- states -----------------------------------------------------------------------------


class WorkerState(enum.Enum):
    """The activities of a worker."""

    BUSY = "busy"  # it serves the rollout, starts up, or winds a halted training down
    IDLE = "idle"  # it has no work, and has released its memory
    TRAINING = "training"


class SpotCoordinator:
    """Idle workers train while a rollout runs and there is data; a worker with work never does.

    Once `min_idle_workers` have no work, those that train included, all idle ones are promoted:
    the one that has been idle longest leads, the others join. The session continues, and takes
    new members, when that number falls again. If the leader leaves, the member that joined
    first takes over.

    Workers report every transition: `idle` when they have neither work nor training left, also
    after a `Halt`; `work_arrived` when they get work. Impossible events are AssertionErrors.
    """

    def __init__(self, min_idle_workers: int = 1) -> None:
        if min_idle_workers < 1:
            raise ValueError(f"expected min_idle_workers >= 1, got {min_idle_workers}")
        self._min_idle_workers = min_idle_workers
        self._states: dict[int, WorkerState] = {}  # in the order in which workers entered them
        self._members: list[int] = []  # of the session, the leader first; empty: none runs
        self._rollout_runs = self._has_data = False

    def state(self, worker_id: int) -> WorkerState:
        return self._states[worker_id]

    def leader(self) -> int | None:
        """Return the session's leader, or None if no session runs."""
        return next(iter(self._members), None)

    def members(self) -> tuple[int, ...]:
        """Return the session's members, the leader first; empty if no session runs."""
        return tuple(self._members)

    # --- events -------------------------------------------------------------------------

    def joined(self, worker_id: int) -> list[Action]:
        """A worker starts up; it counts as busy until it reports that it is idle."""
        assert worker_id not in self._states, f"worker {worker_id} has joined before"
        self._enter(worker_id, WorkerState.BUSY)
        return []

    def lost(self, worker_id: int) -> list[Action]:
        """A worker died, so that nobody needs to be halted."""
        actions = self._leave(worker_id)
        del self._states[worker_id]
        return actions

    def idle(self, worker_id: int) -> list[Action]:
        """A busy worker has nothing left to do, and has released its memory."""
        self._expect(worker_id, WorkerState.BUSY)
        self._enter(worker_id, WorkerState.IDLE)
        return self._promote()

    def work_arrived(self, worker_id: int) -> list[Action]:
        """A worker has requests; a busy one may get more of them."""
        self._expect(worker_id, *WorkerState)
        actions: list[Action] = []
        if self._states[worker_id] is WorkerState.TRAINING:
            actions = [Halt(worker_id), *self._leave(worker_id)]
        self._enter(worker_id, WorkerState.BUSY)
        return actions

    def rollout_began(self) -> list[Action]:
        """A rollout starts; nobody is promoted yet, since idle workers are about to get work."""
        assert not self._rollout_runs, "the rollout before has not ended"
        self._rollout_runs = True
        return []

    def rollout_ended(self) -> list[Action]:
        """The rollout is over, and all training halts."""
        assert self._rollout_runs, "no rollout runs"
        self._rollout_runs = False
        return self._halt_all()

    def data_ready(self, is_ready: bool) -> list[Action]:
        """There are sequences to train on, or no longer."""
        self._has_data = is_ready
        return self._promote() if is_ready else self._halt_all()

    # --- transitions --------------------------------------------------------------------

    def _expect(self, worker_id: int, *states: WorkerState) -> None:
        state = self._states.get(worker_id)
        assert state in states, (
            f"worker {worker_id}: expected {' or '.join(s.value for s in states)}, "
            f"got {state.value if state else 'a worker that has not joined'}"
        )

    def _enter(self, worker_id: int, state: WorkerState) -> None:
        self._states.pop(worker_id, None)
        self._states[worker_id] = state

    def _leave(self, worker_id: int) -> list[Action]:
        """Take a worker out of the session, if it is in it."""
        self._expect(worker_id, *WorkerState)
        if worker_id not in self._members:
            return []
        led = self.leader() == worker_id
        self._members.remove(worker_id)
        return [Promote(self._members[0])] if led and self._members else []

    def _promote(self) -> list[Action]:
        """Let all idle workers train, if they may: in a running session, or in a new one."""
        idle = [w for w, state in self._states.items() if state is WorkerState.IDLE]
        too_few = not self._members and len(idle) < self._min_idle_workers
        if too_few or not (self._rollout_runs and self._has_data):
            return []
        actions: list[Action] = []
        for worker_id in idle:
            leader = self.leader()
            actions.append(Lead(worker_id) if leader is None else Join(worker_id, leader))
            self._members.append(worker_id)
            self._enter(worker_id, WorkerState.TRAINING)
        return actions

    def _halt_all(self) -> list[Action]:
        """Halt the members before their leader, so that none is promoted."""
        halted, self._members = self._members[::-1], []
        for worker_id in halted:
            self._enter(worker_id, WorkerState.BUSY)
        return [Halt(worker_id) for worker_id in halted]
