"""The cost of the coordinator: `python -m benchmarks.coordinator --json`

The coordinator, the schedulers, the pool and each worker's source are those of real runs; engines
are faked: a round gives each request one token and computes nothing. Two rollouts of several steps,
one update behind, under each scheduler:

- `round`: worker threads whose rounds sleep. `overhead_ms` are the seconds from the end of a round
  to the beginning of the next, waits for locks and for other threads included: reports, starts, a
  sign of life.
- `events`: many workers played by one thread, a round of each in turn. A tenth of the workers are
  lost at random rounds, with all that they run; as many join later. `events` are what the scheduler
  is told: steps submitted and trained, chunks and requests that end, workers that join and are
  lost. `events_per_s` are those of the CPU seconds in which they are reported and carried out, by
  workers and by the owner; what the fake engines do is not among them. `signs_of_life`, one a
  round and worker, are counted apart; `events_and_signs_per_s` are of all CPU seconds, the fake
  engines' own included.

Every request must finish exactly once, with all its tokens.
"""

from __future__ import annotations

import argparse
import collections
import gc
import heapq
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.fake_workers import (
    GROUP_SIZE,
    SLOTS,
    FakeWorker,
    Owner,
    Work,
    draw_work,
    limits_of,
)
from rl.runtime.waits import POLL_S
from rl.workers.coordinator import Coordinator
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import Aborted
from sched.policies.divided import make_scheduler
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.steps import StepOrder
from sched.protocol import Action, Event, Scheduler

PACKAGES = ("numpy",)
POLICIES = ("group_fifo", "divided_fifo", "seer", "histopipe")
ROUND_S = 0.02  # of a worker that is a thread


def scheduler_of(name: str, work: Work) -> Scheduler:
    """Return the scheduler of a pipeline of this policy."""
    chunk_tokens = work.mean_tokens // 2
    if name == "histopipe":
        epoch = len(work.steps[0]) // GROUP_SIZE
        return HistoPipe(
            HistoPipeConfig(len(work.steps), check_tokens=chunk_tokens, epoch_prompts=epoch)
        )
    return StepOrder(make_scheduler(name, seed=0, chunk_tokens=chunk_tokens), "one_step_off")


class Counted:
    """A scheduler, and how many events of each kind it was told and actions it answered with."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.events: collections.Counter[str] = collections.Counter()
        self.num_actions = 0

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        self.events[type(event).__name__] += 1
        actions = self._scheduler.handle(event, now_s)
        self.num_actions += len(actions)
        return actions


def coordinator_of(scheduler: Scheduler) -> Coordinator:
    return Coordinator(scheduler, time.perf_counter, KvPool(2**30))


# --- threads ----------------------------------------------------------------------------


def measure_rounds(name: str, num_workers: int, num_steps: int, per_worker: int) -> dict[str, Any]:
    """Return what lies between two rounds of worker threads, in milliseconds."""
    work = draw_work(num_workers, num_steps, per_worker)
    coordinator = coordinator_of(scheduler_of(name, work))
    owner, limits = Owner(coordinator, work), limits_of(work)
    overheads: dict[int, list[float]] = {i: [] for i in range(num_workers)}

    def run(worker: FakeWorker) -> None:
        seconds = overheads[worker.worker_id]
        try:
            while worker.begin(wait=True):
                time.sleep(ROUND_S)
                began_s = time.perf_counter()
                worker.end_round()
                seconds.append(time.perf_counter() - began_s)
        except Aborted:
            pass
        except BaseException as error:
            coordinator.failed(worker.worker_id, error)

    workers = [FakeWorker(i, coordinator, limits, work) for i in range(num_workers)]
    threads = [threading.Thread(target=run, args=(w,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    owner.submit()
    while not owner.is_done:
        if not owner.collect(POLL_S):
            hung = coordinator.hung(limits.hang_limit_s)
            if hung is not None:
                raise hung
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    coordinator.close()
    for thread in threads:
        thread.join(60.0)
    owner.check()
    all_ms = sorted(1e3 * s for seconds in overheads.values() for s in seconds)
    return {
        "policy": name,
        "workers": num_workers,
        "requests": work.num_requests,
        "rounds": len(all_ms),
        "overhead_ms": statistics.fmean(all_ms),
        "overhead_ms_median": statistics.median(all_ms),
        "overhead_ms_p99": all_ms[int(0.99 * len(all_ms))],
        "overhead_ms_max": all_ms[-1],
        "cpu_ms_per_round": 1e3 * cpu_s / len(all_ms),
        "round_s": ROUND_S,
        "wall_s": wall_s,
    }


# --- one thread -------------------------------------------------------------------------


class Played:
    """Many workers, a round of each in turn; a tenth are lost at random rounds and replaced."""

    def __init__(self, name: str, work: Work, lost_share: float, seed: int = 0) -> None:
        self.scheduler = Counted(scheduler_of(name, work))
        self.coordinator = coordinator_of(self.scheduler)
        self.owner, self._work, self._limits = Owner(self.coordinator, work), work, limits_of(work)
        rng = np.random.default_rng(seed)
        mean_rounds = sum(work.lengths) / (SLOTS * work.num_workers)
        num_lost = round(lost_share * work.num_workers)
        self._losses = sorted(rng.uniform(0, 0.9 * mean_rounds, num_lost).tolist())
        self._joins = [at + rng.uniform(1, 0.05 * mean_rounds) for at in self._losses]
        heapq.heapify(self._joins)
        self._rng = rng
        self.workers: list[FakeWorker] = []
        self._num_joined = self.rounds = self.turns = 0
        self.event_s = 0.0  # CPU seconds of the owner, and of workers that were lost
        self.seconds: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        for _ in range(work.num_workers):
            self._timed("join", self._join)

    def play(self, each_turn: Callable[[], object] = lambda: None) -> None:
        owner = self.owner
        self._timed("submit", owner.submit)
        while not owner.is_done:
            self.turns += 1
            self._elastic()
            played = 0
            for worker in self.workers:
                if worker.is_idle():
                    continue
                played += 1
                if worker.begin(wait=False):
                    worker.end_round()
            self.rounds += played
            began_s = time.thread_time()
            while owner.collect(0.0):
                pass
            self.event_s += time.thread_time() - began_s
            each_turn()
            assert played or owner.is_done or self._joins, "requests wait, and nothing runs"
        owner.check()

    def _elastic(self) -> None:
        while self._losses and self._losses[0] <= self.turns:
            self._losses.pop(0)
            worker = self.workers.pop(int(self._rng.integers(len(self.workers))))
            self.event_s += worker.event_s
            self._timed("loss", partial(self.coordinator.lose, worker.worker_id))
        while self._joins and self._joins[0] <= self.turns:
            heapq.heappop(self._joins)
            self._timed("join", self._join)

    def _join(self) -> None:
        number, self._num_joined = self._num_joined, self._num_joined + 1
        self.workers.append(FakeWorker(number, self.coordinator, self._limits, self._work))

    def _timed(self, what: str, call: Callable[[], object]) -> None:
        began_s = time.thread_time()
        call()
        self.seconds[what].append(time.thread_time() - began_s)
        self.event_s += self.seconds[what][-1]


def measure_events(name: str, work: Work, lost_share: float) -> dict[str, Any]:
    """Return the events a second of CPU time, and how long a loss takes."""
    played = Played(name, work, lost_share)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    played.play()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    events = sum(played.scheduler.events.values())
    event_s = played.event_s + sum(worker.event_s for worker in played.workers)
    return {
        "policy": name,
        "workers": work.num_workers,
        "steps": len(work.steps),
        "requests": work.num_requests,
        "finished_once": sum(n == 1 for n in played.owner.finished.values()),
        "deferred": played.owner.num_deferred,
        "rounds_per_worker": played.rounds / work.num_workers,
        "events": events,
        "events_by_kind": dict(sorted(played.scheduler.events.items())),
        "actions": played.scheduler.num_actions,
        "signs_of_life": played.rounds,
        "events_per_s": events / event_s,
        "events_and_signs_per_s": (events + played.rounds) / cpu_s,
        "event_s": event_s,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "submit_ms_max": 1e3 * max(played.seconds["submit"]),
        "loss_ms_mean": 1e3 * statistics.fmean(played.seconds["loss"] or [0.0]),
        "loss_ms_max": 1e3 * max(played.seconds["loss"], default=0.0),
        "join_ms_max": 1e3 * max(played.seconds["join"], default=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=64, help="workers that are threads")
    parser.add_argument("--workers", type=int, default=1024, help="workers played by one thread")
    parser.add_argument("--steps", type=int, default=5, help="of 2,048 rounds and more a worker")
    parser.add_argument("--lost", type=float, default=0.1, help="share of the workers lost")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    rounds, events = [], []
    work = draw_work(arguments.workers, arguments.steps)
    gc.freeze()  # what is asked for is no part of what is measured
    for name in arguments.policies:
        if arguments.threads:
            rounds.append(measure_rounds(name, arguments.threads, 2, 8))
        events.append(measure_events(name, work, arguments.lost))
    shown = {f"{row['policy']}_overhead_ms": round(row["overhead_ms"], 3) for row in rounds}
    for row in events:
        shown[f"{row['policy']}_events_per_s"] = round(row["events_per_s"])
        shown[f"{row['policy']}_events_and_signs_per_s"] = round(row["events_and_signs_per_s"])
        shown[f"{row['policy']}_loss_ms_max"] = round(row["loss_ms_max"], 2)
    record = environment.record("benchmarks.coordinator", PACKAGES)
    result = {"benchmark": "coordinator", "round": rounds, "events": events, **record}
    environment.show(result, arguments, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
