"""Drafters and budgets of a user: `PATH.py:NAME` in `Speculation.sources` or `Speculation.budget`.

Their drafts and decisions are checked before other code uses them. A = live requests, N = draft
tokens of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from reprise.rl.engine.rollout_spec import DrafterContext
from reprise.rl.runtime.user_files import make_once, open_named
from reprise.spec.budget.budget import Budget, DraftDecision, Sizes
from reprise.spec.drafter import Acceptance, Drafter, Drafts, LiveSlots, Source
from reprise.spec.round_times import RoundTimes

SOURCES = "Speculation.sources"
BUDGET = "Speculation.budget"  # settings


class MakeDrafter(Protocol):
    """A class of drafters on the host, or a function that makes one, for a worker and rollout."""

    def __call__(self) -> Drafter: ...


class MakeBudget(Protocol):
    """A class of budgets, or a function that makes one, for a worker and rollout.

    `times` are the measured seconds of rounds.
    """

    def __call__(self, *, times: RoundTimes) -> Budget: ...


NO_DRAFTERS: dict[str, MakeDrafter] = {}  # `rl.speculation.sources` makes ours
NO_BUDGETS: dict[str, MakeBudget] = {}


def open_drafter(name: str) -> MakeDrafter:
    """Return what makes the drafters of a user. Raises ValueError or FileNotFoundError."""
    return open_named(SOURCES, name, NO_DRAFTERS, MakeDrafter)


def open_budget(name: str) -> MakeBudget:
    """Return what makes the budgets of a user. Raises ValueError or FileNotFoundError."""
    return open_named(BUDGET, name, NO_BUDGETS, MakeBudget)


def check_drafter(name: str) -> None:
    """Make a drafter of a user, and check that it has the methods of `Drafter`. Raises as above."""
    make_once(SOURCES, name, open_drafter(name), Drafter)


def check_budget(name: str) -> None:
    """Make a budget of a user, and check that it has the methods of `Budget`. Raises as above."""
    make_once(BUDGET, name, open_budget(name), Budget, times=RoundTimes({}))


def drafter_maker(name: str) -> Callable[[DrafterContext], Drafter]:
    """Return a maker of checked drafters of a user. Raises ValueError or FileNotFoundError."""
    make = open_drafter(name)
    return lambda context: UserDrafter(name, make(), context.runner.model.vocab_size)


def budget_maker(name: str) -> Callable[[RoundTimes], Budget]:
    """Return a maker of checked budgets of a user. Raises ValueError or FileNotFoundError."""
    make = open_budget(name)
    return lambda times: UserBudget(name, make(times=times))


class UserDrafter(Drafter):
    """A drafter of a user, which runs on the host; its tokens count as `Source.OTHER`."""

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        self._name = name
        self._drafter = drafter
        self._vocab_size = vocab_size

    @property
    def can_lag(self) -> bool:
        return self._drafter.can_lag

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Return the drafts of the user. Raises ValueError for drafts that are no trees."""
        drafts = self._drafter.propose(live, max_nodes_A, max_nodes)
        where = f"{SOURCES}: {self._name}.propose"
        return checked_drafts(where, drafts, max_nodes_A, max_nodes, self._vocab_size)

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        self._drafter.observe(drafts, acceptance)

    def committed(self, live: LiveSlots) -> None:
        self._drafter.committed(live)

    def catch_up(self, live: LiveSlots) -> None:
        self._drafter.catch_up(live)

    def finished(self, live: LiveSlots) -> None:
        self._drafter.finished(live)

    def left(self, live: LiveSlots) -> None:
        self._drafter.left(live)


def checked_drafts(
    where: str, drafts: Drafts, max_nodes_A: np.ndarray, max_nodes: int, vocab_size: int
) -> Drafts:
    """Return drafts with the dtypes of ours. Raises ValueError for drafts that are no trees.

    Equal siblings are found when a round packs its nodes (`spec.verification.nodes.pack`).
    """
    A = len(max_nodes_A)
    N = max_nodes
    if not isinstance(drafts, Drafts):
        raise ValueError(f"{where}: expected spec.drafter.Drafts, got {type(drafts).__name__}")
    for field in ("tokens_AN", "parents_AN", "prob_AN", "count_A"):
        shape = np.shape(getattr(drafts, field))
        wanted = (A, N) if field[-1] == "N" else (A,)
        if shape != wanted:
            raise ValueError(f"{where}: expected {field} of shape {wanted}, got {shape}")
    tokens_AN = np.asarray(drafts.tokens_AN, np.int32)
    parents_AN = np.asarray(drafts.parents_AN, np.int32)
    prob_AN = np.asarray(drafts.prob_AN, np.float32)
    count_A = np.asarray(drafts.count_A, np.int32)
    if ((count_A < 0) | (count_A > np.minimum(max_nodes_A, N))).any():
        raise ValueError(
            f"{where}: expected at most {max_nodes_A.tolist()} draft tokens, got {count_A.tolist()}"
        )
    places_N = np.arange(N)
    before_AN = np.concatenate([np.ones((A, 1), np.float32), prob_AN[:, :-1]], axis=1)
    is_tree_AN = (parents_AN >= -1) & (parents_AN < places_N)
    is_token_AN = (tokens_AN >= 0) & (tokens_AN < vocab_size)
    is_ordered_AN = (prob_AN >= 0) & (prob_AN <= before_AN)
    wrong_AN = (places_N < count_A[:, None]) & ~(is_tree_AN & is_token_AN & is_ordered_AN)
    if wrong_AN.any():
        a, n = np.argwhere(wrong_AN)[0]
        raise ValueError(
            f"{where}: draft token {n} of request {a} is {tokens_AN[a, n]} behind parent "
            f"{parents_AN[a, n]} with probability {prob_AN[a, n]:g}: expected a token below "
            f"{vocab_size}, a parent in −1 … {n - 1}, and a probability of at most "
            f"{before_AN[a, n]:g}, the one before; see spec.drafter.Drafts"
        )
    sources_AN = np.full((A, N), Source.OTHER, np.uint8)
    return Drafts(tokens_AN, parents_AN, prob_AN, sources_AN, count_A)


class UserBudget(Budget):
    """A budget of a user, for rounds that verify drafts which the host has seen."""

    def __init__(self, name: str, budget: Budget) -> None:
        self._name = name
        self._budget = budget

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return frozenset(self._budget.skips(live, num_slots, num_positions))

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        limits_A = np.asarray(self._budget.limits(live, num_slots))
        if limits_A.shape != (len(live),):
            raise ValueError(
                f"{BUDGET}: {self._name}.limits: expected a limit for each of {len(live)} "
                f"requests, got an array of shape {limits_A.shape}"
            )
        return limits_A

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        """Return the decision of the user. Raises ValueError for a round that is not compiled."""
        decision = self._budget.choose(live, drafts, sizes, num_slots, num_positions)
        where = f"{BUDGET}: {self._name}.choose"
        if not isinstance(decision, DraftDecision):
            kind = type(decision).__name__
            raise ValueError(f"{where}: expected spec.budget.budget.DraftDecision, got {kind}")
        if decision.num_nodes not in (num_slots, *sizes) or decision.tree_tokens:
            raise ValueError(
                f"{where}: expected num_nodes of {num_slots}, for plain decoding, or of "
                f"{list(sizes)}, and tree_tokens=0, got {decision.num_nodes} and "
                f"{decision.tree_tokens}"
            )
        return decision

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        self._budget.observe(live, drafts, acceptance)
