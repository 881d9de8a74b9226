"""The history workers of a run: each has the prompts whose keys' checksums are its own.

What a run sees is `rl.speculation.history_elsewhere.IndexBuilder`. The groups themselves stay in
the run's rollout cache: a worker that is lost costs its prompts drafts for a while, or time.
"""

from __future__ import annotations

import collections
import itertools
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rl.remote import history_service
from rl.remote.history_service import Build, Built, Feed, Lacks, Meet, Prepare, PromptTail
from rl.remote.link import Channel, Link, RemoteError
from rl.remote.messages import Done, Ping
from rl.remote.service import MOST_STARTS, Service, ServiceDeadlines, service_identity, wait_started
from rl.runtime.waits import ProgramLost
from rl.speculation.history_elsewhere import Shard
from rl.speculation.sources import HISTORY_RULES
from rl.trajectory import Prompt
from spec.reuse.rollout_cache import RolloutCache, checksum

T = TypeVar("T")
BEAT_S = 2.0  # between two signs of life
MOST_FEED_BYTES = 2**26  # of a message, but for one group alone
MOST_AWAITED = 4  # steps whose responses are sent once they are in the cache
Connect = Callable[[int, str], Channel]  # starts a worker by number, to be reached by that name


class HistoryWorkers:
    """Programs that keep cached groups, and build the indexes of steps to come.

    `source` names the rule that drafts; each program keeps at most `most_bytes` of groups.
    """

    def __init__(
        self,
        source: str,
        cache: RolloutCache,
        count: int,
        connect: Connect,
        config_text: str,
        deadlines: ServiceDeadlines,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        identity, run = service_identity(config_text), secrets.token_hex(8)
        shape = source, cache.policy, cache.vocab_size, cache.memory_bytes
        meet = Meet(identity, deadlines.silence_s, *shape)
        names = f"history-{run}"
        self.workers = [
            _HistoryWorker(i, meet, names, connect, deadlines, say) for i in range(count)
        ]
        self._tail_tokens = HISTORY_RULES[source].longest
        self._late_s = deadlines.answer_s
        self._start_s = MOST_STARTS * (deadlines.start_s + deadlines.answer_s)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="history workers")
        self._numbers = itertools.count(1)
        # of the last steps: what their prompts' groups were, which their responses replace
        self._awaited: collections.deque[dict[str, int | None]]
        self._awaited = collections.deque(maxlen=MOST_AWAITED)

    def start(self) -> None:
        """Start all; return once they are there. Raises ProgramLost where one cannot serve."""
        for worker in self.workers:
            worker.start()
        wait_started(self.workers, self._start_s)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def has(self, shard: Shard) -> bool:
        return any(worker.address == shard.address and worker.is_there for worker in self.workers)

    def build(
        self, prompts: Mapping[str, Prompt], cache: RolloutCache
    ) -> tuple[str, tuple[Shard, ...]]:
        """See `IndexBuilder.build`: groups go to the programs, which build side by side.

        Responses of earlier steps, which are in the cache now, are sent beside it.
        """
        name = f"index {next(self._numbers)}"
        shares: dict[_HistoryWorker, dict[str, PromptTail]] = {
            worker: {} for worker in self.workers if worker.is_there
        }
        sums = dict[str, int | None]()
        for key, ids in prompts.items():
            blob = cache.blob(key)
            sums[key] = None if blob is None else checksum(blob)
            if (worker := self._of(key)) in shares:
                tail = np.asarray(ids[-self._tail_tokens :], np.int32)
                shares[worker][key] = PromptTail(tail, sums[key])
        asked = {worker: Prepare(name, share) for worker, share in shares.items()}
        lacks = self._ask_all(asked, Lacks)
        fed = self._feed({worker: said.keys for worker, said in lacks.items()}, cache)
        building = self._ask_all(dict.fromkeys(fed, Build(name, 0.0)), Built)
        until_s = time.monotonic() + self._late_s
        self._feed(self._made(building, cache), cache)
        self._awaited.append(sums)
        shards = []
        for worker, built in self._wait(name, building, until_s).items():
            worker.worked = True
            keys = tuple(key for key, tail in shares[worker].items() if tail.checksum is not None)
            if keys:
                shards.append(Shard(worker.address, keys, built.num_tokens, built.damaged))
        return name, tuple(shards)

    def _of(self, key: str) -> _HistoryWorker:
        return self.workers[zlib.crc32(key.encode()) % len(self.workers)]

    def _made(
        self, there: Iterable[_HistoryWorker], cache: RolloutCache
    ) -> dict[_HistoryWorker, list[str]]:
        """Return the prompts of earlier steps that have new groups by now, by worker."""
        made: dict[_HistoryWorker, list[str]] = {worker: [] for worker in there}
        for sums in self._awaited:
            for key in list(sums):
                blob = cache.blob(key)
                if blob is not None and checksum(blob) != sums[key]:
                    del sums[key]
                    if (worker := self._of(key)) in made:
                        made[worker].append(key)
        return made

    def _feed(
        self, keys: Mapping[_HistoryWorker, Iterable[str]], cache: RolloutCache
    ) -> list[_HistoryWorker]:
        """Send groups, a message to each worker at a time; return the workers that have them."""
        left = {worker: collections.deque(some) for worker, some in keys.items()}
        while any(left.values()):
            asked = {w: Feed(_batch(some, cache)) for w, some in left.items() if some}
            done = self._ask_all(asked, Done)
            left = {w: some for w, some in left.items() if w in done or w not in asked}
        return list(left)

    def _wait(
        self, name: str, building: Mapping[_HistoryWorker, Built], until_s: float
    ) -> dict[_HistoryWorker, Built]:
        """Return what is built by then; a worker that is late goes on by itself."""
        built = {worker: said for worker, said in building.items() if said.done}
        left = [worker for worker in building if worker not in built]
        while left and (left_s := until_s - time.monotonic()) > 0:
            wait_s = min(BEAT_S, left_s, self._late_s / 4)  # an answer has its deadline too
            asked = dict.fromkeys(left, Build(name, wait_s))
            said = self._ask_all(asked, Built)
            built |= {worker: one for worker, one in said.items() if one.done}
            left = [worker for worker in said if worker not in built]
        for worker in left:
            worker.say(f"{worker.name}: no index within {self._late_s:.0f} s; its prompts' groups "
                       "go to the rollout workers")  # fmt: skip
        return built

    def _ask_all(
        self, asked: Mapping[_HistoryWorker, Any], kind: type[T]
    ) -> dict[_HistoryWorker, T]:
        """Ask several at once; return the answers of those that are not lost."""
        sent = {w: self._threads.submit(w.ask, message, kind) for w, message in asked.items()}
        found: dict[_HistoryWorker, T] = {}
        for worker, answer in sent.items():
            said = answer.result()  # each question has its own deadline
            if said is not None:
                found[worker] = said
        return found


def _batch(keys: collections.deque[str], cache: RolloutCache) -> dict[str, bytes]:
    """Take groups of about the bytes of a message."""
    batch, num_bytes = dict[str, bytes](), 0
    while keys and num_bytes < MOST_FEED_BYTES:
        blob = cache.blob(key := keys.popleft())
        if blob is not None:
            batch[key] = blob
            num_bytes += len(blob)
    return batch


class _HistoryWorker(Service):
    """One history worker; `address` is the name by which its present program is reached."""

    def __init__(
        self,
        number: int,
        meet: Meet,
        names: str,
        connect: Connect,
        deadlines: ServiceDeadlines,
        say: Callable[[str], None],
    ) -> None:
        self.address, self._starts = "", itertools.count(1)
        self._meet, self._names, self._number = meet, names, number
        start = partial(self._start, connect)
        super().__init__(f"history worker {number}", history_service.CODEC, start, deadlines, say)
        self.say = say
        self._serves: Link | None = None

    def _start(self, connect: Connect) -> Channel:
        self.address = f"{self._names}-{self._number}-{next(self._starts)}"
        return connect(self._number, self.address)

    @property
    def is_there(self) -> bool:
        return self._serves is not None and self._serves.lost is None

    def ask(self, message: Any, kind: type[T]) -> T | None:
        """Return the answer to a message; None where the program is lost, or becomes so."""
        link = self._serves
        if link is None:
            return None
        try:
            return link.ask(message, kind)
        except RemoteError as error:
            link.lose(str(error))
        except ProgramLost:  # said where it is started again
            pass
        return None

    def hello(self) -> tuple[Meet, Mapping[str, str]]:
        return self._meet, self._meet.identity

    def prepare(self, link: Link) -> None:
        """It is told what to keep by questions."""

    def serve(self, link: Link) -> None:
        self._serves = link
        while not self._over.wait(BEAT_S):
            link.ask(Ping(), Done)

    def lost(self, why: str) -> None:
        self._serves = None
        again = "" if self.given_up is not None else "; it is started again"
        self.say(f"{why}; the groups of its prompts go to the rollout workers{again}")
