"""Budgets by the names that configurations use."""

from __future__ import annotations

from spec.budget.aimd import Aimd
from spec.budget.budget import Budget, FixedBudget
from spec.budget.goodput import Goodput
from spec.round_times import RoundTimes

POLICIES = "off, fixed:K, aimd, goodput, bandit"


def make_budget(policy: str, times: RoundTimes | None) -> Budget:
    """Return the budget of that name, for one rollout; raises ValueError for an unknown name."""
    if policy == "off":
        return FixedBudget(0)
    if policy == "aimd":
        return Aimd(times)
    if policy == "goodput":
        assert times is not None, "goodput needs the measured seconds of a round"
        return Goodput(times)
    name, _, size = policy.partition(":")
    if name == "fixed" and size.isdecimal() and int(size) >= 1:
        return FixedBudget(int(size))
    raise ValueError(f"budget must be one of {POLICIES}, got {policy!r}")
