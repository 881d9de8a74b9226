"""One phase's drafting: who is asked each round, what is tried, and what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from models.transformer import Params
from rl.engine.config import EngineConfig
from rl.engine.model_runner import ModelRunner
from rl.engine.stats import EngineStats
from spec.acceptance import of_plain, of_round
from spec.budget.budget import Budget, DraftDecision
from spec.budget.union import DrafterUnion
from spec.drafter import Drafter, Drafts, LiveSlots
from spec.retrieval import device_lookup, lookup_probe
from spec.retrieval.lookup_probe import LookupProbe
from spec.retrieval.lookup_texts import LookupTexts
from spec.sampling import SamplingConfig

PROBE_EVERY = 4  # calls


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterContext:
    """Where a worker draft tokens in a phase: its devices, the policy's weights there, and its
    rows.

    `features` gives the hidden states of the rows as they are now.
    """

    runner: ModelRunner
    params: Params
    sampling: SamplingConfig
    key: jax.Array
    features: Callable[[], jax.Array]


DrafterFactory = Callable[
    [DrafterContext], tuple[Drafter | None, Budget | None]
]  # a worker's own, for one phase


def no_drafts(context: DrafterContext) -> tuple[Drafter | None, Budget | None]:
    """Plain decoding."""
    return None, None


class Speculator:
    """The drafter's draft tokens and the device's, as the budget wants them."""

    def __init__(
        self, config: EngineConfig, drafter: Drafter | None, budget: Budget, stats: EngineStats
    ) -> None:
        self.drafter, self.budget = drafter, budget
        self.texts: LookupTexts | None = None  # what the device may look up
        if isinstance(drafter, DrafterUnion) and budget.looks_up:
            self.texts = drafter.texts
        self._config, self._stats = config, stats
        self._probe: LookupProbe | None = None

    def decide(
        self, live: LiveSlots, num_slots: int, num_positions: int, room: int
    ) -> tuple[Drafts | None, DraftDecision]:
        """The drafter's draft tokens, and how many of them are to be tried.

        `room` are the free cache positions of the longest row.
        """
        plain = DraftDecision(1, self._config.rounds_per_fetch)
        if self.drafter is None:
            return None, plain
        sizes = self._config.node_sizes(room)
        ahead = self._ahead(live, num_slots, num_positions, room)
        if ahead is not None and not ahead.ask:
            return None, ahead
        skipped = self.budget.skips(live, num_slots, num_positions)
        # the last token of a response is never a draft token: it comes with the one before
        most_A = np.minimum(self.budget.limits(live, num_slots), live.remaining_tokens_A - 1)
        most_A = np.minimum(most_A, (sizes[-1] if sizes else 1) - 1).astype(np.int32)
        if not most_A.any():
            return None, ahead or plain
        if isinstance(self.drafter, DrafterUnion):
            self.drafter.skipped = skipped
        drafts = self.drafter.propose(live, most_A, self._config.max_nodes - 1)
        if len(drafts.count_A) != len(live):
            raise ValueError(
                f"{type(self.drafter).__name__}.propose gave {len(drafts.count_A)} drafts for "
                f"{len(live)} requests: expected one each"
            )
        decision = self.budget.choose(live, drafts, sizes, num_slots, num_positions)
        if ahead is not None:
            return drafts, ahead
        rounds = min(decision.num_rounds, plain.num_rounds)
        return drafts, dataclasses.replace(decision, num_rounds=rounds)

    def _ahead(
        self, live: LiveSlots, num_slots: int, num_positions: int, room: int
    ) -> DraftDecision | None:
        """What the device is to look up; where nothing, a probe says what that would bring."""
        # each of two rounds, at least, writes all of its nodes
        fitting = [n for n in self._config.lookup_sizes() if 2 * n <= room]
        if self.texts is None or not fitting:
            return None
        ahead = self.budget.ahead(live, fitting, num_slots, num_positions)
        if ahead is not None:
            self._probe = None
        elif self._probe is None and self._stats.fetches % PROBE_EVERY == 0:
            self._probe = lookup_probe.probe(self.texts, live, num_slots)
        return ahead

    def judge(
        self,
        live: LiveSlots,
        drafts: Drafts,
        num_nodes: int,
        tokens_AN: np.ndarray,
        emitted_A: np.ndarray,
    ) -> None:
        """Tell the budget what became of the draft tokens, and count those that were tried."""
        if num_nodes == 1:
            acceptance = of_plain(drafts, tokens_AN, emitted_A)
        else:
            acceptance = of_round(drafts, num_nodes, tokens_AN, emitted_A)
            self._stats.count(drafts, acceptance)
        self.budget.observe(live, drafts, acceptance)
        if isinstance(self.drafter, DrafterUnion):
            self.drafter.judged(drafts, acceptance)

    def judge_lookup(
        self, live: LiveSlots, counts_AR: np.ndarray, tried_AR: np.ndarray, num_nodes: int
    ) -> None:
        """The same of draft tokens that the device looked up."""
        acceptance = device_lookup.judge(counts_AR, tried_AR, num_nodes)
        self.budget.looked_up(live, acceptance)
        self._stats.looked_up(acceptance)

    def judge_probe(self, live: LiveSlots) -> None:
        """The same of draft tokens that the device would have looked up; `live` is after the
        round.
        """
        if self._probe is None:
            return
        judged = self._probe.judge(live, self._config.lookup_sizes()[-1])
        if judged is not None:
            self._probe = None
            self.budget.looked_up(*judged)

    def finished(self, live: LiveSlots) -> None:
        """These requests have ended."""
        if self.drafter is not None and len(live):
            self.drafter.finished(live)
