"""A simulated worker, a fluid model of rounds between two changes of the running requests.

While no request joins or leaves, n requests each gain `a` tokens per round, and the seconds of a
round are linear in the live positions, so the next change has a closed form. Requests with
different acceptance run in lanes, each with a number of tokens per round.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math

from reprise.sched.request import Kv
from reprise.sched.simulator.roofline import Costs, RoundCost

EPSILON_TOKENS = 1e-6  # a request with fewer tokens left has finished
WATERMARK = 0.01  # share of the memory that must stay free when a request is admitted


@dataclasses.dataclass(slots=True, eq=False)
class RunningStart:
    """A start on a worker, with `todo_tokens` left at admission."""

    request_id: int
    group_id: int
    prompt_tokens: int
    generated_tokens: int
    todo_tokens: int
    chunk: int
    lane: int
    kv: Kv
    reserved: bool
    verified_tokens: int = 0  # computed with the prompt but discarded
    device_s: float = 0.0  # equal share of the worker seconds so far
    admitted_share_s: float = 0.0  # `share_s` of the worker at admission
    end: float = 0.0  # lane progress at which it finishes, while it runs
    running: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RoundPlan:
    """The cost of the current rounds, and the tokens per request and round of each lane."""

    cost: RoundCost
    tokens_per_round: tuple[float, ...]


class RoundModel:
    """A model of the rounds of all workers of one instance type, here without drafts.

    `plan` is called whenever the running requests of a worker have changed. An instance is
    `instance.num_ranks` consecutive workers.
    """

    num_lanes = 1

    def __init__(self, instance: Costs) -> None:
        self._instance = instance
        self._running: collections.Counter[int] = collections.Counter()  # by worker
        self._together: collections.Counter[int] = collections.Counter()  # by instance

    def lane(self, request_id: int, finished_siblings: int) -> int:
        """Return the lane of a request from its next start on."""
        return 0

    def changed(self, worker_id: int, num_running: int) -> None:
        """Record the number of running requests of a worker."""
        instance_id = worker_id // self._instance.num_ranks
        self._together[instance_id] += num_running - self._running[worker_id]
        self._running[worker_id] = num_running

    def others(self, worker_id: int) -> int:
        """Return the number of requests on the other ranks of the same instance."""
        return self._together[worker_id // self._instance.num_ranks] - self._running[worker_id]

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> RoundPlan:
        """Return the plan for these `counts` of running requests by lane, which are not all 0."""
        return RoundPlan(self._instance.round_cost(counts[0], 1, self.others(worker_id)), (1.0,))


@dataclasses.dataclass(slots=True)
class Counters:
    """The totals of a worker."""

    busy_s: float = 0.0
    share_s: float = 0.0  # of a request that always runs, if requests share time equally
    tokens: float = 0.0
    preemptions: int = 0
    prefilled_tokens: int = 0
    copied_tokens: int = 0


def _is_current(entry: tuple[float, int, RunningStart]) -> bool:
    """Return False if the job was preempted, and perhaps readmitted, after this entry."""
    return entry[2].running and entry[0] == entry[2].end


class SimulatedWorker:
    """A worker that `advance` moves in time; `next_s` is the time of its next event."""

    def __init__(
        self,
        worker_id: int,
        instance: Costs,
        round_model: RoundModel,
        kv_tokens: int,
        max_requests: int,
    ) -> None:
        self.worker_id = worker_id
        self._instance = instance
        self._round_model = round_model
        self._kv_tokens = kv_tokens
        self._max_requests = max_requests
        self.counters = Counters()
        self.now_s = 0.0
        self.positions = 0.0  # held by running requests
        self.reached = 0.0  # positions just before the last change of running requests
        self.version = 0  # increases with every change
        lanes = round_model.num_lanes
        self.counts = [0] * lanes
        self._progress = [0.0] * lanes
        self._ends: list[list[tuple[float, int, RunningStart]]] = [[] for _ in range(lanes)]
        self._queue: collections.deque[RunningStart] = collections.deque()
        self._admitted: list[RunningStart] = []  # preemptible jobs, the latest last
        self._prompts: collections.Counter[int] = collections.Counter()  # by group, computed once
        self._stall_s = 0.0  # of prefill, before rounds resume
        self._plan: RoundPlan | None = None
        self._growth = 0.0  # positions per round
        self._rounds: float | None = None  # to the next event; None after a change

    @property
    def num_running(self) -> int:
        return sum(self.counts)

    def start(self, job: RunningStart) -> None:
        """Start a job now; a job without a reservation waits for room."""
        if job.reserved:
            self._admit(job)
        else:
            self._queue.append(job)
        self._changed()

    def advance(self, now_s: float) -> None:
        """Advance to `now_s`, which is at most `next_s`."""
        elapsed = now_s - self.now_s
        self.now_s = now_s
        if elapsed <= 0:
            return
        if not self.num_running:
            self.reached = self.positions
            return
        self._count_busy(elapsed)
        stalled = min(elapsed, self._stall_s)
        self._stall_s -= stalled
        self._run(self._current().cost.rounds(self.positions, self._growth, elapsed - stalled))

    def next_s(self) -> float:
        """Return when the next request finishes or memory is full, if nothing changes before."""
        if not self.num_running:
            return math.inf
        rounds = self._rounds_to_event()
        cost = self._current().cost
        return self.now_s + self._stall_s + cost.integral(self.positions, self._growth, rounds)

    def reach(self, now_s: float) -> list[RunningStart]:
        """Advance to `now_s`, the result of `next_s`; return the jobs that finish then."""
        self._count_busy(now_s - self.now_s)
        self.now_s = now_s
        self._stall_s = 0.0
        self._run(self._rounds_to_event())
        ended: list[RunningStart] = []
        for lane, ends in enumerate(self._ends):
            while ends and ends[0][0] <= self._progress[lane] + EPSILON_TOKENS:
                entry = heapq.heappop(ends)
                job = entry[2]
                if _is_current(entry):
                    ended.append(job)
                    self._leave(job)
                    job.generated_tokens += job.todo_tokens
        if not ended and self._admitted:
            self._preempt()
        self._changed()
        return ended

    def release(self, now_s: float) -> list[RunningStart]:
        """Advance to `now_s`; remove and return all jobs, with whole tokens generated so far."""
        self.advance(now_s)
        entries = [entry for ends in self._ends for entry in ends if _is_current(entry)]
        jobs = [job for _, _, job in entries] + list(self._queue)
        for _, _, job in entries:
            left = job.end - self._progress[job.lane]
            self._leave(job)
            job.generated_tokens += max(0, int(job.todo_tokens - left + EPSILON_TOKENS))
        self._queue.clear()
        self._changed()
        return jobs

    def _count_busy(self, elapsed_s: float) -> None:
        self.counters.busy_s += elapsed_s
        self.counters.share_s += elapsed_s / self.num_running

    def _current(self) -> RoundPlan:
        if self._plan is None:
            self._plan = plan = self._round_model.plan(
                self.worker_id, tuple(self.counts), self.positions
            )
            self._growth = sum(
                n * a for n, a in zip(self.counts, plan.tokens_per_round, strict=True)
            )
        return self._plan

    def _run(self, rounds: float) -> None:
        plan = self._current()
        self._rounds = None
        for lane, tokens in enumerate(plan.tokens_per_round):
            self._progress[lane] += rounds * tokens
        self.positions += rounds * self._growth
        self.reached = self.positions
        self.counters.tokens += rounds * self._growth

    def _rounds_to_event(self) -> float:
        if self._rounds is None:
            plan = self._current()
            rounds = math.inf
            for lane, ends in enumerate(self._ends):
                while ends and not _is_current(ends[0]):
                    heapq.heappop(ends)
                if ends:
                    left = ends[0][0] - self._progress[lane]
                    rounds = min(rounds, left / plan.tokens_per_round[lane])
            if self._admitted and self.num_running > 1:
                rounds = min(rounds, (self._kv_tokens - self.positions) / self._growth)
            self._rounds = max(rounds, 0.0)
        return self._rounds

    def _changed(self) -> None:
        while self._queue and self._has_room(self._queue[0]):
            self._admit(self._queue.popleft())
        self.version += 1
        self._plan = self._rounds = None
        self._round_model.changed(self.worker_id, self.num_running)

    def _has_room(self, job: RunningStart) -> bool:
        needed = job.prompt_tokens + job.generated_tokens + WATERMARK * self._kv_tokens
        fits = self.positions + needed <= self._kv_tokens
        return not self.num_running or (fits and self.num_running < self._max_requests)

    def _admit(self, job: RunningStart) -> None:
        total = job.prompt_tokens + job.generated_tokens
        late_tokens = 0.0
        if job.kv is Kv.PREFILL:
            tokens = total - job.prompt_tokens * (job.group_id in self._prompts)
            tokens += job.verified_tokens
            if tokens:
                self._stall_s += self._instance.prefill_seconds(tokens)
                self.counters.prefilled_tokens += tokens
        elif job.kv is Kv.POOL:
            # the copy overlaps with rounds of other requests; the request joins afterwards
            self.counters.copied_tokens += total
            copy_s = self._instance.copy_seconds(total)
            late_tokens = copy_s / self._instance.round_seconds(self.num_running + 1, total)
        self._prompts[job.group_id] += 1
        self.counts[job.lane] += 1
        self.positions += total
        job.running = True
        job.admitted_share_s = self.counters.share_s
        job.end = self._progress[job.lane] + job.todo_tokens + late_tokens
        heapq.heappush(self._ends[job.lane], (job.end, job.request_id, job))
        if not job.reserved:
            self._admitted.append(job)

    def _leave(self, job: RunningStart) -> None:
        job.running = False
        job.device_s += self.counters.share_s - job.admitted_share_s
        self.counts[job.lane] -= 1
        done = job.todo_tokens - (job.end - self._progress[job.lane])  # negative during the copy
        self.positions -= job.prompt_tokens + job.generated_tokens + done
        if not self.num_running:
            self.positions = 0.0
        self._prompts[job.group_id] -= 1
        if not self._prompts[job.group_id]:
            del self._prompts[job.group_id]
        if not job.reserved:
            self._admitted.remove(job)

    def _preempt(self) -> None:
        """Preempt the most recently admitted job, and put it first in the queue."""
        job = self._admitted[-1]
        left = job.end - self._progress[job.lane]
        self._leave(job)
        done = max(0, min(job.todo_tokens - 1, int(job.todo_tokens - left)))
        job.generated_tokens += done
        job.todo_tokens -= done
        job.kv = Kv.PREFILL
        self.counters.preemptions += 1
        self._queue.appendleft(job)
