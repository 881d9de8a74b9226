"""Opportunistic drafter training: which idle rollout workers train, and which one leads.

A pure state machine like the schedulers. Source: TLT, section 4.2, Worker Coordinator.
"""

from __future__ import annotations


class SpotCoordinator:
    """Idle workers train while a rollout runs and there is data; a worker with work never does.

    Once `min_idle_workers` have no work, those that train included, all idle ones join the session:
    the one that has been idle longest leads. The session continues, and takes new members, if that
    number falls again. If the leader leaves, the member that joined first takes over.

    Workers report every transition: `idle` when they have neither work nor training left, also
    after training has stopped; `work_arrived` when they get work. Impossible events are
    AssertionErrors.
    """

    def __init__(self, min_idle_workers: int = 1) -> None:
        if min_idle_workers < 1:
            raise ValueError(f"expected min_idle_workers >= 1, got {min_idle_workers}")
        self._min_idle_workers = min_idle_workers
        self._busy: set[int] = set()  # serve the rollout, start up, or wind training down
        self._idle: list[int] = []  # without work or training, the longest first
        self.members: list[int] = []  # the session's, its leader first; empty: no session
        self._rollout_runs = self._has_data = False

    def is_idle(self, worker_id: int) -> bool:
        """Return whether a worker has no requests; it may train."""
        return worker_id in self._idle or worker_id in self.members

    def leads(self, worker_id: int) -> bool | None:
        """Return whether a training worker leads the session; None if it does not train."""
        return worker_id == self.members[0] if worker_id in self.members else None

    def joined(self, worker_id: int) -> None:
        """A worker starts up; it counts as busy until it reports that it is idle."""
        is_present = worker_id in self._busy or self.is_idle(worker_id)
        assert not is_present, f"worker {worker_id} has joined before"
        self._busy.add(worker_id)

    def lost(self, worker_id: int) -> None:
        self._remove(worker_id)

    def idle(self, worker_id: int) -> None:
        """A busy worker has nothing left to do, and has released its memory."""
        assert worker_id in self._busy, f"worker {worker_id}: expected a busy one"
        self._busy.remove(worker_id)
        self._idle.append(worker_id)
        self._promote()

    def work_arrived(self, worker_id: int) -> None:
        """A worker has requests and stops training; a busy one may get more of them."""
        self._remove(worker_id)
        self._busy.add(worker_id)

    def rollout_began(self) -> None:
        """A rollout starts; none trains yet, since idle workers are about to get work."""
        assert not self._rollout_runs, "the rollout before has not ended"
        self._rollout_runs = True

    def rollout_ended(self) -> None:
        """The rollout is over, and all training stops."""
        assert self._rollout_runs, "no rollout runs"
        self._rollout_runs = False
        self._stop()

    def data_ready(self, is_ready: bool) -> None:
        """There are sequences to train on, or no longer."""
        self._has_data = is_ready
        if is_ready:
            self._promote()
        else:
            self._stop()

    def _remove(self, worker_id: int) -> None:
        for workers in (self._busy, self._idle, self.members):
            if worker_id in workers:
                workers.remove(worker_id)
                return
        raise AssertionError(f"worker {worker_id} has not joined")

    def _promote(self) -> None:
        """Let all idle workers train, if they may: in the running session, or in a new one."""
        has_enough = self.members or len(self._idle) >= self._min_idle_workers
        if has_enough and self._rollout_runs and self._has_data:
            self.members += self._idle
            self._idle.clear()

    def _stop(self) -> None:
        self._busy.update(self.members)
        self.members.clear()
