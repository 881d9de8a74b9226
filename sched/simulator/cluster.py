"""A cluster on a virtual clock, driven by the scheduler of real rollouts.

    lengths, a scheduler, workers → events in order of time → a record of the rollout

Only the simulator knows the lengths; schedulers learn them from requests that end.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from sched.protocol import (
    ChunkDone,
    Defer,
    Event,
    Finished,
    Recall,
    Return,
    Scheduler,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
)
from sched.request import RequestSpec
from sched.simulator.roofline import Costs
from sched.simulator.worker import Counters, RoundModel, RunningStart, SimulatedWorker

TRAINER = -1  # its events are in the same heap as those of the workers


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`num_workers` equal workers."""

    instance: Costs
    num_workers: int
    max_requests: int = 1024
    kv_tokens: int | None = None  # None: what fits beside the weights

    @property
    def kv_tokens_per_worker(self) -> int:
        return self.instance.kv_tokens if self.kv_tokens is None else self.kv_tokens


@dataclasses.dataclass(frozen=True)
class WorkerSample:
    """The running requests of a worker from `begin_s` on, and the positions that they held.

    `reached_positions` were held just before.
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
    trained_s: Sequence[float] = ()  # end of each step's update, in a run of steps
    deferred: int = 0

    @property
    def completion_s(self) -> float:
        return max(self.finish_s.values(), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.completion_s

    @property
    def tail_s(self) -> float:
        """The seconds in which only the last tenth of the requests runs (Seer, section 6.2.2)."""
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
    """One simulated rollout, or one run of steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        lengths: Mapping[int, int],
        *,
        round_model: RoundModel | None = None,
        keep_samples: bool = False,
    ) -> None:
        """`lengths` are tokens by request number; without a `round_model` rounds are plain."""
        self._scheduler, self._cluster, self._lengths = scheduler, cluster, lengths
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
        self._tokens = self._migrations = self._deferred = 0
        # of a run of steps: what is left to submit, and to finish, and the ends of updates
        self._steps: list[Sequence[RequestSpec]] = []
        self._train_s: Sequence[float] = ()
        self._step_of: dict[int, int] = {}
        self._left: list[int] = []
        self._trained_s: list[float] = []
        self._training = False
        self._verified: dict[int, int] = {}  # begun tokens that are not kept, by request

    def run(self, requests: Sequence[RequestSpec]) -> Record:
        """Play all requests, submitted at 0, to the end of the last.

        Raises RuntimeError where the scheduler lets requests wait for ever.
        """
        self._begin(requests)
        self._tell(Submitted(tuple(requests)), 0.0)
        return self._to_the_end()

    def run_steps(self, steps: Sequence[Sequence[RequestSpec]], train_s: Sequence[float]) -> Record:
        """Play training steps: the rollouts of each, then its update of `train_s` elsewhere.

        The scheduler gets step s when the update of step s − 2 is done, the first two at 0, and
        is told of every update; it decides which rollouts may run.
        """
        self._begin([spec for requests in steps for spec in requests])
        self._train_s, self._left = train_s, [len(requests) for requests in steps]
        self._step_of = {spec.request_id: spec.step for requests in steps for spec in requests}
        self._steps = list(steps[2:])
        for requests in steps[:2]:
            self._tell(Submitted(tuple(requests)), 0.0)
        return self._to_the_end()

    def _begin(self, requests: Sequence[RequestSpec]) -> None:
        self._requests = {spec.request_id: spec for spec in requests}
        kv_tokens = self._cluster.kv_tokens_per_worker
        for worker in self._workers:
            joined = WorkerJoined(worker.worker_id, kv_tokens, self._cluster.max_requests)
            self._tell(joined, 0.0)

    def _to_the_end(self) -> Record:
        while self._heap:
            now_s, worker_id, version = heapq.heappop(self._heap)
            if worker_id == TRAINER:
                self._end_update(now_s)
            elif version == self._workers[worker_id].version:
                self._play(self._workers[worker_id], now_s)
            if self._left:
                self._begin_update(now_s)
        if self._scheduler.num_unfinished:
            raise RuntimeError(
                f"{self._scheduler.num_unfinished} requests wait and nothing runs: "
                "the scheduler has lost them"
            )
        return Record(
            self._finish_s,
            self._tokens,
            [w.counters for w in self._workers],
            self._samples or [],
            self._migrations,
            self._trained_s,
            self._deferred,
        )

    def _begin_update(self, now_s: float) -> None:
        """Begin the next update, if its rollouts are all there."""
        step = len(self._trained_s)
        if not self._training and step < len(self._left) and not self._left[step]:
            self._training = True
            heapq.heappush(self._heap, (now_s + self._train_s[step], TRAINER, step))

    def _end_update(self, now_s: float) -> None:
        self._training = False
        self._trained_s.append(now_s)
        if self._steps:
            self._tell(Submitted(tuple(self._steps.pop(0))), now_s)
        step = len(self._trained_s) - 1
        self._tell(Trained(step, self._train_s[step]), now_s)

    def _play(self, worker: SimulatedWorker, now_s: float) -> None:
        """Tell the scheduler of the requests of `worker` that end at `now_s`."""
        for job in worker.reach(now_s):
            length = self._lengths[job.request_id]
            self._ran(job)
            event: Event
            if job.generated_tokens >= length:
                self._finished(job, now_s)
                event = Finished(job.request_id, worker.worker_id, job.chunk, length)
            else:
                event = ChunkDone(
                    job.request_id, worker.worker_id, job.chunk, job.generated_tokens, True
                )
            self._tell(event, now_s)
        self._schedule(worker)

    def _ran(self, job: RunningStart) -> None:
        """Enter the tokens of a start that has ended."""
        self._generated[job.request_id] = job.generated_tokens

    def _finished(self, job: RunningStart, now_s: float) -> None:
        """Enter a response that has ended."""
        self._finish_s[job.request_id] = now_s
        self._finished_of[job.group_id] += 1
        self._tokens += self._lengths[job.request_id]
        if self._left:
            self._left[self._step_of[job.request_id]] -= 1

    def _tell(self, event: Event, now_s: float) -> None:
        touched = dict[int, None]()
        left: list[ChunkDone] = []
        for action in self._scheduler.handle(event, now_s):
            if isinstance(action, Defer):
                self._defer(action)
            elif isinstance(action, Recall):
                left += self._let_go(action.worker_id, now_s)
                touched[action.worker_id] = None
            elif isinstance(action, Return):
                self._returned(action.request_id)
            else:
                assert isinstance(action, Start), "copies are real workers' only"
                touched[self._start(action, now_s)] = None
        for worker_id in touched:
            self._schedule(self._workers[worker_id])
        for report in left:
            self._tell(report, now_s)

    def _let_go(self, worker_id: int, now_s: float) -> list[ChunkDone]:
        """Have a worker let go of all that it runs; return what it reports."""
        jobs = self._workers[worker_id].let_go(now_s)
        for job in jobs:
            self._ran(job)
        return [
            ChunkDone(j.request_id, worker_id, j.chunk, j.generated_tokens, False) for j in jobs
        ]

    def _returned(self, request_id: int) -> None:
        """A request that was begun ahead of its step is given back."""
        raise AssertionError("nothing runs ahead of its step")

    def _defer(self, action: Defer) -> None:
        step = self._step_of[action.request_id]
        self._deferred += 1
        self._left[step] -= 1
        self._left[step + 1] += 1
        self._step_of[action.request_id] = step + 1

    def _start(self, action: Start, now_s: float) -> int:
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
                self._verified.pop(action.request_id, 0),
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
                WorkerSample(
                    worker.now_s,
                    worker.worker_id,
                    worker.num_running,
                    worker.positions,
                    worker.reached,
                )
            )
