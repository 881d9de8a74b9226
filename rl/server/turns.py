"""Operations on a model in the order of their numbers, even if requests arrive out of order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from reprise.rl.python.api import Policy

MAX_AHEAD = 4096  # operations of a model that wait for a missing predecessor
GAP_S = 600.0  # after which waiting operations fail


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: `start` queues it for the worker; `answer` sets a result without running it."""

    start: Callable[[], None]
    answer: Callable[[dict[str, Any]], None]


class Turns:
    """A queue that starts operations in order; an early operation waits for its predecessors."""

    def __init__(self) -> None:
        self.next_number = 1
        self._ahead: dict[int, Operation] = {}
        self._since_s = 0.0  # since when the next number is missing

    def check(self, number: int) -> None:
        """Raise ValueError for a number that has passed or is too far ahead."""
        if not self.next_number <= number < self.next_number + MAX_AHEAD:
            raise ValueError(f"expected seq_id {self.next_number} or a later one, got {number}")

    def add(self, number: int, operation: Operation, now_s: float) -> None:
        if not self._ahead:
            self._since_s = now_s
        self._ahead[number] = operation
        while self.next_number in self._ahead:
            self._ahead.pop(self.next_number).start()
            self.next_number += 1
            self._since_s = now_s

    def expire(self, now_s: float) -> None:
        """Fail the operations that have waited too long; later operations run."""
        if self._ahead and now_s - self._since_s > GAP_S:
            last = max(self._ahead)
            self.drop(f"the operation with seq_id {self.next_number} has not come")
            self.next_number = last + 1

    def drop(self, why: str) -> None:
        """Answer all waiting operations with an error."""
        waiting = self._ahead
        self._ahead = {}
        for operation in waiting.values():
            operation.answer({"error": why, "category": "user"})


@dataclasses.dataclass(eq=False)
class Model:
    """A model in training: its adapter once created, its operations, and why it has ended."""

    run: str
    session: str
    policy: Policy | None = None
    turns: Turns = dataclasses.field(default_factory=Turns)
    ended: str | None = None

    def end(self, why: str) -> None:
        """Free the adapter, and answer all waiting operations with an error."""
        self.ended = why
        self.policy = None
        self.turns.drop(why)

    def live_policy(self) -> Policy:
        """Return the policy with the adapter. Raises ValueError if the model has no adapter."""
        policy = self.policy
        if policy is None:
            raise ValueError(self.ended or f"{self.run} was not made")
        return policy
