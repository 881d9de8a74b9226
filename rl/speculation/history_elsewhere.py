"""The index of a step's prompts, where other programs have built it, each a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from rl.trajectory import Prompt
from spec.reuse.rollout_cache import RolloutCache


@dataclasses.dataclass(frozen=True)
class Indexed:
    """The index `name`, of which each program at `addresses` has a shard."""

    name: str
    addresses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A program's part of an index: these prompts, of whose responses it has `num_tokens`.

    Responses to `damaged` could not be read.
    """

    address: str
    keys: tuple[str, ...]
    num_tokens: int
    damaged: tuple[str, ...] = ()


class IndexBuilder(Protocol):
    """Programs that build indexes (`rl.remote.history_workers.HistoryWorkers`)."""

    def build(
        self, prompts: Mapping[str, Prompt], cache: RolloutCache
    ) -> tuple[str, tuple[Shard, ...]]:
        """Have the index of these prompts built; return its name and the shards that are there.

        What is lost or late is left out. The cache is read in this thread alone.
        """
        ...

    def has(self, shard: Shard) -> bool:
        """Return whether the shard's program is still there."""
        ...
