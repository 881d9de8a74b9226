"""Budgets by the names that configurations use."""

from __future__ import annotations

from collections.abc import Sequence

from spec.budget.aimd import Aimd
from spec.budget.budget import Budget, FixedBudget
from spec.budget.config import parse_budget
from spec.budget.goodput import Goodput
from spec.round_times import RoundTimes


def make_budget(
    policy: str, times: RoundTimes | None, window_tokens: Sequence[int] | None = None
) -> Budget:
    """Return the budget of that name, for one rollout; raises ValueError for an unknown name.

    `window_tokens` are those of `aimd`: `spec.budget.aimd.next_windows`.
    `bandit` lives longer than a rollout: `BanditBudget` makes its budgets.
    """
    name, size = parse_budget(policy)
    if name == "aimd":
        return Aimd(times, window_tokens)
    if name == "goodput":
        assert times is not None, "goodput needs the measured seconds of a round"
        return Goodput(times)
    assert name in ("off", "fixed"), f"no budget of one rollout is called {policy}"
    return FixedBudget(size)
