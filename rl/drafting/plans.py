"""Plans for the drafting workers of a run, from measured times and acceptance."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from reprise.rl.drafting.config import DraftingConfig
from reprise.sched.policies.specactor import (
    Acceptance,
    Profile,
    Reconfiguration,
    RequestPlan,
    WorkerPlan,
    batch_prices,
    plan_workers,
    prob_of,
    rank_methods,
    sequential_tokens,
    worth_helping,
)
from reprise.sched.simulator.roofline import Costs
from reprise.spec.budget.config import MODEL
from reprise.spec.decoupled.drafter import RequestPlans
from reprise.spec.decoupled.messages import DraftPlan
from reprise.spec.drafter import PRIOR_PROB, LiveSlots
from reprise.spec.round_times import RoundTimes

DECAY = 0.999  # per round, of the counts of rounds with a draft
PRIOR_ROUNDS = 20.0  # weight of `FIRST_HITS`
FIRST_HITS = 0.85  # assumed share of rounds with a draft, before any round
DEADLINE_SHARE = 0.1  # of a round, to wait for drafts that are due
COMMON = RequestPlan(0, True, 0.0)  # for requests with average acceptance or more
FIRST_WINDOW = 4  # without a configured or measured window


class Observed:
    """An acceptance profile of the drafts by `method`, for any thread."""

    def __init__(self, method: str = MODEL) -> None:
        self._lock = threading.Lock()
        self._method = method
        self.profile = Profile({method: PRIOR_PROB})
        self._requests = set[int]()
        self._num_hits = FIRST_HITS * PRIOR_ROUNDS
        self._num_rounds = PRIOR_ROUNDS

    def add(self, request_ids: Sequence[int], accepted_A: np.ndarray, seen_A: np.ndarray) -> None:
        """Add a round, with the numbers of seen and accepted draft tokens of each request."""
        rows = zip(request_ids, accepted_A.tolist(), seen_A.tolist(), strict=True)
        with self._lock:
            for request_id, accepted, seen in rows:
                if seen:
                    self._requests.add(request_id)
                    self.profile.observe(request_id, self._method, accepted, seen)
            self._num_hits = DECAY * self._num_hits + float((seen_A > 0).sum())
            self._num_rounds = DECAY * self._num_rounds + len(seen_A)

    def forget(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._requests.discard(request_id)
                self.profile.forget(request_id)

    def acceptance(self) -> dict[int, float]:
        """Return the acceptance of each unfinished request with observed draft tokens."""
        with self._lock:
            return {r: self.profile.p_of_request(r, self._method) for r in self._requests}

    @property
    def p(self) -> float:
        return min(self.profile.p_of_method(self._method), 0.99)

    @property
    def hits(self) -> float:
        """Return the share of rounds with a draft, counted per request."""
        return self._num_hits / self._num_rounds


@dataclasses.dataclass(frozen=True)
class MeasuredSeconds:
    """Measured times of drafting and verifying, by batch size.

    Each request of a verifying worker holds `positions` on average. `times` includes the draft
    model if workers may draft for themselves. `draft_s` is the time of one draft token for all
    requests of a drafting worker; `model_s` is the time to place a draft model on a worker.
    """

    costs: Costs
    times: RoundTimes
    positions: float
    draft_s: float = 0.0
    model_s: float = 0.0

    @classmethod
    def of(cls, costs: Costs, times: RoundTimes, draft_s: float) -> MeasuredSeconds:
        """Return times for requests that fill half of the longest measured cache."""
        max_positions = max(positions for _, _, positions in times.rounds)
        return cls(costs, times, max_positions / 2, draft_s)

    def draft(self, requests: float) -> float:
        """Return the seconds to draft one token for each request."""
        depths = self.times.draft_depths(MODEL)
        if not depths:
            return self.draft_s
        sizes = sorted({(b, s) for b, _, s in self.times.rounds})
        slots = sorted({b for b, _ in sizes})
        B = next((b for b in slots if b >= requests), slots[-1])
        S = min(s for b, s in sizes if b == B)
        return self.times.draft(MODEL, B, depths[-1], S) / depths[-1]

    def verify(self, requests: float, window: int) -> float:
        """Return the seconds of a round with `window` draft tokens per request."""
        return self.costs.round_seconds(requests, requests * self.positions, window + 1)


class Planner:
    """Plans rollouts of `num_requests` concurrent requests on `num_workers` workers of both kinds.

    `methods` are the draft models (`rl.drafting.config.methods_of`); `method` is the draft model of
    the last rollout. `seconds`, and `draft_s` by method, are set once they are measured.
    """

    def __init__(
        self,
        config: DraftingConfig,
        num_workers: int,
        num_requests: int,
        max_window: int,
        methods: Sequence[str] = (MODEL,),
    ) -> None:
        self.config = config
        self.methods = tuple(methods)
        self.method = methods[0]
        self.num_workers = num_workers
        self.num_requests = num_requests
        self.max_window = max_window
        self.drafting_workers = 0
        self.seconds: MeasuredSeconds | None = None
        self.draft_s: dict[str, float] = {}
        self._rates: dict[tuple[int, float, float], tuple[float, float]] = {}  # latest entry only
        self.forget_profile()

    def forget_profile(self) -> None:
        """Reset the profile, since warm-up texts say nothing about the texts of the run."""
        self._seen = {method: Observed(method) for method in self.methods}

    @property
    def observed(self) -> Observed:
        """The profile of the current method."""
        return self._seen[self.method]

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self.observed.p, None if self._runs_freely else self.observed.hits)

    def choose_method(self) -> str:
        """Choose the method of a new rollout (section 4.2, initial selection)."""
        if self.draft_s and self.seconds is not None:
            self.method = self.ranked()[0]
            draft_s = self.draft_s[self.method]
            self.seconds = dataclasses.replace(self.seconds, draft_s=draft_s)
            self._rates = {}
        return self.method

    def ranked(self) -> list[str]:
        """Return the methods by tokens per second, best first (the draft ladder).

        Rounds without a draft count as rejected drafts.
        """
        seconds = self._measured
        w = min(FIRST_WINDOW, self.max_window)
        tokens = {m: Acceptance(seen.p, seen.hits).tokens(w) for m, seen in self._seen.items()}
        acceptance = {m: prob_of(tokens[m], w) for m in self.methods}
        drafting = {m: (lambda batch, s=self.draft_s[m]: s) for m in self.methods}

        def verify(window: int) -> Callable[[float], float]:
            too_long = window > self.max_window
            return lambda batch: math.inf if too_long else seconds.verify(batch, window)

        return rank_methods(acceptance, drafting, verify, self._each)

    def choose(self, drafting_workers: Iterable[int]) -> WorkerPlan:
        """Return the best plan with one of these numbers of drafting workers."""
        seconds = self._measured
        fixed = self.config.window
        return plan_workers(
            self.num_workers,
            self.num_requests,
            seconds.draft,
            seconds.verify,
            self.acceptance,
            drafting_workers=drafting_workers,
            windows=self._windows if fixed is None else (fixed,),
        )

    def plans(self) -> RequestPlans:
        """Return the plans for the requests of one worker in a new rollout."""
        fixed = self.config.window
        seconds = self.seconds
        every = self.config.reconfigure_tokens
        if seconds is None:
            window = min(fixed or FIRST_WINDOW, self.max_window)
            return _RolloutPlans(lambda batch: DraftPlan(window), self.observed)
        of_batch = functools.cache(lambda batch: DraftPlan(fixed or self._window(batch)))
        method = self.method
        each = self._each

        @functools.cache
        def own(batch: int) -> Reconfiguration:
            plan_of = self._own_plans(batch, of_batch(batch).window)
            return Reconfiguration(method, COMMON, plan_of, every)

        window = of_batch(math.ceil(each)).window
        late_s = window * seconds.draft(each) - seconds.verify(each, window)
        deadline_s = DEADLINE_SHARE * seconds.verify(each, 0) + max(late_s, 0.0)
        if self._runs_freely:  # only enumerated blocks are worth waiting for
            deadline_s = 0.0
        return _RolloutPlans(of_batch, self.observed, own if every else None, deadline_s)

    def _window(self, batch: int) -> int:
        """Return the window with the most tokens per second at the batch size of a worker."""
        seconds = self._measured
        acceptance = self.acceptance

        def rate(w: int) -> float:
            return acceptance.tokens(w) / max(w * seconds.draft(batch), seconds.verify(batch, w))

        return max(self._windows, key=rate)

    def _own_plans(self, batch: int, window: int) -> Callable[[float], RequestPlan]:
        """Return a function from the p of a request to its plan, with at most `window` tokens."""
        acceptance = self.acceptance
        windows = range(1, window + 1)
        seconds = self._measured
        prices = batch_prices(batch, window, seconds.draft, seconds.verify, acceptance)
        return lambda p: dataclasses.replace(acceptance, p=p).own_plan(prices, windows)

    def worth(self, held_tokens: int, left_tokens: int) -> bool:
        """Return True if a copy of a request saves more than its keys, values and weights cost.

        The copy runs in rounds of one request; half of `left_tokens` are expected.
        """
        seconds = self.seconds
        if seconds is None:
            return True
        # cached, since every finished request causes a call for every other request
        p = round(self.observed.p, 2)
        hits = round(self.observed.hits, 2)
        key = id(seconds), p, hits
        if (rates := self._rates.get(key)) is None:
            rates = self._rates_of(seconds, p)
            self._rates = {key: rates}
        costs_s = seconds.costs.copy_seconds(held_tokens) + seconds.model_s
        return worth_helping(left_tokens / 2, *rates, costs_s)

    def _rates_of(self, seconds: MeasuredSeconds, p: float) -> tuple[float, float]:
        """Return the tokens per second of a request in a full batch, and in a batch of one."""
        window = self.config.window or FIRST_WINDOW
        each = self._each
        round_s = max(seconds.verify(each, window), window * seconds.draft(each))
        helped = max(
            sequential_tokens(p, w) / (w * seconds.draft(1) + seconds.verify(1, w))
            for w in self._windows
        )
        return self.acceptance.tokens(window) / round_s, helped

    @property
    def _measured(self) -> MeasuredSeconds:
        assert self.seconds is not None, "plans come from measured seconds"
        return self.seconds

    @property
    def _windows(self) -> range:
        return range(1, self.max_window + 1)

    @property
    def _each(self) -> float:
        """The initial number of requests per verifying worker."""
        return self.num_requests / max(self.num_workers - self.drafting_workers, 1)

    @property
    def _runs_freely(self) -> bool:
        return self.config.ahead == "free_running"


class _RolloutPlans(RequestPlans):
    """Plans by the current batch size, and individual plans for some requests."""

    def __init__(
        self,
        of_batch: Callable[[int], DraftPlan],
        observed: Observed,
        own: Callable[[int], Reconfiguration] | None = None,
        deadline_s: float = 0.0,
    ) -> None:
        self._of_batch = of_batch
        self._observed = observed
        self._own = own
        self.deadline_s = deadline_s
        self._plans = dict[int, DraftPlan]()
        self._tokens = dict[int, int]()  # of each response, at its last observation

    def plan(self, request_id: int, batch: int) -> DraftPlan:
        return self._plans.get(request_id) or self._of_batch(batch)

    def observed(self, live: LiveSlots, accepted_A: np.ndarray, seen_A: np.ndarray) -> None:
        ids = live.request_ids_A.tolist()
        self._observed.add(ids, accepted_A, seen_A)
        if self._own is None:
            return
        own = self._own(len(live))
        tokens_A = live.total_tokens_A - live.prompt_tokens_A
        for request_id, tokens in zip(ids, tokens_A.tolist(), strict=True):
            before = self._tokens.get(request_id, 0)
            self._tokens[request_id] = tokens
            plan = own.plan_when_due(request_id, before, tokens, self._observed.profile)
            if plan == COMMON:
                self._plans.pop(request_id, None)
            elif plan is not None:
                window = plan.window  # prices include its draft tokens, not second choices
                self._plans[request_id] = DraftPlan(window, plan.decoupled, max_nodes=window)

    def forget(self, request_ids: Sequence[int]) -> None:
        self._observed.forget(request_ids)
        for request_id in request_ids:
            self._plans.pop(request_id, None)
            self._tokens.pop(request_id, None)
