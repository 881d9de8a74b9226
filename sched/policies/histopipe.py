"""HistoPipe: consecutive steps in opposite orders, without a barrier between steps.

Source: RhymeRL, section 6. Prompts are ranked by the median length of their responses in the last
epoch, and cut into ranking groups of equal size (the first tier). Steps 0, 2, … give the groups to
the workers shortest first, steps 1, 3, … longest first. A worker starts the next step as soon as it
has finished its share and the weights are available: rollouts of step s need the update of step
s − 2.

The second tier (section 6.4) sets the number of workers of each group, if seconds are known:

    target time of group n:  t(n) = t0 + d·n,   with the smallest d that the workers allow

Times then grow evenly, so that two steps in opposite orders leave no gaps. Equal parts remain if
they are predicted to be faster: gaps remain if a group has enough workers that some serve it in
both orders.

A response beyond β times the longest prompt median in its group is moved: from a short group to a
worker of a longer group of the same step, from a long group into the next step. Requests that are
added to a planned step run on the least loaded workers and stay there.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from reprise.sched.ledger import Ledger
from reprise.sched.protocol import (
    OF_NO_WORKER,
    REPORTS,
    Action,
    ChunkDone,
    Defer,
    Event,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import RequestState

# τ: (mean length, requests of a worker) → seconds until all these requests are answered
Tau = Callable[[float, float], float]
RoundSeconds = Callable[[float, float, float], float]  # (requests, positions, nodes of each)
PRECISION_S = 1.0
PRECISION = 0.01  # of d: as in the paper, and as a share of the longest time


# --- tiers ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pace:
    """The nodes of a request in a speculative round, and the tokens that the round yields."""

    nodes: float = 1.0
    tokens: float = 1.0


def tau_of(round_seconds: RoundSeconds, kv_tokens: float, prompt_tokens: float, pace: Pace) -> Tau:
    """Return τ for `round_seconds`, with half-full caches, and turns if memory is short."""

    def tau(length: float, requests: float) -> float:
        held = prompt_tokens + length / 2
        running = min(requests, kv_tokens / held)
        rounds = length / pace.tokens * requests / running
        return rounds * round_seconds(running, running * held, pace.nodes)

    return tau


def allocate(
    lengths: Sequence[float],
    sizes: Sequence[int],
    num_workers: int,
    tau: Tau,
    *,
    train_s: float = 0.0,
    precision_s: float = PRECISION_S,
) -> list[int]:
    """Return the workers of each ranking group, by binary search over d (figure 12 of the paper).

    `lengths` are the mean lengths of the groups, shortest first; `sizes` are their numbers of
    requests. t0 is the time of the shortest group with one worker (the figure has the most workers,
    against its text), and at least `train_s`, so that no group finishes before the weights of the
    next step. Spare workers go to the longest groups. Raises ValueError if there are fewer workers
    than groups.
    """
    N = len(lengths)
    if num_workers < N:
        raise ValueError(
            f"expected at least 1 of the workers for each of {N} ranking groups, got "
            f"{num_workers} workers; fix: fewer ranking groups"
        )
    max_workers = num_workers - (N - 1)
    t0 = max(tau(lengths[0], sizes[0]), train_s)

    def affordable(d: float) -> list[int] | None:
        """Return the minimum workers that meet every target, or None if there are too few."""
        plan = []
        for n, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            target_s = t0 + n * d
            counts = range(1, max_workers + 1)
            workers = next((k for k in counts if tau(length, size / k) <= target_s), None)
            if workers is None:
                return None
            plan.append(workers)
        return plan if sum(plan) <= num_workers else None

    longest_s = tau(lengths[-1], sizes[-1])
    low = 0.0
    high = max(longest_s - t0, 0.0) / max(N - 1, 1)
    precision_s = min(precision_s, PRECISION * longest_s)
    while (plan := affordable(high)) is None:  # groups in the middle may need a larger d
        low = high
        high = 2 * high + precision_s
    while high - low > precision_s:
        middle = (low + high) / 2
        if (cheaper := affordable(middle)) is None:
            low = middle
        else:
            plan = cheaper
            high = middle
    for i in range(num_workers - sum(plan)):
        plan[N - 1 - i % N] += 1
    return plan


def two_tiers(
    lengths: Sequence[float],
    sizes: Sequence[int],
    num_workers: int,
    tau: Tau,
    *,
    train_s: float = 0.0,
) -> list[int]:
    """Return the plan of `allocate`, unless equal parts finish two opposite steps no later."""
    even = evenly(len(lengths), num_workers)
    plan = allocate(lengths, sizes, num_workers, tau, train_s=train_s)
    times = [seconds_of_two_steps(lengths, sizes, p, tau) for p in (plan, even)]
    return plan if times[0] < times[1] else even


def seconds_of_two_steps(
    lengths: Sequence[float], sizes: Sequence[int], plan: Sequence[int], tau: Tau
) -> float:
    """Return the seconds until the last worker finishes two steps in opposite orders."""
    times = [
        tau(length, size / workers)
        for length, size, workers in zip(lengths, sizes, plan, strict=True)
        for _ in range(workers)
    ]
    return max(map(sum, zip(times, reversed(times), strict=True)))


def evenly(num_groups: int, num_workers: int) -> list[int]:
    """Return the first-tier allocation, equal parts with the remainder to the first groups."""
    whole, rest = divmod(num_workers, num_groups)
    if not whole:
        raise ValueError(f"expected a worker for each of {num_groups} ranking groups")
    return [whole + (i < rest) for i in range(num_groups)]


def ranking_groups(keys: Sequence[float], num_groups: int) -> list[list[int]]:
    """Return the indices of `keys` in `num_groups` parts of equal size, lowest keys first."""
    order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
    edges = [math.ceil(len(order) * n / num_groups) for n in range(num_groups + 1)]
    return [order[a:b] for a, b in itertools.pairwise(edges)]


# --- the scheduler ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HistoPipeConfig:
    """The settings of HistoPipe.

    `last_share` is α: only this share of a group, the last requests to finish, is moved. β is the
    quantile `growth_quantile` of the growth of responses since the previous epoch, over the last
    `epoch_prompts`, and at least `least_growth`. A request that is too long but not among the last
    is checked again after every `check_tokens`. `tau` returns τ for the next step (the second
    tier); without `tau`, groups get equal numbers of workers. `train_s` is the time of an update
    until an update is measured.
    """

    num_steps: int
    num_ranking_groups: int = 8
    last_share: float = 0.1
    growth_quantile: float = 0.75
    least_growth: float = 1.1
    epoch_prompts: int = 8192
    check_tokens: int = 512
    tau: Callable[[], Tau] | None = None
    train_s: float = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class _Share:
    """A ranking group of one step; `waiting` holds the unstarted requests by worker."""

    step: int
    index: int
    num_groups: int
    outlier_tokens: float  # β · the longest median of its prompts; longer responses are outliers
    waiting: dict[int, list[RequestState]]
    size: int = 0
    num_unfinished: int = 0


_Loads = list[tuple[int, int, int, _Share]]  # a heap: (requests, worker, place of group, group)


class HistoPipe:
    """The scheduler; steps must be submitted in order, each with all its requests in one event.

    Later submissions for the latest step add requests to that step. A request that finishes or is
    checked takes O(1). A move, an update, and a worker that joins or is lost take O(workers); each
    request of a lost worker takes O(log workers) more.
    """

    def __init__(self, config: HistoPipeConfig) -> None:
        self._config = config
        self._train_s = config.train_s
        self._ledger = Ledger()
        self._steps: dict[int, list[_Share]] = {}  # unfinished at the latest submission
        self._num_steps = 0  # submitted so far
        self._at: dict[int, int] = {}  # worker → its current step
        self._left: dict[int, int] = {}  # worker → its started, unfinished requests
        self._trained = -1  # the latest step with available weights
        self._share_of: dict[int, _Share] = {}  # request → its ranking group
        self._deferred: list[RequestState] = []  # waiting for a step not yet submitted
        self._unassigned: list[RequestState] = []  # waiting because no worker is left
        self._moved: set[int] = set()  # unfinished, and moved or added to a planned step
        self.num_moved = 0
        self._growth: collections.deque[float] = collections.deque(maxlen=config.epoch_prompts)
        self._lengths: dict[int, list[int]] = {}  # prompt → lengths of finished responses

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(event, REPORTS):
            request = self._ledger.report(event)
            if request is None:
                return []
            if type(event) is ChunkDone:
                actions = self._too_long(request)
            else:
                self._finished(request, event.worker_id)
            return actions + self._begin_steps(event)
        waiting = self._ledger.apply(event)
        if isinstance(event, Submitted) and event.step == self._num_steps - 1:
            actions += self._further(waiting)
        elif isinstance(event, Submitted):
            self._forget_steps()
            self._plan(event, waiting)
            deferred = self._deferred
            self._deferred = []
            actions += [a for r in deferred for a in self._into_next_step(r)]
        elif isinstance(event, Trained):
            self._trained = max(self._trained, event.step)
            self._train_s = self._train_s if event.train_s is None else event.train_s
        elif isinstance(event, WorkerJoined):
            self._at[event.worker_id] = -1
            self._left[event.worker_id] = 0
            unassigned = self._unassigned
            self._unassigned = []
            actions += self._reassign(unassigned)
        elif isinstance(event, WorkerLost):
            actions += self._lost(event.worker_id, waiting)
        return actions + self._begin_steps(event)

    def _plan(self, event: Submitted, requests: Sequence[RequestState]) -> None:
        """Rank the prompts of a step, cut them into groups, and assign the groups to workers."""
        number = self._num_steps
        workers = sorted(self._ledger.workers)
        if {event.step, *(spec.step for spec in event.requests)} != {number} or not workers:
            raise ValueError(f"expected all requests of step {number}, and workers before them")
        prompts: dict[int, list[RequestState]] = {}
        for request in requests:
            prompts.setdefault(request.group_id, []).append(request)
        by_prompt = list(prompts.values())
        past = [p[0].spec.past_tokens for p in by_prompt]
        known = bool(past) and all(past)
        keys = [statistics.median(p) if known else 0.0 for p in past]
        N = min(self._config.num_ranking_groups, len(workers), max(1, len(prompts)))
        ranked = ranking_groups(keys, N)
        plan = evenly(N, len(workers))
        if known and self._config.tau is not None:
            means = [statistics.fmean(keys[i] for i in group) for group in ranked]
            sizes = [sum(len(by_prompt[i]) for i in group) for group in ranked]
            plan = two_tiers(means, sizes, len(workers), self._config.tau(), train_s=self._train_s)
        if number % 2:
            workers.reverse()  # the longest groups go to workers that had the shortest groups
        self._steps[number] = []
        self._num_steps = number + 1
        beta = self._beta()
        for index, members in enumerate(ranked):
            mine = workers[: plan[index]]
            workers = workers[plan[index] :]
            max_key = max(keys[i] for i in members) if known else math.inf
            share = _Share(number, index, N, beta * max_key, {w: [] for w in mine})
            self._steps[number].append(share)
            for k, i in enumerate(members):
                share.waiting[mine[k % len(mine)]] += by_prompt[i]
                for request in by_prompt[i]:
                    self._enter(request, share)

    def _further(self, requests: Sequence[RequestState]) -> list[Action]:
        """Give requests added to a planned step to the least loaded workers."""
        for request in requests:
            self._share_of[request.request_id] = self._steps[self._num_steps - 1][-1]
            self._moved.add(request.request_id)  # the request never moves again
        return self._reassign(requests)

    def _enter(self, request: RequestState, share: _Share) -> None:
        self._share_of[request.request_id] = share
        share.size += 1
        share.num_unfinished += 1

    def _beta(self) -> float:
        config = self._config
        ordered = sorted(self._growth) or [0.0]
        quantile = ordered[int(config.growth_quantile * (len(ordered) - 1))]
        return max(quantile, config.least_growth)

    def _finished(self, request: RequestState, worker_id: int) -> None:
        request_id = request.request_id
        group_id = request.group_id
        self._left[worker_id] -= 1
        self._share_of.pop(request_id).num_unfinished -= 1
        self._moved.discard(request_id)
        self._lengths.setdefault(group_id, []).append(request.generated_tokens)
        if not self._ledger.groups[group_id].num_unfinished:
            lengths = self._lengths.pop(group_id)
            past = request.spec.past_tokens
            if past:
                self._growth.append(statistics.median(lengths) / statistics.median(past))

    def _too_long(self, request: RequestState) -> list[Action]:
        """Move a request that has outgrown its group, if it is among the last of the group."""
        share = self._share_of[request.request_id]
        assert request.worker_id is not None
        if share.num_unfinished > math.ceil(self._config.last_share * share.size):
            return [self._start(request, request.worker_id, self._config.check_tokens)]
        same_step = share.index < share.num_groups / 2
        longer = [s for s in self._steps[share.step][share.index + 1 :] if s.waiting]
        can_move = bool(longer) if same_step else share.step + 1 < self._config.num_steps
        if not can_move:
            return [self._start(request, request.worker_id)]
        self._moved.add(request.request_id)
        self.num_moved += 1
        self._left[request.worker_id] -= 1
        share.num_unfinished -= 1
        request.pooled = False  # the paper recomputes keys and values, too
        if same_step:
            return self._assign(request, [min(self._loads(longer))])
        return [Defer(request.request_id), *self._into_next_step(request)]

    def _into_next_step(self, request: RequestState) -> list[Action]:
        step = self._share_of[request.request_id].step + 1
        if step == self._num_steps:
            self._deferred.append(request)
            return []
        self._share_of[request.request_id] = self._steps[step][-1]
        last = [share for share in self._steps[step] if share.waiting][-1:]
        if not last:
            return self._reassign([request])
        return self._assign(request, [min(self._loads(last))])

    def _loads(self, shares: Sequence[_Share]) -> _Loads:
        left = self._left
        return [
            (left[worker_id] + len(waiting), worker_id, i, share)
            for i, share in enumerate(shares)
            for worker_id, waiting in share.waiting.items()
        ]

    def _assign(self, request: RequestState, loads: _Loads) -> list[Action]:
        """Give a request to the least loaded worker, and start it if the worker runs that step.

        `loads` may be outdated by requests that these workers got since.
        """
        if not loads:
            self._unassigned.append(request)
            return []
        while True:
            before, worker_id, index, share = loads[0]
            load = self._left[worker_id] + len(share.waiting[worker_id])
            if load == before:
                break
            heapq.heapreplace(loads, (load, worker_id, index, share))
        self._enter(request, share)
        if self._at[worker_id] < share.step:
            share.waiting[worker_id].append(request)
            return []
        self._left[worker_id] += 1
        return [self._start(request, worker_id)]

    def _lost(self, worker_id: int, running: Sequence[RequestState]) -> list[Action]:
        """Give the requests of a lost worker to other workers of the same step."""
        del self._at[worker_id], self._left[worker_id]
        lost = list(running)
        for share in (s for step in self._steps.values() for s in step):
            lost += share.waiting.pop(worker_id, [])
        for request in lost:
            share = self._share_of[request.request_id]
            share.size = share.size - 1
            share.num_unfinished = share.num_unfinished - 1
        return self._reassign(lost)

    def _reassign(self, requests: Iterable[RequestState]) -> list[Action]:
        actions: list[Action] = []
        loads: dict[int, _Loads] = {}  # by step
        for request in requests:
            step = self._share_of[request.request_id].step
            if step not in loads:
                shares = [s for s in self._steps[step] if s.waiting]
                if not shares and self._at:
                    self._steps[step][-1].waiting.update({w: [] for w in self._at})
                    shares = self._steps[step][-1:]
                loads[step] = self._loads(shares)
                heapq.heapify(loads[step])
            actions += self._assign(request, loads[step])
        return actions

    def _begin_steps(self, event: Event) -> list[Action]:
        """Start the next step on workers that have finished a step, if the next step may run.

        Only the worker of the event can have finished a step, unless the event opens a step to all.
        """
        actions: list[Action] = []
        workers = self._at if isinstance(event, OF_NO_WORKER) else (event.worker_id,)
        for worker_id in workers:
            while self._left.get(worker_id) == 0:  # a lost worker has no entry
                step = self._at[worker_id] + 1
                if step >= self._num_steps or step - 2 > self._trained:
                    break
                self._at[worker_id] = step
                for share in self._steps.get(step, ()):
                    if waiting := share.waiting.get(worker_id):
                        actions += self._begin(waiting, worker_id, share)
                        waiting.clear()
        return actions

    def _forget_steps(self) -> None:
        """Drop finished steps that all workers have passed."""
        started = min(self._at.values(), default=-1)
        for step, shares in list(self._steps.items()):
            if step < started and not any(share.num_unfinished for share in shares):
                del self._steps[step]

    def _begin(
        self, requests: Sequence[RequestState], worker_id: int, share: _Share
    ) -> Iterator[Action]:
        """Start requests of a group on a worker, up to the outlier length unless moved."""
        self._left[worker_id] += len(requests)
        for request in requests:
            if request.request_id in self._moved:
                yield self._start(request, worker_id)
            else:
                outlier = math.ceil(min(share.outlier_tokens, request.spec.max_new_tokens))
                tokens = max(outlier - request.generated_tokens, 1 + request.prefix_tokens)
                yield self._start(request, worker_id, tokens)

    def _start(self, request: RequestState, worker_id: int, tokens: int = 2**31) -> Action:
        worker = self._ledger.workers[worker_id]
        max_tokens = max(1, min(tokens, request.remaining_tokens))
        return self._ledger.start(request, worker, max_tokens, reserve=False)
