"""Device drafters with a separate cache, as rollouts use them.

A draft takes one call once the cache is complete, and one fetch if the host needs the draft. A =
live requests, X = draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.cache import DraftCache
from reprise.spec.draft_cache.drafting import Inputs, draft, unpack
from reprise.spec.drafter import (
    Arguments,
    Drafter,
    Drafts,
    LiveSlots,
    Program,
    RoundsDrafter,
    RoundsInput,
    Source,
    fill,
    no_drafts,
)


class CachingDrafter(Drafter, Protocol):
    """The drafter of one worker for one rollout; subclasses define the inputs of their programs.

    Drafts are up to `depth` tokens deep; `depth` may change between rounds. Call all methods under
    the mesh or default device of the runner.
    """

    source: Source
    depth: int
    max_tokens: int
    missing_tokens: int = 0  # last tokens without entries after rounds on the device
    _held: DraftCache
    _sampling: SamplingConfig

    def constants(self) -> Any:
        """Return the current constants of `Drafting`."""
        ...

    def features(self) -> tuple[Any, ...]:
        """Return the policy features, if the drafter reads them."""
        return ()

    def empty_features(self, num_slots: int) -> tuple[Any, ...]:
        """Return zeroed features, to compile programs with."""
        return ()

    def reach(self) -> int:
        """Return the depth of the next drafts."""
        return self.depth

    def note_drafts(
        self, live: LiveSlots, rows_A: np.ndarray, tokens_AX: np.ndarray, count_A: np.ndarray
    ) -> None:
        """Record the entries of these requests that the cache has after a draft."""
        ...

    def observe_chains(self, acceptance_A2: np.ndarray) -> None:
        """Learn the acceptance of chains, as returned by `CachedRows.follow`."""
        return

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Return a tree for each request that may have draft tokens."""
        drafts = no_drafts(len(live), max_nodes)
        held = self._held
        drafts.sources_AN[:] = self.source
        max_A = np.minimum(max_nodes_A, max_nodes).astype(np.int32)
        chosen_A = np.nonzero(max_A > 0)[0]
        if not len(chosen_A):
            return drafts
        some = live.take(chosen_A)
        max_A = max_A[chosen_A]
        features = self.features()
        depth = min(self.reach(), int(max_A.max()))  # the best n draft tokens are n deep at most
        rows_A, acceptance_A2 = held.follow(live, some, (self.constants(), features))
        self.observe_chains(acceptance_A2)
        has_room_A = held.has_room(rows_A)
        if not has_room_A.all():
            some = some.take(np.nonzero(has_room_A)[0])
            rows_A = rows_A[has_room_A]
            chosen_A = chosen_A[has_room_A]
            max_A = max_A[has_room_A]
        if not len(chosen_A):
            return drafts
        table_BX = held.ends(some, rows_A, max_A, self._sampling)
        inputs = self.constants(), features
        args, options = self._draft_arguments(inputs, held.taken(), table_BX, depth)
        held.arrays, packed = draft(*args, **options)
        tokens_AX, parents_AX, prob_AX, drafted_A = (x[rows_A] for x in unpack(packed))
        count_A = np.minimum(drafted_A, max_A)
        self.note_drafts(some, rows_A, tokens_AX, count_A)
        return fill(drafts, chosen_A, tokens_AX, parents_AX, prob_AX, count_A)

    def finished(self, live: LiveSlots) -> None:
        rows = self._held.rows
        held = live.take(rows.has(live))
        if len(held):
            self.observe_chains(rows.follow(held)[1])
            rows.ended(held)

    # -- rounds on the device ----------------------------------------------------------

    def in_rounds(self) -> RoundsDrafter | None:
        return self

    def enter_rounds(self, live: LiveSlots, max_tokens: int) -> RoundsInput:
        held = self._held
        inputs = (self.constants(), self.features())
        rows_A, acceptance_A2 = held.follow(live, live, inputs)
        self.observe_chains(acceptance_A2)
        max_A = np.where(held.has_room(rows_A), max_tokens, 0)
        return self._rounds_input(held.taken(), held.ends(live, rows_A, max_A, self._sampling))

    def leave_rounds(self, live: LiveSlots, cache: KVCache, acceptance_X2: np.ndarray) -> None:
        self._held.arrays = cache
        self._held.complete(live, self.missing_tokens)
        self.observe_chains(acceptance_X2)

    def empty_rounds(self, num_slots: int) -> RoundsInput:
        held = self._held
        return self._rounds_input(held.empty(num_slots), held.empty_ends(num_slots))

    def _rounds_input(self, cache: KVCache, table_RX: Any) -> RoundsInput:
        return RoundsInput(self._held.drafting, cache, self.constants(), table_RX, self.reach())

    # -- programs ------------------------------------------------------------------------

    def programs(self, num_slots: int) -> Iterator[Program]:
        """Yield the jitted steps of rollouts in this bucket, and factories of their arguments."""
        held = self._held

        def given() -> Inputs:
            return self.constants(), self.empty_features(num_slots)

        def drafting() -> Arguments:
            cache = held.empty(num_slots)
            table_BX = held.empty_ends(num_slots)
            return self._draft_arguments(given(), cache, table_BX, 1)

        yield draft, drafting
        yield from held.programs(num_slots, given)

    def _draft_arguments(
        self, given: Inputs, cache: KVCache, table_BX: Any, depth: int
    ) -> Arguments:
        options = {"drafting": self._held.drafting, "max_tokens": self.max_tokens}
        return (given, cache, table_BX, np.int32(depth)), options
