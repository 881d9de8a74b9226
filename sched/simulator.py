"""A cluster on a virtual clock, driven by the scheduler that would drive the real one.

    lengths, a scheduler, workers → events in order of time → a record of the rollout

Lengths are the truth that only the simulator knows; schedulers learn them from what ends.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from sched.cost_model import Instance
from sched.protocol import (
    Action,
    ChunkDone,
    Defer,
    Event,
    Finished,
    Scheduler,
    Submitted,
    WorkerJoined,
)
from sched.request import Ask, Kv
from sched.simulated_worker import Counters, Job, Pace, Plain, SimulatedWorker


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`num_workers` equal workers."""

    instance: Instance
    num_workers: int
    max_requests: int = 1024
    kv_tokens: int | None = None  # None: what fits beside the weights

    @property
    def kv_tokens_per_worker(self) -> int:
        return self.instance.kv_tokens if self.kv_tokens is None else self.kv_tokens


@dataclasses.dataclass(frozen=True)
class Sample:
    """A worker from `begin_s` on: what ran there, and the positions it held."""

    begin_s: float
    worker_id: int
    num_running: int
    num_queued: int
    positions: float


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """What a simulated rollout was like."""

    finish_s: Mapping[int, float]
    tokens: int
    workers: Sequence[Counters]
    samples: Sequence[Sample]
    migrations: int

    @property
    def completion_s(self) -> float:
        return max(self.finish_s.values(), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.completion_s

    @property
    def tail_s(self) -> float:
        """Seconds in which only the last tenth of the requests runs (Seer, section 6.2.2)."""
        ends = sorted(self.finish_s.values())
        return ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1] if ends else 0.0

    @property
    def idle_fraction(self) -> float:
        busy = sum(w.busy_s for w in self.workers)
        return 1 - busy / (len(self.workers) * self.completion_s)

    @property
    def preemptions(self) -> int:
        return sum(w.preemptions for w in self.workers)


class Simulation:
    """One rollout: `run` plays it to its end."""

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        lengths: Mapping[int, int],
        *,
        pace: Pace | None = None,
        lane_of: Mapping[int, int] | None = None,
        keep_samples: bool = False,
    ) -> None:
        """`lengths`: tokens of each request, by its number; `lane_of`: its lane in `pace`."""
        self._scheduler, self._cluster, self._lengths = scheduler, cluster, lengths
        pace = pace or Plain(cluster.instance)
        self._lane_of = lane_of or {}
        kv_tokens = cluster.kv_tokens_per_worker
        self._workers = [
            SimulatedWorker(i, cluster.instance, pace, kv_tokens, cluster.max_requests)
            for i in range(cluster.num_workers)
        ]
        self._asks: dict[int, Ask] = {}
        self._generated: dict[int, int] = {}
        self._ran_on: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []  # (time, worker, version)
        self._finish_s: dict[int, float] = {}
        self._samples: list[Sample] | None = [] if keep_samples else None
        self._tokens = self._migrations = 0

    def run(self, asks: Sequence[Ask]) -> Record:
        """All requests from their submission at 0 to the end of the last.

        Raises RuntimeError where the scheduler lets requests wait for ever.
        """
        self._asks = {ask.request_id: ask for ask in asks}
        kv_tokens = self._cluster.kv_tokens_per_worker
        for worker in self._workers:
            joined = WorkerJoined(worker.worker_id, kv_tokens, self._cluster.max_requests)
            self._tell(joined, 0.0)
        self._tell(Submitted(tuple(asks)), 0.0)
        while self._heap:
            now_s, worker_id, version = heapq.heappop(self._heap)
            worker = self._workers[worker_id]
            if version == worker.version:
                self._play(worker, now_s)
        if self._scheduler.num_unfinished:
            raise RuntimeError(
                f"{self._scheduler.num_unfinished} requests wait and nothing runs: "
                "the scheduler has lost them"
            )
        counters = [w.counters for w in self._workers]
        return Record(self._finish_s, self._tokens, counters, self._samples or [], self._migrations)

    def _play(self, worker: SimulatedWorker, now_s: float) -> None:
        """What happens on `worker` at `now_s`, and what the scheduler makes of it."""
        for job in worker.reach(now_s):
            length = self._lengths[job.request_id]
            self._generated[job.request_id] = job.generated_tokens
            event: Event
            if job.generated_tokens >= length:
                self._finish_s[job.request_id] = now_s
                self._tokens += length
                event = Finished(job.request_id, worker.worker_id, job.chunk, length)
            else:
                event = ChunkDone(
                    job.request_id, worker.worker_id, job.chunk, job.generated_tokens, True
                )
            self._tell(event, now_s)
        self._schedule(worker)

    def _tell(self, event: Event, now_s: float) -> None:
        touched = dict.fromkeys(
            self._act(action, now_s) for action in self._scheduler.handle(event, now_s)
        )
        for worker_id in touched:
            self._schedule(self._workers[worker_id])

    def _act(self, action: Action, now_s: float) -> int:
        assert not isinstance(action, Defer), "a single rollout has no next step"
        ask = self._asks[action.request_id]
        generated = self._generated.get(action.request_id, 0)
        worker = self._workers[action.worker_id]
        worker.advance(now_s)
        worker.start(
            Job(
                action.request_id,
                ask.group_id,
                ask.prompt_tokens,
                generated,
                min(action.max_tokens, self._lengths[action.request_id] - generated),
                action.chunk,
                self._lane_of.get(action.request_id, 0),
                action.kv is Kv.PREFILL,
                action.reserved_tokens > 0,
            )
        )
        before = self._ran_on.setdefault(action.request_id, action.worker_id)
        self._migrations += before != action.worker_id
        self._ran_on[action.request_id] = action.worker_id
        return action.worker_id

    def _schedule(self, worker: SimulatedWorker) -> None:
        next_s = worker.next_s()
        if next_s < math.inf:
            heapq.heappush(self._heap, (next_s, worker.worker_id, worker.version))
        if self._samples is not None:
            self._samples.append(
                Sample(
                    worker.now_s,
                    worker.worker_id,
                    worker.num_running,
                    worker.num_queued,
                    worker.positions,
                )
            )
