"""The user settings of draft-token budgets: budget names, and the choices of the bandit."""

from __future__ import annotations

import dataclasses
import itertools

BUDGETS = ("off", "fixed:K", "aimd", "goodput", "bandit")
BANDIT = "bandit"
LEARNED = "learned"
MODEL = "model"
OWN = "own"  # drafter names; OWN drafts n-grams


@dataclasses.dataclass(frozen=True)
class TunerConfig:
    """The arms of `Speculation.budget = "bandit"`, and the rule that chooses among them.

    The arms of a range of batch sizes are each single drafter, all text drafters, all drafters, and
    plain decoding. One round in ten chooses a random arm, the others the arm with the best median
    of its last 32 rewards. The defaults follow TLT's table 4, where 48 or 64 tokens are best for 1
    to 4 requests, by 1 to 5% (`Engine.max_nodes` allows 32); the smallest number in the table is
    16.
    """

    thresholds: tuple[int, ...] = (1, 5, 17, 33)
    """The batch size at which each range starts; an extra threshold adds a range with only plain
    decoding."""
    verify_tokens: tuple[int, ...] = (31, 15, 7)
    """Draft tokens per request that each range verifies."""
    depths: tuple[int, ...] = (3, 6, 10)
    """An arm with a device drafter exists once for each of these depths that its drafters reach."""

    def __post_init__(self) -> None:
        ascends = all(a < b for a, b in itertools.pairwise(self.thresholds))
        if self.thresholds[:1] != (1,) or not ascends:
            raise ValueError(
                f"expected thresholds that begin with 1 and ascend, got {self.thresholds}"
            )
        descends = all(a > b for a, b in itertools.pairwise(self.verify_tokens))
        if not self.verify_tokens or min(self.verify_tokens) < 1 or not descends:
            raise ValueError(f"expected verify_tokens that descend, got {self.verify_tokens}")
        if len(self.thresholds) - len(self.verify_tokens) not in (0, 1):
            raise ValueError(
                f"expected a threshold for each of verify_tokens, and at most one more, got "
                f"{self.thresholds} and {self.verify_tokens}"
            )
        if not self.depths or min(self.depths) < 1 or len({*self.depths}) < len(self.depths):
            raise ValueError(f"expected different depths of at least 1, got {self.depths}")


def parse_budget(text: str) -> tuple[str, int]:
    """Return the name and size of a budget, `("fixed", 4)` for `fixed:4`, or raise ValueError."""
    if text in ("off", "aimd", "goodput", BANDIT):
        return text, 0
    name, _, size = text.partition(":")
    if name == "fixed" and size.isdecimal() and int(size) >= 1:
        return name, int(size)
    raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {text!r}")
