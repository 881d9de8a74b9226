"""Several workers under one scheduler, which decides where and when each request runs.

Tokens do not depend on the scheduler, since the tokens of a request are a function of its seed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from reprise.rl.engine.engine import Engine, OnFinish, OnRound, in_thread
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Request, Trajectory, check_finite, longest_tokens
from reprise.rl.runtime.waits import HANG_LIMIT_S, POLL_S
from reprise.rl.sessions.session import Session
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.messages import Result, WorkerLimits
from reprise.rl.workers.pool import IdleWork, Place, ThreadPlace
from reprise.rl.workers.schedulers import make_scheduler
from reprise.sched.policies.divided import PreferPool
from reprise.sched.policies.fastest_of_n import FastestOfN, Worth
from reprise.sched.protocol import Scheduler
from reprise.sched.simulator.roofline import Costs

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Helpers:
    """Settings for idle workers that rerun the last requests (`sched.policies.fastest_of_n`).

    `acceptance` returns the acceptance of draft tokens by request.
    """

    num_methods: int
    requests_each: int
    worth: Worth
    acceptance: Callable[[], Mapping[int, float]]


class MultiEngine:
    """The workers of a run; each rollout runs under a new scheduler with this `seed`.

    `engines` belong to workers in this process. Workers in other programs have `places`, which may
    be empty; the first engine then has their shapes.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SchedConfig,
        *,
        places: Sequence[Place] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        prefer_pool: PreferPool = lambda tokens: True,
        spot: IdleWork | None = None,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        self.engines: list[Engine] = list(engines)
        self.places = list(places or ())
        self._in_threads = places is None
        self.config = config
        self._seed = seed
        self.spot = spot  # training for idle workers
        self.prefer_pool = prefer_pool  # True to copy a number of tokens rather than recompute
        self.costs: Costs | None = None  # of a worker, if `config.measures_rounds`
        self.helpers: Helpers | None = None  # rerun requests on idle workers
        self._clock = clock
        self._hang_limit_s = hang_limit_s
        self.stats = EngineStats()

    @property
    def dtype(self) -> np.dtype:
        return self.engines[0].dtype

    def do(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread without the trainer mesh, and return its result."""
        return in_thread(work)

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.run`. Raises WorkerError if a worker raised or hangs for good.

        Idle workers train only during rollouts with a sink, which the run learns from.
        """
        self.check(spec, requests)
        max_tokens = longest_tokens(requests, spec.sampling)
        spot = None if spec.sink is None else self.spot
        session = self.session(self.make_scheduler(), len(requests), max_tokens, spot=spot)
        try:
            with session:
                session.submit(0, spec, requests)
                return collected(
                    requests,
                    partial(session.next_result, POLL_S),
                    partial(session.num_tokens, 0),
                    on_finish,
                    on_round,
                )
        finally:
            self.stats = session.stats(0)
            self.stats.events = session.new_events()
            self.stats.pool = session.new_pool_counts()

    def check(self, spec: RolloutSpec, requests: Sequence[Request]) -> None:
        """Raise ValueError for requests that cannot run, before any worker receives them."""
        self.engines[0].check(requests, spec.sampling)
        spec.endings(requests)

    def make_scheduler(self) -> Scheduler:
        """Return a new scheduler of the configured policy, for one rollout."""
        scheduler = make_scheduler(
            self.config.policy,
            seed=self._seed,
            chunk_tokens=self.config.chunk_tokens,
            prefer_pool=self.prefer_pool,
        )
        helpers = self.helpers
        if helpers is None:
            return scheduler
        return FastestOfN(
            scheduler,
            num_methods=helpers.num_methods,
            max_copies=helpers.requests_each,
            worth=helpers.worth,
        )

    def session(
        self,
        scheduler: Scheduler,
        max_requests: int,
        max_tokens: int,
        *,
        spot: IdleWork | None = None,
        deliver: Callable[[Result], None] | None = None,
        has_steps_apart: bool = False,
    ) -> Session:
        """Return a session of the workers, for rollouts of up to `max_requests` requests."""
        config = self.config
        first = self.engines[0]
        slots = min(first.config.max_slots, max_requests)
        if config.kv_tokens is not None and config.kv_tokens < max_tokens:
            raise ValueError(
                f"a request may come to {max_tokens} positions, prompt and response, and a "
                f"worker holds Sched.kv_tokens={config.kv_tokens}: raise it, or leave it out"
            )
        held = slots * max_tokens
        if first.config.pages:  # a paged cache may hold less
            held = first.kv_tokens(slots, max_tokens)
        limit_s = self._hang_limit_s
        if self._in_threads:
            numbers = range(len(self.engines))
            self.places = [ThreadPlace(self.engines, i, limit_s) for i in numbers]
        return Session(
            self.places,
            scheduler,
            WorkerLimits(config.kv_tokens or held, slots, max_tokens, has_steps_apart),
            clock=self._clock,
            hang_limit_s=limit_s,
            deliver=deliver,
            pool_bytes=config.pool_bytes,
            can_restart=config.on_error == "restart",
            idle_work=spot,
            acceptance=None if self.helpers is None else self.helpers.acceptance,
        )


def collected(
    requests: Sequence[Request],
    next_result: Callable[[], object],
    num_tokens: Callable[[], int],
    on_finish: OnFinish | None,
    on_round: OnRound | None,
) -> list[Trajectory]:
    """Wait for the responses of one step, and return them in the order of `requests`."""
    done: dict[int, Trajectory] = {}
    while len(done) < len(requests):
        result = next_result()
        if result is not None:
            assert isinstance(result, Trajectory), "a rollout has no other step"
            check_finite(result)
            done[result.request_id] = result
            if on_finish is not None:
                on_finish(result)
        if on_round is not None:
            on_round(len(done), num_tokens())
    return [done[r.request_id] for r in requests]
