"""Opportunistic drafter training: which idle rollout workers train, and which one leads.

A pure state machine like the schedulers. Source: TLT, section 4.2, Worker Coordinator.
"""

from __future__ import annotations


class SpotCoordinator:
    """Idle workers train while a rollout runs and there is data; a worker with work never does.

    Once `min_idle_workers` have no work, all idle ones train, and those that become idle later: the
    one that has been idle longest leads. They continue if their number falls again, unless none is
    left. Workers report `idle` when they have neither work nor training left, and `work_arrived`.
    """

    def __init__(self, min_idle_workers: int = 1) -> None:
        if min_idle_workers < 1:
            raise ValueError(f"expected min_idle_workers >= 1, got {min_idle_workers}")
        self._min_idle_workers = min_idle_workers
        self._busy: set[int] = set()  # serve the rollout, start up, or wind training down
        self._idle: list[int] = []  # without work, the longest first
        self._trains = self._rollout_runs = self._has_data = False

    @property
    def workers(self) -> list[int]:
        return [*self._busy, *self._idle]

    @property
    def members(self) -> list[int]:
        """The workers that train, the leader first."""
        return list(self._idle) if self._trains else []

    def is_idle(self, worker_id: int) -> bool:
        """Return whether a worker has no requests; it may train."""
        return worker_id in self._idle

    def leads(self, worker_id: int) -> bool | None:
        """Return whether a training worker leads; None if it does not train."""
        return worker_id == self._idle[0] if worker_id in self.members else None

    def joined(self, worker_id: int) -> None:
        """A worker starts up; it counts as busy until it reports that it is idle."""
        assert worker_id not in self._busy and worker_id not in self._idle, worker_id
        self._busy.add(worker_id)

    def lost(self, worker_id: int) -> None:
        if worker_id in self._idle:
            self._idle.remove(worker_id)
        else:
            self._busy.remove(worker_id)
        self._trains &= bool(self._idle)

    def idle(self, worker_id: int) -> None:
        """A busy worker has nothing left to do, and has released its memory."""
        self._busy.remove(worker_id)
        self._idle.append(worker_id)
        self._update()

    def work_arrived(self, worker_id: int) -> None:
        """A worker has requests and stops training; a busy one may get more of them."""
        self.lost(worker_id)
        self._busy.add(worker_id)

    def rollout_began(self) -> None:
        """A rollout starts; none trains yet, since idle workers are about to get work."""
        self._rollout_runs = True

    def rollout_ended(self) -> None:
        """The rollout is over, and all training stops."""
        self._rollout_runs = False
        self._update()

    def data_ready(self, is_ready: bool) -> None:
        """There are sequences to train on, or no longer."""
        self._has_data = is_ready
        self._update()

    def _update(self) -> None:
        """Let idle workers train if they may; workers that stop are busy until they report idle."""
        if self._rollout_runs and self._has_data:
            self._trains |= len(self._idle) >= self._min_idle_workers
        elif self._trains:
            self._busy.update(self._idle)
            self._idle.clear()
            self._trains = False
