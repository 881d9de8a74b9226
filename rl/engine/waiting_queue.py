"""Requests of a rollout that have no row yet."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from rl.engine.prefix_verification import PrefixVerifier
from rl.trajectory import PartialRequest, Prompt, Request


class WaitingQueue:
    """Three queues: `new` requests, `sourced` ones, and those whose cached responses are `cached`.

    A `RequestSource` brought the second, or they were preempted. `cached` is None where cached
    responses are not used.
    """

    def __init__(self, cached: PrefixVerifier | None = None) -> None:
        self.cached = cached
        self.new: collections.deque[PartialRequest] = collections.deque()
        self.sourced: collections.deque[PartialRequest] = collections.deque()
        # how many of `new` have each prompt: hashing all prompts in every round takes long
        self._prompts: collections.Counter[Prompt] = collections.Counter()

    def __len__(self) -> int:
        return len(self.new) + len(self.cached or ()) + len(self.sourced)

    @property
    def prompts(self) -> Collection[Prompt]:
        """Return the prompts of `new`: rows that hold them are overwritten last."""
        return self._prompts.keys()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the requests that the rollout began with."""
        new = self._without_cached([PartialRequest(r) for r in requests])
        self.new.extend(new)
        self._prompts.update(p.request.prompt_ids for p in new)

    def add_sourced(self, requests: Sequence[PartialRequest]) -> None:
        """Queue requests that come while it runs."""
        self.sourced.extend(self._without_cached(requests))

    def take_new(self, most: int) -> list[PartialRequest]:
        """Take the next of `new`, up to `most`."""
        taken = [self.new.popleft() for _ in range(min(most, len(self.new)))]
        for p in taken:
            self._prompts[p.request.prompt_ids] -= 1
            if not self._prompts[p.request.prompt_ids]:
                del self._prompts[p.request.prompt_ids]
        return taken

    def _without_cached(self, requests: Sequence[PartialRequest]) -> list[PartialRequest]:
        """Queue the requests that start from a cached response, and return the others.

        One that has tokens already is past its cached response.
        """
        if self.cached is None:
            return list(requests)
        self.cached.add([p for p in requests if p.may_reuse])
        return [p for p in requests if not p.may_reuse]
