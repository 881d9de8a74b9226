"""HistoSpec's draft window: additive increase, reset on a miss (RhymeRL, section 5.4)."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class WindowConfig:
    """First window, what a fully accepted draft adds, and the most; all in tokens."""

    start_tokens: int = 2
    step_tokens: int = 2
    most_tokens: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.start_tokens <= self.most_tokens or self.step_tokens < 0:
            raise ValueError(
                "expected 1 <= start_tokens <= most_tokens and step_tokens >= 0, got "
                f"{self.start_tokens}, {self.most_tokens}, {self.step_tokens}"
            )


def next_windows(
    config: WindowConfig, window_A: np.ndarray, deepest_A: np.ndarray, accepted_A: np.ndarray
) -> np.ndarray:
    """Windows after a round: +step where as many draft tokens were right as the longest path has.

    Else back to start. Of a chain that is all of them; of a tree siblings cannot all be right.
    A request without draft tokens keeps its window.
    """
    grown_A = np.minimum(window_A + config.step_tokens, config.most_tokens)
    changed_A = np.where(accepted_A >= deepest_A, grown_A, config.start_tokens)
    return np.where(deepest_A > 0, changed_A, window_A)
