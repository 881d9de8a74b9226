"""A cluster on a virtual clock, driven by the scheduler of real rollouts.

    lengths, a scheduler, workers → events in order of time → a record of the rollout

Only the simulator knows the lengths; schedulers learn a length when its request finishes.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from reprise.sched.policies.divided import make_scheduler
from reprise.sched.protocol import (
    Action,
    ChunkDone,
    Event,
    Finished,
    Scheduler,
    Start,
    Submitted,
    WorkerJoined,
)
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.roofline import Costs
from reprise.sched.simulator.worker import Counters, RoundModel, RunningStart, SimulatedWorker


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of `num_workers` equal workers."""

    instance: Costs
    num_workers: int
    max_requests: int = 1024
    kv_tokens: int | None = None  # None: fills the memory besides the weights

    @property
    def kv_tokens_per_worker(self) -> int:
        return self.instance.kv_tokens if self.kv_tokens is None else self.kv_tokens


@dataclasses.dataclass(frozen=True)
class WorkerSample:
    """The running requests of a worker from `begin_s` on, and the positions that they hold.

    Just before `begin_s`, running requests held `reached_positions`.
    """

    begin_s: float
    worker_id: int
    num_running: int
    positions: float
    reached_positions: float


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """The measurements of a simulated rollout."""

    finish_s: Mapping[int, float]
    tokens: int
    workers: Sequence[Counters]
    samples: Sequence[WorkerSample]
    migrations: int

    @property
    def completion_s(self) -> float:
        return max(self.finish_s.values(), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.completion_s

    @property
    def tail_s(self) -> float:
        """Return the seconds with only the last tenth of the requests (Seer, section 6.2.2)."""
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
    """One simulated rollout."""

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        lengths: Mapping[int, int],
        *,
        round_model: RoundModel | None = None,
        keep_samples: bool = False,
    ) -> None:
        """Set up with `lengths`, tokens by request; without a `round_model`, rounds are plain."""
        self._scheduler = scheduler
        self._cluster = cluster
        self._lengths = lengths
        self._round_model = round_model = round_model or RoundModel(cluster.instance)
        kv_tokens = cluster.kv_tokens_per_worker
        self._workers = [
            SimulatedWorker(i, cluster.instance, round_model, kv_tokens, cluster.max_requests)
            for i in range(cluster.num_workers)
        ]
        self._requests: dict[int, RequestSpec] = {}
        self._generated: dict[int, int] = {}
        self._ran_on: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []  # (time, worker, version)
        self._finish_s: dict[int, float] = {}
        self._finished_of: collections.Counter[int] = collections.Counter()  # by group
        self._samples: list[WorkerSample] | None = [] if keep_samples else None
        self._tokens = self._migrations = 0

    def run(self, requests: Sequence[RequestSpec]) -> Record:
        """Simulate all requests, submitted at time 0, until the last has finished.

        Raises RuntimeError if the scheduler lets requests wait forever.
        """
        self._begin(requests)
        self._send(Submitted(tuple(requests)), 0.0)
        self._run_to_end()
        return self._record()

    def _begin(self, requests: Sequence[RequestSpec]) -> None:
        self._requests = {spec.request_id: spec for spec in requests}
        kv_tokens = self._cluster.kv_tokens_per_worker
        for worker in self._workers:
            joined = WorkerJoined(worker.worker_id, kv_tokens, self._cluster.max_requests)
            self._send(joined, 0.0)

    def _run_to_end(self) -> None:
        while self._heap:
            self._advance(*heapq.heappop(self._heap))
        if self._scheduler.num_unfinished:
            raise RuntimeError(
                f"{self._scheduler.num_unfinished} requests wait and nothing runs: "
                "the scheduler has lost them"
            )

    def _record(self) -> Record:
        counters = [w.counters for w in self._workers]
        samples = self._samples or []
        return Record(self._finish_s, self._tokens, counters, samples, self._migrations)

    def _advance(self, now_s: float, worker_id: int, version: int) -> None:
        """Report the requests of a worker that finish at `now_s`, unless `version` is outdated."""
        worker = self._workers[worker_id]
        if version != worker.version:
            return
        for job in worker.reach(now_s):
            length = self._lengths[job.request_id]
            self._ran(job)
            event: Event
            if job.generated_tokens >= length:
                self._finished(job, now_s)
                event = Finished(job.request_id, worker_id, job.chunk, length)
            else:
                event = ChunkDone(job.request_id, worker_id, job.chunk, job.generated_tokens, True)
            self._send(event, now_s)
        self._schedule(worker)

    def _ran(self, job: RunningStart) -> None:
        """Record the tokens of a start that has ended."""
        self._generated[job.request_id] = job.generated_tokens

    def _finished(self, job: RunningStart, now_s: float) -> None:
        """Record a finished response."""
        self._finish_s[job.request_id] = now_s
        self._finished_of[job.group_id] += 1
        self._tokens += self._lengths[job.request_id]

    def _send(self, event: Event, now_s: float) -> None:
        """Send an event to the scheduler, and execute the starts that it returns."""
        started = [self._start(action, now_s) for action in self._scheduler.handle(event, now_s)]
        for worker_id in dict.fromkeys(started):
            self._schedule(self._workers[worker_id])

    def _start(self, action: Action, now_s: float) -> int:
        assert isinstance(action, Start), action
        spec = self._requests[action.request_id]
        generated = self._generated.get(action.request_id, 0)
        worker = self._workers[action.worker_id]
        worker.advance(now_s)
        worker.start(
            RunningStart(
                action.request_id,
                spec.group_id,
                spec.prompt_tokens,
                generated,
                min(action.max_tokens, self._lengths[action.request_id] - generated),
                action.chunk,
                self._round_model.lane(action.request_id, self._finished_of[spec.group_id]),
                action.kv,
                action.reserved_tokens > 0,
                self._verified_tokens(action.request_id),
            )
        )
        before = self._ran_on.setdefault(action.request_id, action.worker_id)
        self._migrations += before != action.worker_id
        self._ran_on[action.request_id] = action.worker_id
        return action.worker_id

    def _verified_tokens(self, request_id: int) -> int:
        """Return the number of tokens that a start computes with its prompt but discards."""
        return 0

    def _schedule(self, worker: SimulatedWorker) -> None:
        next_s = worker.next_s()
        if next_s < math.inf:
            heapq.heappush(self._heap, (next_s, worker.worker_id, worker.version))
        if self._samples is not None:
            self._samples.append(
                WorkerSample(
                    worker.now_s,
                    worker.worker_id,
                    worker.num_running,
                    worker.positions,
                    worker.reached,
                )
            )


def play_policy(
    cluster: Cluster,
    name: str,
    seed: int,
    requests: Sequence[RequestSpec],
    lengths: Mapping[int, int],
    round_model: RoundModel | None = None,
    *,
    chunk_tokens: int = 8192,
    keep_samples: bool = False,
) -> Record:
    """Simulate one rollout with one policy; without a `round_model`, rounds are plain."""
    costs = cluster.instance
    scheduler = make_scheduler(
        name,
        seed=seed,
        chunk_tokens=chunk_tokens,
        prefer_pool=costs.prefers_copy,
        ranks_per_instance=costs.num_ranks,
    )
    simulation = Simulation(
        scheduler, cluster, lengths, round_model=round_model, keep_samples=keep_samples
    )
    return simulation.run(requests)
