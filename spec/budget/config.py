"""Budgets of draft tokens as users set them: their names, and what the bandit chooses among."""

from __future__ import annotations

import dataclasses
import itertools

POLICIES = "off, fixed:K, aimd, goodput, bandit"
BANDIT = "bandit"
LEARNED, MODEL, OWN = "learned", "model", "own"  # their names among the drafters; n-grams


@dataclasses.dataclass(frozen=True)
class BanditConfig:
    """First batch size of each range, probability to explore, rewards that a median is of.

    `everywhere` (ours) makes plain decoding a candidate in all ranges instead of one of its own, so
    that whether to draft is learnt as well. One threshold more than there are other groups
    then gives it the last range alone: from there on nothing is drafted, as TLT's elastic
    activation has it (section 5.1; there at 32 requests).
    """

    thresholds: tuple[int, ...]
    epsilon: float = 0.1
    window: int = 32
    everywhere: bool = False

    def __post_init__(self) -> None:
        ascends = all(a < b for a, b in itertools.pairwise(self.thresholds))
        if self.thresholds[:1] != (1,) or not ascends:
            raise ValueError(
                f"expected thresholds that begin with 1 and ascend, got {self.thresholds}"
            )
        if not 0.0 <= self.epsilon <= 1.0 or self.window < 1:
            raise ValueError(
                "expected epsilon between 0 and 1 and a window of at least 1, got "
                f"{self.epsilon} and {self.window}"
            )


@dataclasses.dataclass(frozen=True)
class TunerConfig:
    """The choices of `Speculation.budget = "bandit"`, and how they are made.

    Range i of batch sizes begins with `thresholds[i]` and verifies `verify_tokens[i]` draft tokens
    a request; one threshold more than that adds a range of plain decoding alone. In each range the
    arms are every drafter by itself, all that read texts, all of them, and plain decoding; an arm
    with a drafter on the device exists once for each of `depths` that its drafters reach. With
    probability `epsilon` a random arm is taken, else the one with the best median of its last
    `window` rewards.

    The defaults follow TLT's table 4: with the root, 32 tokens of 1 to 4 requests (its best are 48
    and 64, by 1 to 5%; `Engine.max_nodes` allows 32), 16 of 5 to 16, 8 of up to 32 (where its best,
    16, is the least that it tries), plain decoding beyond.
    """

    thresholds: tuple[int, ...] = (1, 5, 17, 33)
    verify_tokens: tuple[int, ...] = (31, 15, 7)
    depths: tuple[int, ...] = (3, 6, 10)
    epsilon: float = 0.1
    window: int = 32

    def __post_init__(self) -> None:
        BanditConfig(self.thresholds, self.epsilon, self.window, everywhere=True)
        descends = all(
            a > b for a, b in zip(self.verify_tokens, self.verify_tokens[1:], strict=False)
        )
        if not self.verify_tokens or min(self.verify_tokens) < 1 or not descends:
            raise ValueError(f"expected verify_tokens that descend, got {self.verify_tokens}")
        if len(self.thresholds) - len(self.verify_tokens) not in (0, 1):
            raise ValueError(
                f"expected a threshold for each of verify_tokens, and at most one more, got "
                f"{self.thresholds} and {self.verify_tokens}"
            )
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"expected depths of at least 1, got {self.depths}")


def parse_budget(text: str) -> tuple[str, int]:
    """Return a budget's name and its size, `("fixed", 4)` of `fixed:4`; 0 where it has none.

    Raises ValueError for a name that does not exist.
    """
    if text in ("off", "aimd", "goodput", BANDIT):
        return text, 0
    name, _, size = text.partition(":")
    if name == "fixed" and size.isdecimal() and int(size) >= 1:
        return name, int(size)
    raise ValueError(f"budget must be one of {POLICIES}, got {text!r}")
