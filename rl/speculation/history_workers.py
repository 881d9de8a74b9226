"""History workers: actors that each build a shard of the index for the prompts of a step.

The run sends the cached groups of a step while the previous step trains, and rollout workers fetch
the shards from the Ray object store. Losing a worker costs its prompts their drafts in one step, or
time.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np

from reprise.rl.cluster import ray_session
from reprise.rl.cluster.actors import Actor, ActorSettings, Starts
from reprise.rl.records.trajectory import Prompt
from reprise.rl.runtime.waits import ProgramLost
from reprise.spec.retrieval.history import HistoryIndex, build_index
from reprise.spec.retrieval.suffix_forest import ProposalRule
from reprise.spec.reuse.rollout_cache import CachedGroup, CacheFileError, RolloutCache, decode


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The part of an index that worker `worker` built in its start number `start`.

    `trees` refers to its `HistoryIndex` in the Ray object store. Groups of `damaged` keys were left
    out.
    """

    worker: int
    start: int
    keys: tuple[str, ...]
    num_tokens: int
    damaged: tuple[str, ...]
    trees: Any


class HistoryActor:
    """An actor that builds shards for `rule`, from groups of one policy and vocabulary."""

    def __init__(self, rule: ProposalRule, policy: str, vocab_size: int) -> None:
        self._rule = rule
        self._policy = policy
        self._vocab_size = vocab_size

    def ready(self) -> None:
        """Return immediately."""

    def build(
        self, blobs: Mapping[str, bytes], tails: Mapping[str, np.ndarray]
    ) -> tuple[int, tuple[str, ...], Any]:
        """Return the number of tokens, the damaged keys, and a reference to the shard."""
        groups = dict[str, CachedGroup]()
        damaged = list[str]()
        for key, blob in blobs.items():
            try:
                groups[key] = decode(blob, key, self._policy, self._vocab_size)
            except CacheFileError:
                damaged.append(key)
        index = build_index(groups, {key: tails[key] for key in groups}, self._rule)
        return index.num_tokens, tuple(damaged), ray_session.share(index)


class HistoryWorkers:
    """The history workers of a run; a checksum of the prompt key selects the worker."""

    def __init__(
        self,
        rule: ProposalRule,
        cache: RolloutCache,
        count: int,
        room: Starts,
        settings: ActorSettings,
    ) -> None:
        """Start the actors."""
        args = (rule, cache.policy, cache.vocab_size)
        target = f"{__name__}:{HistoryActor.__name__}"
        self.actors = [
            Actor(f"history worker {i}", target, args, settings, room, i) for i in range(count)
        ]
        self._tail_tokens = rule.longest
        self._settings = settings

    def wait_started(self) -> None:
        """Wait until all workers have started. Raises ProgramLost if a worker cannot serve."""
        for ready in [actor.call("ready", is_work=False) for actor in self.actors]:
            ready.result()

    def close(self) -> None:
        for actor in self.actors:
            actor.close()

    def has(self, shard: Shard) -> bool:
        """Return whether the program that built the shard is still running."""
        actor = self.actors[shard.worker]
        return actor.is_there and actor.num_starts == shard.start

    def build(self, prompts: Mapping[str, Prompt], cache: RolloutCache) -> tuple[Shard, ...]:
        """Build the index of these prompts; leave out shards that are lost or late."""
        blobs: list[dict[str, bytes]] = [{} for _ in self.actors]
        for key in prompts:
            if (blob := cache.blob(key)) is not None:
                blobs[self.worker_of(key)][key] = blob
        sent = {}
        shards = list[Shard]()
        late_s = self._settings.deadline_s
        for i, actor in enumerate(self.actors):
            if blobs[i] and actor.is_there:
                tails = {
                    key: np.asarray(prompts[key][-self._tail_tokens :], np.int32)
                    for key in blobs[i]
                }
                built = actor.call("build", blobs[i], tails, limit_s=math.inf)
                sent[built] = i, actor.num_starts
        late = wait(sent, late_s).not_done
        for built, (i, start) in sent.items():
            try:
                if built in late:
                    raise TimeoutError(f"no index within {late_s:.0f} s")
                num_tokens, damaged, trees = built.result()
            except Exception as error:
                self._settings.say(
                    f"{self.actors[i].name}: {error}; its prompts' groups go to the rollout workers"
                )
            else:
                shards.append(Shard(i, start, tuple(blobs[i]), num_tokens, damaged, trees))
        return tuple(shards)

    def worker_of(self, key: str) -> int:
        return zlib.crc32(key.encode()) % len(self.actors)


def history_index(
    groups: Mapping[str, CachedGroup],
    prompts: Mapping[str, np.ndarray],
    shards: Sequence[Any],
    rule: ProposalRule,
    limit_s: float,
    say: Callable[[str], None],
) -> HistoryIndex:
    """Return the index of these groups and shards; report shards that take over `limit_s`."""
    trees = dict(build_index(groups, {key: prompts[key] for key in groups}, rule).trees)
    for part in ray_session.fetch(shards, limit_s) if shards else ():
        if isinstance(part, ProgramLost):
            say(f"it drafts without a part of the history: {part}")
        else:
            trees |= part.trees
    return HistoryIndex(trees)
