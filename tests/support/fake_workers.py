"""Fake engines for tests of the coordinator: requests, workers, and the owner of a rollout.

A worker drives its real source as an engine does, but its rounds compute nothing: each gives every
request one token.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rl.trajectory import FinishReason, PartialRequest, Prefix, Request, Trajectory
from rl.workers.coordinator import Coordinator
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import Deferred, WorkerError
from rl.workers.worker_source import WorkerLimits, WorkerSource
from sched.policies.divided import make_scheduler
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.steps import StepOrder
from sched.protocol import Action, Event, Scheduler
from sched.simulator.workloads import Workload, draw_epochs
from spec.config import SamplingConfig

POLICIES = ("group_fifo", "divided_fifo", "seer", "histopipe")
PROMPT_TOKENS, GROUP_SIZE, SLOTS = 128, 8, 8
MEAN_TOKENS = 512  # of responses; their limit is four times that, a chunk half of it
REQUESTS_PER_WORKER = 32  # and step
FLOATS, INTS = np.zeros(4 * MEAN_TOKENS, np.float32), np.zeros(4 * MEAN_TOKENS, np.int32)
BYTES = INTS.astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Work:
    """Steps of requests, their lengths by number, and those of the epoch before by group."""

    steps: Sequence[Sequence[Request]]
    lengths: Sequence[int]
    past: Mapping[int, tuple[int, ...]]
    num_workers: int
    mean_tokens: int

    @property
    def limit_tokens(self) -> int:
        return 4 * self.mean_tokens

    @property
    def num_requests(self) -> int:
        return len(self.lengths)


def draw_work(
    num_workers: int,
    num_steps: int,
    per_worker: int = REQUESTS_PER_WORKER,
    mean_tokens: int = MEAN_TOKENS,
) -> Work:
    groups = num_workers * per_worker // GROUP_SIZE
    workload = Workload(num_steps * groups, GROUP_SIZE, mean_tokens, 4 * mean_tokens)
    past, now = draw_epochs(workload, [mean_tokens] * 2, seed=0)
    prompt, size = (1,) * PROMPT_TOKENS, GROUP_SIZE
    steps = [
        [
            Request(g * size + i, prompt, g, i)
            for g in range(s * groups, (s + 1) * groups)
            for i in range(size)
        ]
        for s in range(num_steps)
    ]
    by_group = dict(enumerate(map(tuple, past.tolist())))
    return Work(steps, now.ravel().tolist(), by_group, num_workers, mean_tokens)


class FakeWorker:
    """A worker as `rl.workers.worker_group` and the engine drive its source, without a model."""

    def __init__(
        self, worker_id: int, coordinator: Coordinator, limits: WorkerLimits, work: Work
    ) -> None:
        self.worker_id, self._coordinator, self._lengths = worker_id, coordinator, work.lengths
        self._inbox = coordinator.join(worker_id, limits.kv_tokens, limits.max_requests)
        self._slots = limits.max_requests
        # nothing is drafted or trained here: the source needs no engine
        self._source = WorkerSource(worker_id, self._inbox, coordinator, limits, None)  # type: ignore[arg-type]
        self._open = False  # the source may bring more for the step at hand
        self._next = False  # it has starts of a later step
        self._waiting: collections.deque[PartialRequest] = collections.deque()
        self._rows: list[tuple[int, int, Request, int]] = []  # (last round, number, …, tokens then)
        self.rounds = 0

    def is_idle(self) -> bool:
        busy = self._rows or self._waiting or self._next
        return not busy and self._inbox.empty()

    def begin(self, *, wait: bool) -> bool:
        """Get requests to run; False if there are none any more, or now without `wait`."""
        while not self._rows:
            if not self._open:
                if self._source.next_step() is None:
                    return False
                self._open, self._next = True, False
            self._take(wait=wait)
            if not (wait or self._rows or self._next):
                return False
        return True

    def end_round(self) -> None:
        """Report what ended with this round, give a sign of life, and take what came."""
        self.rounds += 1
        rows = self._rows
        ends = bool(rows) and rows[0][0] <= self.rounds
        ended = []
        while rows and rows[0][0] <= self.rounds:
            request, tokens = heapq.heappop(rows)[2:]
            whole = tokens == self._lengths[request.request_id]
            ended.append(trajectory(request, tokens) if whole else begun(request, tokens))
        for one in ended:
            self._end(one)
        self._coordinator.alive(self.worker_id)
        if self._open:
            self._take(wait=False)
        elif ends:
            self._admit()

    def _take(self, *, wait: bool) -> None:
        taken = self._source.take(wait=wait and not self._rows and not self._waiting)
        self._open = taken is not None
        self._next = taken is None
        if taken:
            self._waiting.extend(taken)
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._slots:
            taken = self._waiting.popleft()
            request, tokens = taken.request, taken.num_tokens
            assert taken.max_tokens is not None
            until = min(tokens + taken.max_tokens, self._lengths[request.request_id])
            row = (self.rounds + until - tokens, request.request_id, request, until)
            heapq.heappush(self._rows, row)

    def _end(self, one: Trajectory | PartialRequest) -> None:
        if isinstance(one, Trajectory):
            self._coordinator.finished(self.worker_id, one)
            return
        request, tokens = one.request, one.num_tokens
        number = request.request_id
        more = self._source.chunk_ended(number, tokens)
        if more:
            until = min(tokens + more, self._lengths[number])
            heapq.heappush(self._rows, (self.rounds + until - tokens, number, request, until))
        else:
            self._source.park([one])


def trajectory(request: Request, tokens: int) -> Trajectory:
    ints, floats = INTS[:tokens], FLOATS[:tokens]
    return Trajectory(
        request.request_id,
        request.group_id,
        request.sample_index,
        INTS[:PROMPT_TOKENS],
        ints,
        floats,
        ints,
        BYTES[:tokens],
        FinishReason.STOP,
        emission_logprobs=floats,
    )


def begun(request: Request, tokens: int) -> PartialRequest:
    ints, floats = INTS[:tokens], FLOATS[:tokens]
    return PartialRequest(request, Prefix(ints, floats, floats, ints, BYTES[:tokens], 0, None))


class Owner:
    """The part of a pipeline's two threads: submits steps, collects results, tells of updates.

    Step s + 1 is submitted with the update of s − 1, as in `rl.loop.async_rollouts`.
    """

    def __init__(self, coordinator: Coordinator, work: Work) -> None:
        self._coordinator, self._work = coordinator, work
        self._step_of = {r.request_id: s for s, step in enumerate(work.steps) for r in step}
        self._missing = [len(step) for step in work.steps]
        self._submitted = self.trained = 0
        self.finished: collections.Counter[int] = collections.Counter()
        self.wrong_lengths = self.num_deferred = 0

    def submit(self) -> None:
        """Submit the steps that may run now."""
        while self._submitted < min(self.trained + 2, len(self._work.steps)):
            step = self._submitted
            requests = self._work.steps[step]
            past = {r.group_id: self._work.past[r.group_id] for r in requests}
            sampling = SamplingConfig(max_new_tokens=self._work.limit_tokens)
            self._coordinator.submit(step, requests, sampling, past)
            self._submitted += 1

    def collect(self, timeout_s: float) -> bool:
        """Take one result; False if there is none."""
        result = self._coordinator.next_result(timeout_s)
        if result is None:
            return False
        if isinstance(result, WorkerError):
            raise result
        step = self._step_of.pop(result.request_id, -1)
        assert step >= 0, f"request {result.request_id} ended twice"
        self._missing[step] -= 1
        if isinstance(result, Deferred):
            self.num_deferred += 1
            self._missing[step + 1] += 1
            self._step_of[result.request_id] = step + 1
        else:
            self.finished[result.request_id] += 1
            self.wrong_lengths += result.num_tokens != self._work.lengths[result.request_id]
        self._train()
        return True

    def _train(self) -> None:
        while self.trained < self._submitted and not self._missing[self.trained]:
            self._coordinator.trained(self.trained)
            self.trained += 1
            self.submit()

    @property
    def is_done(self) -> bool:
        return self.trained == len(self._work.steps)

    def check(self) -> None:
        """Assert that each request has finished once, with all its tokens."""
        assert len(self.finished) == self._work.num_requests, "requests were lost"
        assert set(self.finished.values()) == {1}, "requests finished twice"
        assert not self.wrong_lengths, f"{self.wrong_lengths} responses of another length"


def limits_of(work: Work) -> WorkerLimits:
    longest = PROMPT_TOKENS + work.limit_tokens
    return WorkerLimits(SLOTS * longest, SLOTS, longest, 2**30, 600.0)


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
        self._num_joined = self.turns = 0
        self.num_lost = 0
        for _ in range(work.num_workers):
            self._join()

    def play(self, each_turn: Callable[[], object] = lambda: None) -> None:
        owner = self.owner
        owner.submit()
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
            while owner.collect(0.0):
                pass
            each_turn()
            assert played or owner.is_done or self._joins, "requests wait, and nothing runs"
        owner.check()

    def _elastic(self) -> None:
        while self._losses and self._losses[0] <= self.turns:
            self._losses.pop(0)
            worker = self.workers.pop(int(self._rng.integers(len(self.workers))))
            self.coordinator.lose(worker.worker_id)
            self.num_lost += 1
        while self._joins and self._joins[0] <= self.turns:
            heapq.heappop(self._joins)
            self._join()

    def _join(self) -> None:
        number, self._num_joined = self._num_joined, self._num_joined + 1
        self.workers.append(FakeWorker(number, self.coordinator, self._limits, self._work))
