"""Several engines that generate a step, and start the next step on idle workers.

    run(step s)    → session, place p     ← weights v(s − 1), noise of s
    plan(step s+1) → session, place p + 1 ← the same weights, noise of s + 1; only on idle workers
    recall()       → the early tokens of s + 1, which its requests start from

The engine verifies early tokens as a chain of draft tokens, so they do not change responses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from reprise.rl.engine.engine import OnFinish, OnRound
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.records.worker_record import WorkerPart
from reprise.rl.runtime.waits import POLL_S
from reprise.rl.sessions.multi_engine import MultiEngine, collected
from reprise.rl.workers.messages import Returned
from reprise.sched.policies.steps import Ahead
from reprise.spec.reuse.agreement import Agreement, RunMisses
from reprise.spec.reuse.prefix_rule import PrefixRule
from reprise.spec.verification.sampling import NOISE_NAMES

AHEAD = 2**30 * NOISE_NAMES  # added to the ids of early requests, which keep their noise


@dataclasses.dataclass(frozen=True, eq=False)
class ComingStep:
    """The next step: its requests, noise, drafts, rule, and lengths of the last epoch by group."""

    requests: Sequence[Request]
    key: jax.Array
    drafts: DrafterFactory
    rule: PrefixRule | None
    past_tokens: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Prefetched:
    """The early part of a step: its requests, and early tokens by request id."""

    requests: Sequence[Request] = ()
    tokens: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def resumed(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests of a step, with early tokens if the prompt is the same."""
        prompts = {r.request_id: r.prompt_ids for r in self.requests}
        return [
            dataclasses.replace(r, begun=self.tokens[r.request_id])
            if r.request_id in self.tokens and prompts[r.request_id] == r.prompt_ids
            else r
            for r in requests
        ]


class AheadEngine(MultiEngine):
    """Engines with workers that live across rollouts, as long as the engine is open."""

    @contextlib.contextmanager
    def open(self, max_requests: int, longest_tokens: int) -> Iterator[AheadEngine]:
        """Start the workers, for rollouts of these maximum numbers of requests and tokens each."""
        scheduler = Ahead(self.make_scheduler(), chunk_tokens=self.config.chunk_tokens)
        options: dict[str, Any] = {"spot": self.spot, "has_steps_apart": True}
        self._session = self.session(scheduler, max_requests, longest_tokens, **options)
        self._place = -2
        self._spec: RolloutSpec | None = None  # of the last rollout
        self._coming: ComingStep | None = None
        self._begun_parts: list[WorkerPart] = []
        self._begun_place: int | None = None
        self._begun = Prefetched()
        self._misses = RunMisses()  # of early tokens
        self._open = set[int]()  # ids of early requests not returned yet
        with self._session.aborted_at_end():
            yield self

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """See `RolloutEngine.run`; planned requests start on idle workers.

        `spec.params` stay in use until the next rollout starts.
        """
        self.check(spec, requests)
        rate = self._misses.rate
        self._spec = spec = dataclasses.replace(spec, begun=True, early_miss_rate=rate)
        self._place = place = self._place + 2
        oldest = place if self._begun_place is None else self._begun_place
        self._session.submit(place, spec, requests, oldest=oldest)
        self.begin()
        try:
            emitted = partial(self._session.num_tokens, place)
            return collected(requests, self._next, emitted, on_finish, on_round)
        finally:
            self.stats = self._session.stats(place)
            begun = self.stats.begun
            self._misses.played([Agreement(begun.kept_tokens, begun.decided_tokens)])
            self.stats.events = self._session.new_events()
            self.stats.pool = self._session.new_pool_counts()
            self.stats.parts = [*self._begun_parts, *self.stats.parts]
            self._begun_parts = []

    def plan(self, coming: ComingStep) -> None:
        """Plan the next step, to start in the next rollout; recall early requests first."""
        assert self._begun_place is None, "what was begun is recalled first"
        self._coming = coming

    def begin(self) -> None:
        """Start the planned step, if any, with the weights of the last rollout."""
        coming = self._coming
        spec = self._spec
        self._coming = None
        if coming is None or spec is None or not coming.requests:
            return
        ahead = [dataclasses.replace(r, request_id=r.request_id + AHEAD) for r in coming.requests]
        self._begun = Prefetched(coming.requests)
        self._begun_place = self._place + 1
        self._open = {r.request_id for r in ahead}
        own = {"key": coming.key, "drafts": coming.drafts, "rule": coming.rule, "sink": None}
        self._session.submit(
            self._begun_place,
            dataclasses.replace(spec, **own),
            ahead,
            coming.past_tokens,
            is_ahead=True,
            oldest=self._place,
        )

    def recall(self, check: Callable[[], object] = lambda: None) -> Prefetched:
        """Return the early part once workers have released it; call `check` while waiting."""
        if self._begun_place is None:
            return Prefetched()
        self._session.recall()
        while self._open:
            check()
            finished = self._next()
            assert finished is None, "the step's own requests are all answered"
        # early requests are a part of their step, with older weights
        self._begun_parts += self._session.stats(self._begun_place).parts
        self._begun_place = None
        return self._begun

    def _next(self) -> Trajectory | None:
        """Return the next response of a step, or None; store early tokens of the next step."""
        match self._session.next_result(POLL_S):
            case Returned(partial=state):
                tokens = None if state.prefix is None else state.prefix.response_ids
                self._keep(state.request.request_id, tokens)
            case Trajectory() as t if t.request_id >= AHEAD:
                self._keep(t.request_id, t.response_ids)
            case Trajectory() as t:
                return t
        return None

    def _keep(self, request_id: int, tokens: np.ndarray | None) -> None:
        self._open.discard(request_id)
        if tokens is not None and len(tokens):
            self._begun.tokens[request_id - AHEAD] = tuple(tokens.tolist())
