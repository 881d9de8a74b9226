"""Requests of a rollout that have no row yet."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence

from rl.engine.admission import PromptNumbers
from rl.trajectory import PartialRequest, Request


class WaitingQueue:
    """Two queues: `new` requests, and those that a `RequestSource` brought or were preempted."""

    def __init__(self, numbers: PromptNumbers) -> None:
        self._numbers = numbers
        self.new: collections.deque[PartialRequest] = collections.deque()
        self.sourced: collections.deque[PartialRequest] = collections.deque()
        self._prompts: collections.Counter[int] = collections.Counter()  # of `new`, by number

    def __len__(self) -> int:
        return len(self.new) + len(self.sourced)

    @property
    def prompts(self) -> Collection[int]:
        """Return the prompts of `new`: rows that hold them are overwritten last."""
        return self._prompts.keys()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the requests that the rollout began with."""
        self.new.extend(PartialRequest(r) for r in requests)
        self._prompts.update(self._numbers.of(r.prompt_ids) for r in requests)

    def add_sourced(self, requests: Sequence[PartialRequest]) -> None:
        """Queue requests that come while it runs."""
        self.sourced.extend(requests)

    def take_sourced(self) -> list[PartialRequest]:
        """Take all that a source brought."""
        taken = list(self.sourced)
        self.sourced.clear()
        return taken

    def drop(self, request_ids: Collection[int]) -> None:
        """Forget these of the requests that a source brought."""
        left = [p for p in self.sourced if p.request.request_id not in request_ids]
        self.sourced = collections.deque(left)

    def first(self, most: int) -> list[PartialRequest]:
        """Return those that are next, up to `most`: what was brought or preempted comes first."""
        queue = self.sourced or self.new
        return list(itertools.islice(queue, most))

    def take(self, count: int) -> list[PartialRequest]:
        """Take so many of those that `first` returns."""
        if self.sourced:
            return [self.sourced.popleft() for _ in range(count)]
        taken = [self.new.popleft() for _ in range(count)]
        for p in taken:
            number = self._numbers.of(p.request.prompt_ids)
            self._prompts[number] -= 1
            if not self._prompts[number]:
                del self._prompts[number]
        return taken
