"""Speculation of one rollout: the drafts that a round verifies, and feedback from drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from reprise.rl.engine.rollout_spec import Drafting
from reprise.rl.records.stats import EngineStats
from reprise.rl.slots.cached_prefixes import CachedPrefixes
from reprise.rl.slots.config import EngineConfig
from reprise.spec.budget.budget import DraftDecision, FixedBudget, PlainSpell, plain
from reprise.spec.draft_cache.drafting import DraftedRound
from reprise.spec.drafter import (
    Acceptance,
    Drafts,
    LiveSlots,
    RequestIndex,
    RoundsDrafter,
    Source,
    no_drafts,
    plain_acceptance,
    round_acceptance,
)

UNDRAFTED_ROUNDS = 2, 16  # min and max length of a spell after a round without drafts


class Speculator:
    """A drafter, and the budget that decides how many of its draft tokens are verified."""

    def __init__(self, config: EngineConfig, drafting: Drafting, stats: EngineStats) -> None:
        self.drafter, budget = drafting
        self._budget = budget or FixedBudget()
        in_time = self.drafter is None or not self.drafter.arrives_later
        self._undrafted = PlainSpell(RequestIndex(), *(UNDRAFTED_ROUNDS if in_time else (1, 1)))
        self._config = config
        self._sizes = functools.cache(config.node_sizes)
        self._stats = stats
        self.in_rounds: RoundsDrafter | None = None  # can draft on the device, as last decided
        self._drafted_A: np.ndarray | None = None  # requests with drafts; None if every request
        self._is_plain = False  # as last decided
        self._lags = False  # the drafter does not know the tokens of plain rounds

    def decide(
        self,
        live: LiveSlots,
        num_slots: int,
        num_positions: int,
        cached: CachedPrefixes | None = None,
        num_missing: int = 0,
    ) -> tuple[Drafts | None, DraftDecision]:
        """Return the drafts of a round, and which of their tokens to verify (see `_decide`)."""
        drafts, decision = self._decide(live, num_slots, num_positions, cached, num_missing)
        self._is_plain = decision.num_nodes == num_slots
        return drafts, decision

    def _decide(
        self,
        live: LiveSlots,
        num_slots: int,
        num_positions: int,
        cached: CachedPrefixes | None,
        num_missing: int,
    ) -> tuple[Drafts | None, DraftDecision]:
        """Return the drafts of a round, and which of their tokens to verify.

        Requests that may keep more of their cached response have no other drafts. Nothing is
        drafted while most rows lack their prompt.
        """
        sizes = self._sizes(num_slots)
        rounds = self._config.rounds_per_fetch
        if num_missing:
            few = num_missing <= len(live)  # else `Rounds` computes prompts until few are missing
            sizes = self._config.sizes_beside_prompts(num_slots) if few else []
            if not sizes and self.drafter is not None:
                rounds = 1
        self._drafted_A = None
        # the last token of a response is never drafted: verifying the token before draws it
        left_A = np.minimum(live.remaining_tokens_A - 1, self._config.max_nodes - 1)
        max_A = np.zeros_like(live.rows_A)
        chained_A = max_A > 0
        if cached is not None:
            chained_A = cached.goes_on(live.rows_A)
        may_draft = sizes and not self._undrafted.lasts(live, num_slots)
        if self.drafter is not None and may_draft:
            self.drafter.skipped = self._budget.skips(live, num_slots, num_positions)
            max_A = np.minimum(self._budget.limits(live, num_slots), left_A).astype(np.int32)
            max_A[chained_A] = 0
        if not max_A.any() and not chained_A.any():
            return None, plain(num_slots, rounds)
        can_be_unseen = not num_missing and not chained_A.any()
        unseen = self._unseen(live, sizes, num_slots) if can_be_unseen else None
        if unseen is not None:
            return None, unseen
        drafts = self._propose(live, max_A)
        if cached is not None and chained_A.any():
            cached.draft(live, np.where(chained_A, left_A, 0), drafts)
        decision = self._budget.choose(live, drafts, sizes, num_slots, num_positions)
        if drafts.count_A.any():
            self._undrafted.end()
        else:
            spell = self._undrafted.begin(live, num_slots)
            decision = max(decision, spell, key=lambda d: d.num_rounds)
        if decision.taken_A is None and cached is not None and cached.ruled(live.rows_A).any():
            # the rule decides on the next token even if no draft token is verified
            return drafts, DraftDecision(num_slots, np.zeros(len(live), np.int32))
        return drafts, self._cut(decision)

    def _unseen(
        self, live: LiveSlots, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        """Return a decision to draft on the device, or None if that is unwanted or impossible."""
        assert self.drafter is not None, "it may draft"
        self.in_rounds = self.drafter.in_rounds()
        if self.in_rounds is None:
            return None
        max_tokens = min(self.in_rounds.max_tokens, self._config.max_nodes - 1)
        decision = self._budget.choose_on_device(live, max_tokens, sizes, num_slots)
        return None if decision is None else self._cut(decision)

    def _cut(self, decision: DraftDecision) -> DraftDecision:
        rounds = min(decision.num_rounds, self._config.rounds_per_fetch)
        return dataclasses.replace(decision, num_rounds=rounds)

    def _propose(self, live: LiveSlots, max_A: np.ndarray) -> Drafts:
        """Return drafts; the drafter sees only requests that may have drafts."""
        max_nodes = self._config.max_nodes - 1
        drafted_A = max_A > 0
        some = live
        if not drafted_A.all():
            self._drafted_A = drafted_A
            some = live.take(drafted_A)
            max_A = max_A[drafted_A]
        if not len(max_A):
            return no_drafts(len(drafted_A), max_nodes)
        assert self.drafter is not None, "nobody may draft"
        if self._lags:
            self.drafter.catch_up(some)
        drafts = self.drafter.propose(some, max_A, max_nodes)
        if len(drafts.count_A) != len(max_A):
            raise ValueError(
                f"{type(self.drafter).__name__}.propose gave {len(drafts.count_A)} drafts for "
                f"{len(max_A)} requests: expected one each"
            )
        if some is live:
            self._lags = False
            return drafts
        every = no_drafts(len(drafted_A), max_nodes)
        every.put(drafted_A, drafts)
        return every

    def num_cached(self, drafts: Drafts | None, decision: DraftDecision) -> int:
        """Return how many tokens of cached responses the round verified."""
        if drafts is None or decision.taken_A is None:
            return 0
        taken_AN = np.arange(drafts.max_nodes) < decision.taken_A[:, None]
        return int((taken_AN & (drafts.sources_AN == Source.CACHED)).sum())

    def observe(
        self,
        live: LiveSlots,
        drafts: Drafts,
        taken_A: np.ndarray | None,
        tokens_AN: np.ndarray,
        emitted_A: np.ndarray,
    ) -> Acceptance:
        """Count the verified draft tokens; report their acceptance to the budget and the drafter.

        Both see only requests that the drafter drafted for, and no cached responses.
        """
        if taken_A is None:
            acceptance = plain_acceptance(drafts, tokens_AN, emitted_A)
        else:
            acceptance = round_acceptance(drafts, taken_A, tokens_AN, emitted_A)
            self._stats.count(drafts, acceptance)
        drafted_A = self._drafted_A
        if self.drafter is None or (drafted_A is not None and not drafted_A.any()):
            return acceptance
        observed = acceptance
        if drafted_A is not None:
            live = live.take(drafted_A)
            drafts = drafts.take(drafted_A)
            observed = acceptance.take(drafted_A)
        self._budget.observe(live, drafts, observed)
        self.drafter.observe(drafts, observed)
        return acceptance

    def observe_unseen(self, live: LiveSlots, r: DraftedRound, count_B: np.ndarray) -> np.ndarray:
        """Observe a round that drafted on the device and emitted `count_B` tokens per slot.

        Returns, for each request that took part, how many draft tokens were accepted and for how
        many this is known; int [X, 2].
        """
        assert self.in_rounds is not None
        live = live.take(count_B[live.rows_A] > 0)
        drafts = r.drafts(live.rows_A, self.in_rounds.source)
        emitted_A = count_B[live.rows_A]
        if not len(live):
            return np.zeros((0, 2), int)
        tokens_AN = r.tokens_BN[live.rows_A]
        acceptance = self.observe(live, drafts, drafts.count_A, tokens_AN, emitted_A)
        seen_A = np.minimum(emitted_A, drafts.count_A)
        return np.stack([acceptance.accepted_AN.sum(axis=1), seen_A], axis=1)

    def committed(self, live: LiveSlots) -> None:
        """Pass the current tokens of requests to the drafter, while the device is busy.

        After plain rounds, a drafter that can lag gets the tokens when drafts are wanted again.
        """
        if self.drafter is None:
            return
        if self._is_plain and self.drafter.can_lag:
            self._lags = True
        else:
            self.drafter.committed(live)
            self._lags = False

    def finished(self, live: LiveSlots) -> None:
        """Have the drafter forget requests that have finished."""
        if self.drafter is not None and len(live):
            self.drafter.finished(live)

    def left(self, live: LiveSlots) -> None:
        """Have the drafter forget requests that were preempted or moved."""
        if self.drafter is not None and len(live):
            self.drafter.left(live)
