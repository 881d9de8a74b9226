"""HistoPipe: consecutive steps in opposite orders, without a barrier between them.

RhymeRL, section 6. Prompts are ranked by the median length of their last epoch's responses
and cut into ranking groups. Odd steps hand the groups to the workers shortest first, even
steps longest first, so that a worker with little to do in one step has much in the next.
A worker goes on to the next step by itself, once it is through with its share and the
weights are there: rollouts of step s need the update of step s − 2 (off-policyness 1).

What turns out longer than β times the longest median of its group's prompts is moved: out of
short groups to a worker of a longer group of the same step, out of long ones into the next.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from sched.ledger import Ledger
from sched.policies.histopipe_allocation import Tau, allocate, evenly, ranking_groups
from sched.protocol import (
    Action,
    ChunkDone,
    Defer,
    Event,
    Finished,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from sched.request import RequestState

LEAST_GROWTH = 1.1  # β is never below


@dataclasses.dataclass(frozen=True)
class HistoPipeConfig:
    """`last_share` is α: outliers are looked for among the last of a group.

    β is the quantile `growth_quantile` of how much responses grew over the epoch before; it is
    taken over as many prompts as an epoch has. What is too long is asked again after every
    `check_tokens`. Nothing is deferred out of the last of `num_steps`. `tau` gives the two-tier
    allocation; None deals workers out evenly.
    """

    num_steps: int
    num_ranking_groups: int = 8
    last_share: float = 0.1
    growth_quantile: float = 0.75
    epoch_prompts: int = 8192
    check_tokens: int = 512
    migrate: bool = True
    tau: Tau | None = None
    train_s: float = 0.0


@dataclasses.dataclass(eq=False)
class _Share:
    """A ranking group of one step, and what its workers have not begun, by worker."""

    step: int
    index: int
    of: int  # ranking groups
    outlier_tokens: float  # longer ones are outliers: β · the longest median of its prompts
    waiting: dict[int, list[RequestState]]
    size: int = 0
    num_unfinished: int = 0


class HistoPipe:
    """Steps must be submitted in order, each with all its requests at once."""

    def __init__(self, config: HistoPipeConfig) -> None:
        self._config = config
        self._ledger = Ledger()
        self._steps: dict[int, list[_Share]] = {}  # those that are not through
        self._num_steps = 0  # submitted so far
        self._at: dict[int, int] = {}  # worker → the step that it is at
        self._left: collections.Counter[int] = collections.Counter()  # worker → requests there
        self._trained = -1  # steps whose weights can be had
        self._share_of: dict[int, _Share] = {}  # request → its ranking group
        self._deferred: list[RequestState] = []  # whose next step is not there yet
        self._unassigned: list[RequestState] = []  # no worker is left for them
        self._moved: set[int] = set()  # of those that are not finished
        self.num_moved = 0
        self._growth: collections.deque[float] = collections.deque(maxlen=config.epoch_prompts)
        self._lengths: dict[int, list[int]] = {}  # prompt → its finished lengths

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(event, Finished | ChunkDone) and not self._ledger.is_current(event):
            return []
        waiting = self._ledger.apply(event)
        if isinstance(event, Submitted):
            self._plan(event, waiting)
            deferred, self._deferred = self._deferred, []
            actions += [a for r in deferred for a in self._into_next_step(r)]
        elif isinstance(event, Trained):
            self._trained = max(self._trained, event.step)
        elif isinstance(event, WorkerJoined):
            self._at[event.worker_id] = -1
            unassigned, self._unassigned = self._unassigned, []
            actions += self._reassign(unassigned)
        elif isinstance(event, WorkerLost):
            actions += self._lost(event.worker_id, waiting)
        elif isinstance(event, Finished):
            self._finished(event)
        else:
            for request in waiting:
                actions += self._too_long(request)
        return actions + self._go_on()

    # -- a step's plan -----------------------------------------------------------

    def _plan(self, event: Submitted, requests: Sequence[RequestState]) -> None:
        """Rank the step's prompts, cut them into groups, and deal these to the workers."""
        number = self._num_steps
        workers = sorted(self._ledger.workers)
        if {spec.step for spec in event.requests} != {number} or not workers:
            raise ValueError(f"expected all requests of step {number}, and workers before them")
        prompts: dict[int, list[RequestState]] = {}
        for request in requests:
            prompts.setdefault(request.group_id, []).append(request)
        by_prompt = list(prompts.values())
        past = [p[0].spec.past_tokens for p in by_prompt]
        known = all(past)
        keys = [statistics.median(p) if known else 0.0 for p in past]
        N = min(self._config.num_ranking_groups, len(workers), len(prompts))
        ranked = ranking_groups(keys, N)
        plan = evenly(N, len(workers))
        if known and self._config.tau is not None:
            means = [statistics.fmean(keys[i] for i in group) for group in ranked]
            plan = allocate(means, len(workers), self._config.tau, train_s=self._config.train_s)
        if number % 2:
            workers.reverse()  # longest groups to those that had the shortest
        self._steps[number], self._num_steps = [], number + 1
        for index, members in enumerate(ranked):
            mine, workers = workers[: plan[index]], workers[plan[index] :]
            longest = max(keys[i] for i in members) if known else math.inf
            share = _Share(number, index, N, self._beta() * longest, {w: [] for w in mine})
            self._steps[number].append(share)
            for place, i in enumerate(members):
                for request in by_prompt[i]:
                    self._enter(request, share)
                    share.waiting[mine[place % len(mine)]].append(request)

    def _enter(self, request: RequestState, share: _Share) -> None:
        self._share_of[request.request_id] = share
        share.size += 1
        share.num_unfinished += 1

    def _beta(self) -> float:
        if not self._growth:
            return LEAST_GROWTH
        ordered = sorted(self._growth)
        return max(ordered[int(self._config.growth_quantile * (len(ordered) - 1))], LEAST_GROWTH)

    # -- what happens ---------------------------------------------------------------

    def _finished(self, event: Finished) -> None:
        request = self._ledger.requests[event.request_id]
        self._left[event.worker_id] -= 1
        self._share_of.pop(event.request_id).num_unfinished -= 1
        self._moved.discard(event.request_id)
        group, past = request.group_id, request.spec.past_tokens
        self._lengths.setdefault(group, []).append(event.generated_tokens)
        if not self._ledger.groups[group].num_unfinished:
            lengths = self._lengths.pop(group)
            if past:
                self._growth.append(statistics.median(lengths) / statistics.median(past))

    def _too_long(self, request: RequestState) -> list[Action]:
        """A request has outgrown its group: it moves, where it is among the last there."""
        share = self._share_of[request.request_id]
        assert request.worker_id is not None
        if share.num_unfinished > math.ceil(self._config.last_share * share.size):
            return [self._start(request, request.worker_id, self._config.check_tokens)]
        same_step = share.index < share.of / 2
        nowhere = not self._longer(share) if same_step else share.step + 1 == self._config.num_steps
        if nowhere:
            return [self._start(request, request.worker_id)]
        self._moved.add(request.request_id)
        self.num_moved += 1
        self._left[request.worker_id] -= 1
        share.num_unfinished -= 1
        request.pooled = False  # the paper computes keys and values anew
        if same_step:
            return self._place(request, self._longer(share))
        return [Defer(request.request_id), *self._into_next_step(request)]

    def _longer(self, share: _Share) -> list[_Share]:
        """Longer groups of the same step."""
        return [s for s in self._steps[share.step][share.index + 1 :] if s.waiting]

    def _into_next_step(self, request: RequestState) -> list[Action]:
        step = self._share_of[request.request_id].step + 1
        if step == self._num_steps:
            self._deferred.append(request)
            return []
        self._share_of[request.request_id] = self._steps[step][-1]
        longest = [share for share in self._steps[step] if share.waiting][-1:]
        return self._place(request, longest) if longest else self._reassign([request])

    def _place(self, request: RequestState, shares: Sequence[_Share]) -> list[Action]:
        """To the worker of these groups that has least to do: at once, if it is that far."""
        options = [(self._load(w, s), w, s) for s in shares for w in s.waiting]
        if not options:
            self._unassigned.append(request)
            return []
        _, worker_id, share = min(options, key=lambda o: o[:2])
        self._enter(request, share)
        if self._at[worker_id] < share.step:
            share.waiting[worker_id].append(request)
            return []
        self._left[worker_id] += 1
        return [self._start(request, worker_id)]

    def _load(self, worker_id: int, share: _Share) -> int:
        return self._left[worker_id] + len(share.waiting[worker_id])

    # -- workers that come and go -------------------------------------------------------

    def _lost(self, worker_id: int, running: Sequence[RequestState]) -> list[Action]:
        """What it ran, and what waited for it, goes to the others of the step."""
        del self._at[worker_id], self._left[worker_id]
        lost = list(running)
        for share in (s for step in self._steps.values() for s in step):
            lost += share.waiting.pop(worker_id, [])
        for request in lost:
            share = self._share_of[request.request_id]
            share.size, share.num_unfinished = share.size - 1, share.num_unfinished - 1
        return self._reassign(lost)

    def _reassign(self, requests: Iterable[RequestState]) -> list[Action]:
        actions: list[Action] = []
        for request in requests:
            step = self._share_of[request.request_id].step
            shares = [s for s in self._steps[step] if s.waiting]
            if not shares and self._at:
                self._steps[step][-1].waiting.update({w: [] for w in self._at})
                shares = self._steps[step][-1:]
            actions += self._place(request, shares)
        return actions

    # -- workers go on ----------------------------------------------------------------

    def _go_on(self) -> list[Action]:
        """Workers that are through with a step begin the next one that they may."""
        actions: list[Action] = []
        for worker_id, at in self._at.items():
            while not self._left[worker_id] and self._may_begin(at + 1):
                at += 1
                for share in self._steps.get(at, ()):
                    waiting = share.waiting.get(worker_id, [])
                    actions += [self._begin(request, worker_id, share) for request in waiting]
                    waiting.clear()
            self._at[worker_id] = at
        self._forget_steps()
        return actions

    def _forget_steps(self) -> None:
        """Steps that are through, and whose requests no worker will ask for any more."""
        begun = min(self._at.values(), default=-1)
        for step in [s for s in self._steps if s < begun]:
            if not any(share.num_unfinished for share in self._steps[step]):
                del self._steps[step]

    def _may_begin(self, step: int) -> bool:
        return step < self._num_steps and step - 2 <= self._trained

    def _begin(self, request: RequestState, worker_id: int, share: _Share) -> Action:
        self._left[worker_id] += 1
        if not self._config.migrate or request.request_id in self._moved:
            return self._start(request, worker_id)
        outlier = min(share.outlier_tokens, request.spec.max_new_tokens)
        tokens = math.ceil(outlier) - request.generated_tokens
        return self._start(request, worker_id, max(tokens, 1 + request.prefix_tokens))

    def _start(self, request: RequestState, worker_id: int, tokens: int = 2**31) -> Action:
        worker = self._ledger.workers[worker_id]
        most = max(1, min(tokens, request.remaining_tokens))
        return self._ledger.start(request, worker, most, reserve=False)
