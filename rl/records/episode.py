"""The dialogue of one episode, whose turns of the policy are the tokens of a trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

INSERTED = -1  # the turn of tokens that the environment has inserted


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """All tokens of an episode after its prompt, why it has stopped, and its messages.

    `tokens` int32 [m] have the tokens of the policy, which the trajectory has too, and the tokens
    that the environment inserted. `turns` int16 [m] has the turn that drew each token, INSERTED for
    others. `end` is a value of `sched.episodes.End`, and `failure` the kind of a failure. `seconds`
    are of all calls of the environment, by the clock. `turn_rewards` has an entry for each turn of
    the policy, None without a reward, and `rewards` the rewards of the episode by name.
    """

    tokens: np.ndarray
    turns: np.ndarray
    end: str
    num_calls: int = 0
    num_failed_calls: int = 0
    seconds: float = 0.0
    failure: str | None = None
    messages: Sequence[Mapping[str, str]] = ()
    turn_rewards: Sequence[float | None] = ()
    rewards: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)

    @property
    def drawn(self) -> np.ndarray:
        """The places of the tokens of the policy within `tokens`; [n]."""
        return np.flatnonzero(self.turns != INSERTED)

    @property
    def num_inserted(self) -> int:
        """The number of tokens that the environment has inserted."""
        return int(np.count_nonzero(self.turns == INSERTED))

    @property
    def longest_turn_tokens(self) -> int:
        """The number of tokens of the longest turn of the policy."""
        return int(np.bincount(self.turns[self.drawn], minlength=1).max())

    @property
    def row(self) -> dict[str, Any]:
        """The part of a row of samples.jsonl that shows the dialogue."""
        return {
            "messages": list(self.messages),
            "turn_rewards": list(self.turn_rewards),
            "end": self.end,
        }
