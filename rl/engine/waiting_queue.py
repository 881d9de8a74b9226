"""Requests of a phase that have no row yet."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from rl.engine import admission
from rl.engine.prefix_verification import PrefixVerifier
from rl.trajectory import PartialRequest, Request, RequestChunk


@dataclasses.dataclass(frozen=True)
class WaitingQueue:
    """Requests to be answered afresh, those with cached responses, and those that were fed.

    `cached` is None where cached responses are of no use.
    """

    cached: PrefixVerifier | None = None
    afresh: collections.deque[Request] = dataclasses.field(default_factory=collections.deque)
    fed: collections.deque[RequestChunk] = dataclasses.field(default_factory=collections.deque)
    # how many of `afresh` have each prompt: hashing all prompts at every beat would take long
    _prompts: collections.Counter[admission.Prompt] = dataclasses.field(
        default_factory=collections.Counter
    )

    def __len__(self) -> int:
        return len(self.afresh) + len(self.cached or ()) + len(self.fed)

    @property
    def prompts(self) -> Collection[admission.Prompt]:
        """That rows had better go on holding."""
        return self._prompts.keys()

    def add(self, requests: Sequence[Request]) -> None:
        """The requests of the phase, all at once."""
        afresh = [r for r in requests if not self._may_reuse(r)]
        self.afresh.extend(afresh)
        self._prompts.update(r.prompt_ids for r in afresh)
        if self.cached is not None:
            self.cached.add([RequestChunk(PartialRequest(r)) for r in requests if r.may_reuse])

    def take_afresh(self, most: int) -> list[Request]:
        """The next ones, up to `most`."""
        taken = [self.afresh.popleft() for _ in range(min(most, len(self.afresh)))]
        for r in taken:
            self._prompts[r.prompt_ids] -= 1
            if not self._prompts[r.prompt_ids]:
                del self._prompts[r.prompt_ids]
        return taken

    def add_fed(self, chunks: Sequence[RequestChunk]) -> None:
        """Requests that come while it runs; one that has begun is past its cached response."""
        new = [c.begun.prefix is None and self._may_reuse(c.begun.request) for c in chunks]
        self.fed.extend(c for c, is_new in zip(chunks, new, strict=True) if not is_new)
        if self.cached is not None:
            self.cached.add([c for c, is_new in zip(chunks, new, strict=True) if is_new])

    def _may_reuse(self, request: Request) -> bool:
        return self.cached is not None and request.may_reuse
