"""Opportunistic drafter training: the choice of training workers and their leader.

This is a pure state machine like the schedulers. Source: TLT, section 4.2, Worker Coordinator.
"""

from __future__ import annotations


class SpotCoordinator:
    """A coordinator that lets idle workers train while a rollout runs and there is data.

    Once `min_idle_workers` have no work, all idle workers train, including workers that become idle
    later. The worker that has been idle longest leads. Training continues with fewer idle workers,
    until none is left. Workers with work never train. Workers report `idle` when they have neither
    work nor training left, and `work_arrived`.
    """

    def __init__(self, min_idle_workers: int = 1) -> None:
        if min_idle_workers < 1:
            raise ValueError(f"expected min_idle_workers >= 1, got {min_idle_workers}")
        self._min_idle_workers = min_idle_workers
        self._busy: set[int] = set()  # serving the rollout, starting up, or stopping training
        self._idle: list[int] = []  # without work, the longest idle first
        self._trains = self._rollout_runs = self._has_data = False

    @property
    def workers(self) -> list[int]:
        return [*self._busy, *self._idle]

    @property
    def members(self) -> list[int]:
        """Return the workers that train, the leader first."""
        return list(self._idle) if self._trains else []

    def is_idle(self, worker_id: int) -> bool:
        """Return whether a worker has no requests, so that it may train."""
        return worker_id in self._idle

    def leads(self, worker_id: int) -> bool | None:
        """Return whether a training worker leads; None if it does not train."""
        return worker_id == self._idle[0] if worker_id in self.members else None

    def joined(self, worker_id: int) -> None:
        """Add a worker that starts up; it counts as busy until it reports that it is idle."""
        assert worker_id not in self._busy and worker_id not in self._idle, worker_id
        self._busy.add(worker_id)

    def lost(self, worker_id: int) -> None:
        if worker_id in self._idle:
            self._idle.remove(worker_id)
        else:
            self._busy.remove(worker_id)
        self._trains &= bool(self._idle)

    def idle(self, worker_id: int) -> None:
        """Record that a busy worker has nothing left to do, and has released its memory."""
        self._busy.remove(worker_id)
        self._idle.append(worker_id)
        self._update()

    def work_arrived(self, worker_id: int) -> None:
        """Record that a worker has requests and stops training; it may have been busy before."""
        self.lost(worker_id)
        self._busy.add(worker_id)

    def rollout_began(self) -> None:
        """Record that a rollout starts; idle workers do not train yet, as they will get work."""
        self._rollout_runs = True

    def rollout_ended(self) -> None:
        """Record that the rollout is over, and stop all training."""
        self._rollout_runs = False
        self._update()

    def data_ready(self, is_ready: bool) -> None:
        """Record whether there are sequences to train on."""
        self._has_data = is_ready
        self._update()

    def _update(self) -> None:
        """Start or stop training; workers that stop are busy until they report idle."""
        if self._rollout_runs and self._has_data:
            self._trains |= len(self._idle) >= self._min_idle_workers
        elif self._trains:
            self._busy.update(self._idle)
            self._idle.clear()
            self._trains = False
