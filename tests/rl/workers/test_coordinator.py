"""The coordinator's events in every order that threads can bring about: nothing is lost."""

from __future__ import annotations

import collections

import pytest

from benchmarks.interleavings import SCHEDULERS, WRONG, Rollout, all_of
from rl.trajectory import Trajectory
from rl.workers.coordinator import Aborted, Coordinator
from sched.protocol import WorkerLost


@pytest.mark.fault
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_order_of_two_events_loses_a_result_or_waits_for_ever(scheduler):
    runs, pairs, total = 0, set(), collections.Counter()
    for first, second, at, counts in all_of(scheduler):
        assert not any(counts[name] for name in WRONG), (first, second, at, counts)
        runs += 1
        pairs.add((first, second))
        total.update(counts)
    # the script reaches what it is about; whole groups have one start a request
    assert runs > 300 and len(pairs) > 125
    moves = scheduler not in ("group_fifo", "histopipe")
    assert (total["waited"] > 0) == moves
    assert (total["deferred"] > 0) == (scheduler == "histopipe")


class PopsOutsideTheLock(Coordinator):
    """The order of before: between the two steps others may be handed to the lost worker."""

    def lose(self, worker_id):
        with self._lock:
            del self._workers[worker_id]
        with self._lock:
            self._starts = {r: s for r, s in self._starts.items() if s.worker_id != worker_id}
            self._pool.withdraw_all(worker_id)
            self._tell(WorkerLost(worker_id))


class BelievesTheLost(Coordinator):
    """Reports of a worker that was given up count."""

    def _alive(self, worker_id, doing):
        if self._aborted:
            raise Aborted


class PromisesTooLate(Coordinator):
    """The scheduler hears of a chunk's end before the pool does."""

    def chunk_ended(self, worker_id, request_id, response_tokens):
        promise, self._pool.promise = self._pool.promise, lambda *_: None
        try:
            more = super().chunk_ended(worker_id, request_id, response_tokens)
        finally:
            self._pool.promise = promise
        if not more:
            self._pool.promise(request_id, worker_id)
        return more


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (PopsOutsideTheLock, "results_lost"),
        (BelievesTheLost, "errors"),
        (PromisesTooLate, "errors"),
    ],
)
def test_planted_faults_are_found(planted, found):
    total = collections.Counter()
    for scheduler in SCHEDULERS:
        for *_, counts in all_of(scheduler, planted):
            total.update(counts)
    assert total[found] > 0


def test_a_result_is_handed_over_whatever_the_scheduler_says_of_it():
    rollout = Rollout("group_fifo")
    rollout.coordinator._scheduler.handle = None  # raises where it is called
    assert rollout.do("finish 0")
    assert len(rollout.errors) == 1
    assert isinstance(rollout.coordinator.next_result(0.0), Trajectory)
