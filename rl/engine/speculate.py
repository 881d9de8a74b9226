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
from spec.acceptance import plain_acceptance, round_acceptance
from spec.budget.budget import Budget, DraftDecision
from spec.config import SamplingConfig
from spec.drafter import Drafter, Drafts, LiveSlots


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
    """The drafter's draft tokens, as many as the budget wants."""

    def __init__(
        self, config: EngineConfig, drafter: Drafter | None, budget: Budget, stats: EngineStats
    ) -> None:
        self.drafter, self.budget = drafter, budget
        self._config, self._stats = config, stats

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
        skipped = self.budget.skips(live, num_slots, num_positions)
        # the last token of a response is never a draft token: it comes with the one before
        most_A = np.minimum(self.budget.limits(live, num_slots), live.remaining_tokens_A - 1)
        most_A = np.minimum(most_A, (sizes[-1] if sizes else 1) - 1).astype(np.int32)
        if not most_A.any():
            return None, plain
        self.drafter.skipped = skipped
        drafts = self.drafter.propose(live, most_A, self._config.max_nodes - 1)
        if len(drafts.count_A) != len(live):
            raise ValueError(
                f"{type(self.drafter).__name__}.propose gave {len(drafts.count_A)} drafts for "
                f"{len(live)} requests: expected one each"
            )
        decision = self.budget.choose(live, drafts, sizes, num_slots, num_positions)
        rounds = min(decision.num_rounds, plain.num_rounds)
        return drafts, dataclasses.replace(decision, num_rounds=rounds)

    def observe(
        self,
        live: LiveSlots,
        drafts: Drafts,
        num_nodes: int,
        tokens_AN: np.ndarray,
        emitted_A: np.ndarray,
    ) -> None:
        """Tell budget and drafter which draft tokens were accepted, and count the verified ones."""
        if num_nodes == 1:
            acceptance = plain_acceptance(drafts, tokens_AN, emitted_A)
        else:
            acceptance = round_acceptance(drafts, num_nodes, tokens_AN, emitted_A)
            self._stats.count(drafts, acceptance)
        self.budget.observe(live, drafts, acceptance)
        assert self.drafter is not None, "its drafts were verified"
        self.drafter.observe(drafts, acceptance)

    def finished(self, live: LiveSlots) -> None:
        """These requests have ended."""
        if self.drafter is not None and len(live):
            self.drafter.finished(live)
