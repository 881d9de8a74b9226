"""Whole rollouts under a scheduler, coordinator and workers like a run's, on a virtual clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.specactor.prices import (
    DEVICES,
    ENUMERATION,
    WORKERS,
    PricedCosts,
    draft_seconds,
    entry_price,
    step_price,
    verify_price,
)
from benchmarks.specactor.rollouts import Bench
from benchmarks.specactor.virtual_time import (
    PricedDrafting,
    PricedLink,
    VirtualGroup,
    VirtualTime,
)
from rl.drafting.config import DraftingConfig
from rl.drafting.plans import FIRST_WINDOW, MeasuredSeconds, Planner
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.trajectory import Request, Trajectory
from rl.workers.worker_source import WorkerLimits
from sched.policies.divided import make_scheduler
from sched.policies.fastest_of_n import FastestOfN
from sched.protocol import Copy, Finished, Scheduler
from sched.request import copy_of
from spec.buckets import bucket
from spec.budget.budget import Budget, FixedBudget
from spec.decoupled.copies import CopiesDrafter, Progress
from spec.decoupled.drafter import DecoupledDrafter
from spec.draft_model.drafter import DraftModelDrafter
from spec.drafter import Drafter, Drafts, LiveSlots
from spec.retrieval.ngram import NgramDrafter
from spec.round_times import RoundTimes

MOST_WINDOW, COUPLED_WINDOW = 8, 4
HELPED = ("model", "own")  # methods of the copies


@dataclasses.dataclass(frozen=True)
class TailPlan:
    """A way to answer a rollout with drafting workers: what is done about its last requests."""

    window: int
    reconfigure_tokens: int = 0
    requests_per_helper: int = 0


class Rollout:
    """A rollout under a scheduler, coordinator and workers like a run's, on a virtual clock."""

    def __init__(self, bench: Bench, requests: Sequence[Request], plan: TailPlan) -> None:
        self._bench, self._requests, self._plan = bench, requests, plan
        self._verifying = WORKERS - 1
        self._time = VirtualTime(self._verifying)
        each = math.ceil(len(requests) / self._verifying)
        self._slots = bucket(each, 1)
        config = DraftingConfig(
            1, window=plan.window or None, reconfigure_tokens=plan.reconfigure_tokens
        )
        self._planner = Planner(config, WORKERS, len(requests), MOST_WINDOW)
        self._planner.drafting_workers = 1
        devices = DEVICES / self._verifying
        self._step_s = step_price(ENUMERATION, devices)
        self._planner.seconds = _PricedSeconds(self._step_s)
        self._progress = Progress()
        self.ended_s: list[float] = []
        self.num_copies = self.num_won = 0

    def play(self) -> dict[int, Trajectory]:
        """Return the responses; when each ended is in `ended_s`."""
        bench, time, plan = self._bench, self._time, self._plan
        engines = []
        for i in range(self._verifying):
            engine = bench.engine(self._slots, time, verify_price)
            engine.number = i
            engines.append(engine)
        scheduler: Scheduler = make_scheduler("group_fifo", seed=0, chunk_tokens=512)
        if plan.requests_per_helper:
            most = plan.requests_per_helper
            scheduler = FastestOfN(scheduler, num_methods=len(HELPED), max_copies=most)
        longest = bench.longest_tokens
        size = self._slots * longest, self._slots, longest, 2**30, 1e9
        limits = WorkerLimits(*size, keeps_decisions=True)
        group = VirtualGroup(list(engines), scheduler, limits, time)
        for engine in engines:
            heard = partial(self._heard, group)
            engine.set_prices(time, verify_price, entry_price, heard)
        stops, done = bench.models.policy.eos_token_ids, dict[int, Trajectory]()
        spec = RolloutSpec(
            bench.models.params, bench.sampling, bench.key, stops, drafts=self._drafts
        )
        with group:
            group.submit(0, spec, self._requests)
            while len(done) < len(self._requests):
                result = group.next_result(600.0)
                assert isinstance(result, Trajectory), result
                done[result.request_id] = result
                self.ended_s.append(time.now_s)
        self._count(group)
        return done

    def _count(self, group: VirtualGroup) -> None:
        """Count the copies that were begun, and those that ended first."""
        for decision in group.decisions:
            self.num_copies += sum(isinstance(action, Copy) for action in decision.actions)
            event = decision.event
            self.num_won += isinstance(event, Finished) and copy_of(event.request_id)[1] > 0

    def _heard(self, group: VirtualGroup) -> None:
        group.coordinator.profiled(self._planner.observed.acceptance())

    def _drafts(self, context: DrafterContext) -> tuple[Drafter, Budget]:
        bench, runner, time = self._bench, context.runner, self._time
        home = bench.engine(self._slots, time, verify_price)
        home.expect(1, bench.longest_tokens + 2 * MOST_WINDOW)
        ahead = bench.ahead(ENUMERATION, home, MOST_WINDOW)
        worker = PricedDrafting(ahead, self._step_s, time)
        usual = DecoupledDrafter([PricedLink(worker)], self._planner.plans(), bench.sampling)
        own = bench.drafter(DraftModelDrafter, runner, MOST_WINDOW)
        methods = [PricedDrafter(own, time), NgramDrafter()]
        copies = CopiesDrafter(usual, methods, copy_of, self._progress)
        return copies, FixedBudget(MOST_WINDOW)


class _PricedSeconds(MeasuredSeconds):
    """The seconds that a run would have measured."""

    def __init__(self, step_s: Callable[[int, int], float]) -> None:
        super().__init__(PricedCosts(), RoundTimes({}), 0.0)
        object.__setattr__(self, "_step_s", step_s)

    def draft(self, requests: float) -> float:
        return self._step_s(math.ceil(requests), FIRST_WINDOW) / FIRST_WINDOW


class PricedDrafter(Drafter):
    """A draft model on the devices of the worker that verifies: its drafts take their price."""

    def __init__(self, drafter: Drafter, time: VirtualTime) -> None:
        self._drafter, self._time = drafter, time

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        depth = min(int(max_nodes_A.max(initial=0)), COUPLED_WINDOW)
        self._time.sleep(depth * draft_seconds(len(live), DEVICES))
        return self._drafter.propose(live, np.minimum(max_nodes_A, depth), max_nodes)

    def finished(self, live: LiveSlots) -> None:
        self._drafter.finished(live)
