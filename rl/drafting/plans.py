"""A run's plans for drafting workers, from what it has measured: seconds of rounds, acceptance."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from rl.drafting.config import SpecActorConfig
from sched.policies.drafting_plan import Acceptance, WorkerPlan, plan_workers
from spec.budget.config import MODEL
from spec.decoupled.drafter import RequestPlans
from spec.decoupled.messages import DraftPlan
from spec.drafter import LiveSlots, Source
from spec.round_times import RoundTimes

DECAY = 0.999  # of the counts of draft tokens, a round
PRIOR = 20.0  # rounds that what is assumed weighs
FIRST_WINDOW = 4  # where no seconds are measured
FIRST_P, FIRST_HITS = 0.7, 0.85  # assumed before any draft was seen


class Profile:
    """How often draft tokens were accepted, and drafts there in time; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted, self._seen = FIRST_P * PRIOR, PRIOR
        self._there, self._rounds = FIRST_HITS * PRIOR, PRIOR

    def observed(self, accepted_A: np.ndarray, seen_A: np.ndarray) -> None:
        with self._lock:
            self._accepted = DECAY * self._accepted + float(accepted_A.sum())
            self._seen = DECAY * self._seen + float(seen_A.sum())
            self._there = DECAY * self._there + float((seen_A > 0).sum())
            self._rounds = DECAY * self._rounds + len(seen_A)

    @property
    def p(self) -> float:
        return min(self._accepted / self._seen, 0.99)

    @property
    def hits(self) -> float:
        return self._there / self._rounds


@dataclasses.dataclass(frozen=True)
class MeasuredSeconds:
    """Seconds of drafting and verifying by batch, as a run has measured them.

    Verifying workers' rounds are `times`, which have a draft model's seconds too where workers may
    draft by themselves. `draft_s` are those of a draft token for all requests of a drafting worker,
    whose caches have one size.
    """

    times: RoundTimes
    draft_s: float

    def draft(self, requests: float) -> float:
        depths = self.times.draft_depths(MODEL)
        if not depths:
            return self.draft_s
        B, S = self._size(requests)
        return self.times.draft(MODEL, B, depths[-1], S) / depths[-1]

    def verify(self, requests: float, window: int) -> float:
        """Return the seconds of a round of the smallest timed size that holds these."""
        table, (B, S) = self.times.rounds, self._size(requests)
        nodes = sorted(m for b, m, s in table if (b, s) == (B, S))
        return table[B, next((m for m in nodes if m >= (window + 1) * requests), nodes[-1]), S]

    def _size(self, requests: float) -> tuple[int, int]:
        """Return slots for these requests, and positions in the middle of the timed ones."""
        positions = sorted({S for _, _, S in self.times.rounds})
        S = positions[len(positions) // 2]
        slots = sorted({b for b, _, s in self.times.rounds if s == S})
        return next((b for b in slots if b >= requests), slots[-1]), S


class Planner:
    """The plans of a run's rollouts of `num_requests` at once, on `num_workers` of both kinds."""

    def __init__(
        self, config: SpecActorConfig, num_workers: int, num_requests: int, most_window: int
    ) -> None:
        self.config, self.profile = config, Profile()
        self.num_workers, self.num_requests = num_workers, num_requests
        self.most_window, self.drafting_workers = most_window, 0
        self.seconds: MeasuredSeconds | None = None  # to be set once they are measured

    @property
    def acceptance(self) -> Acceptance:
        hits = self.profile.hits if self.config.ahead == "enumeration" else None
        return Acceptance(self.profile.p, hits)

    def choose(self, drafting_workers: Iterable[int]) -> WorkerPlan:
        """Return the best plan of so many drafting workers, by what is known now."""
        assert self.seconds is not None, "plans come from measured seconds"
        fixed, most = self.config.window, self.most_window
        return plan_workers(
            *(self.num_workers, self.num_requests, self.seconds.draft, self.seconds.verify),
            self.acceptance,
            drafting_workers=drafting_workers,
            windows=range(1, most + 1) if fixed is None else (fixed,),
        )

    def plans(self) -> RequestPlans:
        """Return the plans of one worker's requests in a rollout that begins now."""
        window = self.config.window or min(FIRST_WINDOW, self.most_window)
        if self.config.window is None and self.seconds is not None:
            window = max(self.choose((self.drafting_workers,)).window, 1)
        return _OfRollout(DraftPlan(window), self.profile)


class _OfRollout(RequestPlans):
    """A plan for all, and what is seen of their drafts."""

    patience_s = 0.0

    def __init__(self, plan: DraftPlan, profile: Profile) -> None:
        self._plan, self._profile = plan, profile

    def plan(self, request_id: int) -> DraftPlan:
        return self._plan

    def observed(
        self, live: LiveSlots, source: Source, accepted_A: np.ndarray, seen_A: np.ndarray
    ) -> None:
        self._profile.observed(accepted_A, seen_A)

    def forget(self, request_ids: Sequence[int]) -> None:
        return
