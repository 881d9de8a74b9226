"""Opportunistic drafter training: which idle rollout workers train, and who leads them.

A state machine like the schedulers (sched/protocol.py): each event answers with what is to be
done, and nothing happens by itself. Source: TLT, section 4.2, Worker Coordinator.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

# --- actions ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Lead:
    """Set up a training session for the worker's data-parallel group, and train."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Train in the session of `leader_id`."""

    worker_id: int
    leader_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Halt:
    """Stop training at once; say `idle` when that is done and there is no work."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Promote:
    """The session's leader has left: this member takes it over."""

    worker_id: int


Action = Lead | Join | Halt | Promote

# --- states -----------------------------------------------------------------------------


class WorkerState(enum.Enum):
    """What a worker is at."""

    BUSY = "busy"  # it serves the rollout, starts up, or winds a halted training down
    IDLE = "idle"  # it has no work, and has released its memory
    TRAINING = "training"


class SpotCoordinator:
    """Idle workers train while a rollout runs and there is data; a worker with work never does.

    Once `min_idle_workers` have no work, those that train included, all idle ones are promoted:
    in each data-parallel group the one that has been idle longest leads, the others join. A
    session goes on, and takes members, when that number falls again. `group_of` gives the groups
    by worker (default: all are one). A session whose leader leaves is taken over by the member
    that joined first.

    Workers tell of every transition: `idle` when they have neither work nor training left, also
    after a `Halt`; `work_arrived` when they get work. Events that cannot be are AssertionErrors.
    """

    def __init__(
        self, min_idle_workers: int = 1, group_of: Mapping[int, int] | None = None
    ) -> None:
        if min_idle_workers < 1:
            raise ValueError(f"expected min_idle_workers >= 1, got {min_idle_workers}")
        self._min_idle_workers, self._group_of = min_idle_workers, group_of
        self._states: dict[int, WorkerState] = {}  # by when they came to them
        self._sessions: dict[int, list[int]] = {}  # group → members, the leader first
        self._rollout_runs = self._has_data = False

    def state(self, worker_id: int) -> WorkerState:
        return self._states[worker_id]

    def leader(self, group: int = 0) -> int | None:
        """Of the group's session; None where none runs."""
        return next(iter(self._sessions.get(group, ())), None)

    def members(self, group: int = 0) -> tuple[int, ...]:
        """Of the group's session, the leader first; empty where none runs."""
        return tuple(self._sessions.get(group, ()))

    # --- events -------------------------------------------------------------------------

    def joined(self, worker_id: int) -> list[Action]:
        """A worker starts up: it counts as busy until it says that it is idle."""
        assert worker_id not in self._states, f"worker {worker_id} has joined before"
        assert self._group_of is None or worker_id in self._group_of, (
            f"worker {worker_id} is of no data-parallel group"
        )
        self._enter(worker_id, WorkerState.BUSY)
        return []

    def lost(self, worker_id: int) -> list[Action]:
        """A worker died; there is nobody to halt."""
        actions = self._leave(worker_id)
        del self._states[worker_id]
        return actions

    def idle(self, worker_id: int) -> list[Action]:
        """A busy worker has nothing left to do, and has released its memory."""
        self._expect(worker_id, WorkerState.BUSY)
        self._enter(worker_id, WorkerState.IDLE)
        return self._promote()

    def work_arrived(self, worker_id: int) -> list[Action]:
        """A worker has requests. Of a busy one this is no transition: it has more of them."""
        self._expect(worker_id, *WorkerState)
        actions: list[Action] = []
        if self._states[worker_id] is WorkerState.TRAINING:
            actions = [Halt(worker_id), *self._leave(worker_id)]
        self._enter(worker_id, WorkerState.BUSY)
        return actions

    def rollout_began(self) -> list[Action]:
        """Nobody is promoted yet: who is idle now is about to get work, if it has not."""
        assert not self._rollout_runs, "the rollout before has not ended"
        self._rollout_runs = True
        return []

    def rollout_ended(self) -> list[Action]:
        """All training halts."""
        assert self._rollout_runs, "no rollout runs"
        self._rollout_runs = False
        return self._halt_all()

    def data_ready(self, is_ready: bool) -> list[Action]:
        """Whether there are sequences to train on."""
        self._has_data = is_ready
        return self._promote() if is_ready else self._halt_all()

    # --- transitions --------------------------------------------------------------------

    def _group(self, worker_id: int) -> int:
        return 0 if self._group_of is None else self._group_of[worker_id]

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
        """Takes a worker out of its session, if it is in one."""
        self._expect(worker_id, *WorkerState)
        group = self._group(worker_id)
        members = self._sessions.get(group, [])
        if worker_id not in members:
            return []
        led = members[0] == worker_id
        members.remove(worker_id)
        if not members:
            del self._sessions[group]
        return [Promote(members[0])] if led and members else []

    def _promote(self) -> list[Action]:
        """All idle workers train, where they may: in a session that runs, or one of their own."""
        if not (self._rollout_runs and self._has_data):
            return []
        idle = [w for w, state in self._states.items() if state is WorkerState.IDLE]
        num_unused = len(idle) + sum(map(len, self._sessions.values()))
        actions: list[Action] = []
        for worker_id in idle:
            group = self._group(worker_id)
            if group not in self._sessions and num_unused < self._min_idle_workers:
                continue
            members = self._sessions.setdefault(group, [])
            actions.append(Join(worker_id, members[0]) if members else Lead(worker_id))
            members.append(worker_id)
            self._enter(worker_id, WorkerState.TRAINING)
        return actions

    def _halt_all(self) -> list[Action]:
        """Members before their leader: nobody is left without one, and none is promoted."""
        halted = [w for members in self._sessions.values() for w in reversed(members)]
        self._sessions.clear()
        for worker_id in halted:
            self._enter(worker_id, WorkerState.BUSY)
        return [Halt(worker_id) for worker_id in halted]
