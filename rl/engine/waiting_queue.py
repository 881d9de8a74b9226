"""Requests of a rollout that have no row yet."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence

from rl.engine.admission import PromptNumbers
from rl.trajectory import PartialRequest, Request


class WaitingQueue:
    """Two queues: `new` whole requests; `partial` ones, which come first, and preempted ones."""

    def __init__(self, numbers: PromptNumbers) -> None:
        self._numbers = numbers
        self.new: collections.deque[PartialRequest] = collections.deque()
        self.partial: collections.deque[PartialRequest] = collections.deque()
        self._prompts: collections.Counter[int] = collections.Counter()  # of `new`, by number

    def __len__(self) -> int:
        return len(self.new) + len(self.partial)

    @property
    def prompts(self) -> Collection[int]:
        """Return the prompts of `new`: rows that hold them are overwritten last."""
        return self._prompts.keys()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue whole requests."""
        self.new.extend(PartialRequest(r) for r in requests)
        self._prompts.update(self._numbers.of(r.prompt_ids) for r in requests)

    def add_partial(self, requests: Sequence[PartialRequest]) -> None:
        """Queue requests for a chunk of tokens each."""
        self.partial.extend(requests)

    def take_partial(self) -> list[PartialRequest]:
        """Take all partial requests."""
        taken = list(self.partial)
        self.partial.clear()
        return taken

    def drop(self, request_ids: Collection[int]) -> None:
        """Forget these of the partial requests."""
        left = [p for p in self.partial if p.request.request_id not in request_ids]
        self.partial = collections.deque(left)

    def first(self, most: int) -> list[PartialRequest]:
        """Return the next requests, at most `most`."""
        queue = self.partial or self.new
        return list(itertools.islice(queue, most))

    def take(self, count: int) -> list[PartialRequest]:
        """Take so many of those that `first` returns."""
        if self.partial:
            return [self.partial.popleft() for _ in range(count)]
        taken = [self.new.popleft() for _ in range(count)]
        for p in taken:
            number = self._numbers.of(p.request.prompt_ids)
            self._prompts[number] -= 1
            if not self._prompts[number]:
                del self._prompts[number]
        return taken
