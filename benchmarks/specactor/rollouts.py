"""Rollouts of all requests at once, on a virtual clock: coupled, or with a drafting worker."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from benchmarks import environment, workloads
from benchmarks.specactor.prices import (
    DEVICES,
    FAN_OUT,
    FREE_RUNNING,
    WORKERS,
    draft_seconds,
    step_price,
    verify_price,
    verify_seconds,
)
from benchmarks.specactor.virtual_time import PricedDrafting, PricedEngine, PricedLink, VirtualTime
from models import hf
from models.config import ModelConfig
from models.transformer import Params
from rl.engine.config import EngineConfig
from rl.engine.rollout_spec import RolloutSpec, draft_with
from rl.engine.stats import EngineStats, RoundRecord
from rl.trajectory import Request, Trajectory
from sched.policies.specactor import prob_of
from spec.buckets import bucket
from spec.budget.budget import FixedBudget
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from spec.decoupled.drafter import DecoupledDrafter, OnePlan
from spec.decoupled.messages import DraftPlan
from spec.draft_model.config import ChainConfig
from spec.draft_model.drafter import AheadDraftModel, DraftModelDrafter, EnumeratingDraftModel
from spec.sampling import step_key

POLICY, DRAFT_MODEL = workloads.BASE_POLICY, environment.ROOT / "policies" / "tiny_draft"
SECOND_CHOICES = 2  # draft tokens that a round may verify beside a window
PATIENCE = 0.1  # of a round, beside what a block is expected to be late by


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """A policy and its draft model."""

    policy: ModelConfig
    params: Params
    draft: ModelConfig
    draft_params: Params


def load_models() -> Models:
    return Models(*hf.load_pretrained(POLICY), *hf.load_pretrained(DRAFT_MODEL))


def requests_of(count: int, max_new_tokens: int) -> tuple[Request, ...]:
    """Return so many requests, of different prompts as far as there are any."""
    rows = workloads.questions(count)
    return workloads.group_requests(rows, math.ceil(count / len(rows)))[:count]


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """A rollout: its responses, projected seconds, and each verifying worker's counts."""

    responses: dict[int, Trajectory]
    seconds: float
    stats: Sequence[EngineStats]
    drafting_busy: float = 0.0
    drafted_rounds: Sequence[int] = ()
    stale: int = 0

    @property
    def _requests_rounds(self) -> int:
        return sum(int(r.rounds_A.sum()) for s in self.stats for r in s.timeline)

    @property
    def p(self) -> float:
        """Return accepted draft tokens by those and the rounds of requests."""
        accepted = sum(s.accepted_tokens for s in self.stats)
        return accepted / max(accepted + self._requests_rounds, 1)

    def draft_p(self, window: int) -> float:
        """Return the probability of a draft token that gives the tokens of a round seen here."""
        tokens = sum(s.tokens for s in self.stats) / max(self._requests_rounds, 1)
        return prob_of(min(max(tokens, 1.0), window + 1.0), window)

    @property
    def hits(self) -> float:
        """Return the share of requests' rounds that had a draft."""
        return sum(self.drafted_rounds) / max(self._requests_rounds, 1)


class Bench:
    """One policy and draft model; its rollouts share compiled programs."""

    def __init__(self, models: Models, max_new_tokens: int, draw: str) -> None:
        self.models = models
        self.sampling = SamplingConfig(max_new_tokens=max_new_tokens, draw=draw)  # type: ignore[arg-type]
        self.longest_tokens = 128 + max_new_tokens
        self.key = step_key(0, 0)

    def engine(self, slots: int, time: VirtualTime, price: Any) -> PricedEngine:
        size = {"slots": slots, "min_slots": slots, "min_positions": self.longest_tokens}
        config = EngineConfig(**size, rounds_per_fetch=1, max_nodes=16, max_round_nodes=16 * slots)
        engine = PricedEngine(self.models.policy, config)
        engine.expect(slots, self.longest_tokens)
        engine.set_prices(time, price)
        return engine

    def drafter(self, kind: Any, runner: PricedEngine, window: int) -> Any:
        chain = ChainConfig(max_draft_tokens=window, chunk_tokens=64)
        options = {"runner": runner, "sampling": self.sampling, "key": self.key}
        models = self.models
        given = models.draft, models.draft_params, chain
        return kind(*given, **options, proposal="shared_noise")

    def coupled(self, requests: Sequence[Request], window: int) -> Played:
        """Play workers with a draft model each; without one where the window is 0."""

        def drafter_of(engine: PricedEngine) -> DraftModelDrafter | None:
            return self.drafter(DraftModelDrafter, engine, window) if window else None

        time = VirtualTime()

        def price(record: RoundRecord, drafted: int) -> float:
            live = len(record.request_ids_A)
            drafting_s = window * draft_seconds(live, DEVICES) if drafted else 0.0
            return verify_price(record, drafted) + drafting_s

        shares = _shares(requests, WORKERS)
        engines = [self.engine(bucket(len(share), 1), time, price) for share in shares]
        return self._play(time, engines, shares, [drafter_of(e) for e in engines], window)

    def ahead_of(self, requests: Sequence[Request], window: int, way: str) -> Played:
        """Play verifying workers that a draft model on one worker drafts for: some devices each.

        A round waits for blocks as long as these are expected to be late.
        """
        step_s = step_price(way, DEVICES / min(len(requests), WORKERS - 1))
        time, shares = VirtualTime(), _shares(requests, WORKERS - 1)
        engines = [self.engine(bucket(len(share), 1), time, verify_price) for share in shares]
        each = len(requests) / len(engines)
        late_s = step_s(math.ceil(each), window) - verify_seconds(each, window + 1)
        patience_s = max(0.0, late_s) + PATIENCE * verify_seconds(each, 1)
        plans, workers, drafters = OnePlan(DraftPlan(window), patience_s), [], []
        for share in shares:
            home = self.drafting_engine(len(share), window, time)
            workers.append(PricedDrafting(self.ahead(way, home, window), step_s, time))
            drafters.append(DecoupledDrafter([PricedLink(workers[-1])], plans, self.sampling))
        played = self._play(time, engines, shares, drafters, window)
        return dataclasses.replace(
            played,
            drafting_busy=sum(w.busy_s for w in workers) / (played.seconds * len(workers)),
            stale=sum(drafter.received.stale for drafter in drafters),
            drafted_rounds=[drafter.drafted for drafter in drafters],
        )

    def drafting_engine(self, num_requests: int, window: int, time: VirtualTime) -> PricedEngine:
        home = self.engine(bucket(num_requests, 1), time, verify_price)
        home.expect(1, self.longest_tokens + 2 * window)
        return home

    def ahead(self, way: str, home: PricedEngine, window: int) -> DraftingAhead:
        size = home.config.slots, home.longest_tokens
        if way == FREE_RUNNING:
            return FreeRunning(self.drafter(AheadDraftModel, home, window), *size)
        drafter = self.drafter(EnumeratingDraftModel, home, window)
        return Enumerating(drafter, *size, max_window=window, fan_out=FAN_OUT)

    def _play(
        self,
        time: VirtualTime,
        engines: Sequence[PricedEngine],
        shares: Sequence[Sequence[Request]],
        drafters: Sequence[Any],
        window: int,
    ) -> Played:
        done: dict[int, Trajectory] = {}

        def job(i: int) -> None:
            drafts = draft_with(drafters[i], FixedBudget(window + SECOND_CHOICES if window else 0))
            stops = self.models.policy.eos_token_ids
            spec = RolloutSpec(self.models.params, self.sampling, self.key, stops, drafts=drafts)
            done.update({t.request_id: t for t in engines[i].run(spec, shares[i])})

        jobs = [lambda i=i: job(i) for i in range(len(engines))]
        return Played(done, time.run(jobs), [e.stats for e in engines])


def _shares(requests: Sequence[Request], count: int) -> list[Sequence[Request]]:
    """Return the requests of each of so many workers, of those that have some."""
    return [share for i in range(count) if (share := requests[i::count])]
