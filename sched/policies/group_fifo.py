"""The baseline, which binds whole groups to a worker, as in synchronous trainers.

All requests start immediately; each worker admits and preempts requests as its memory allows.
"""

from __future__ import annotations

import collections

import numpy as np

from reprise.sched.ledger import Ledger
from reprise.sched.protocol import Action, Event, WorkerJoined, WorkerLost
from reprise.sched.request import RequestState, Worker


class GroupFifo:
    """A round-robin assignment of groups to instances, in an order shuffled by `seed`.

    An instance is `ranks_per_instance` consecutive workers, and deals its requests to these workers
    round-robin. The requests of a lost worker are dealt to the other workers. An event takes O(1),
    plus O(1) for each dealt request; the first deal after workers joined or were lost takes
    O(workers) more.
    """

    def __init__(self, *, seed: int, ranks_per_instance: int = 1) -> None:
        if ranks_per_instance < 1:
            raise ValueError(f"expected ranks_per_instance >= 1, got {ranks_per_instance}")
        self._rng = np.random.default_rng(seed)
        self._ranks = ranks_per_instance
        self._ledger = Ledger()
        self._waiting: dict[int, list[RequestState]] = {}  # group → unassigned requests
        self._instances: dict[int, list[Worker]] = {}  # rebuilt when empty
        self._dealt = 0
        self._dealt_in: collections.Counter[int] = collections.Counter()  # by instance

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        for request in self._ledger.apply(event):
            self._waiting.setdefault(request.group_id, []).append(request)
        if isinstance(event, WorkerJoined | WorkerLost):
            self._instances.clear()
        if not self._ledger.workers or not self._waiting:
            return []
        instances = self._instances
        if not instances:
            for worker_id, worker in self._ledger.workers.items():
                instances.setdefault(worker_id // self._ranks, []).append(worker)
        numbers = list(instances)
        groups = list(self._waiting.values())
        self._waiting = {}
        actions: list[Action] = []
        for i in self._rng.permutation(len(groups)).tolist():
            number = numbers[self._dealt % len(numbers)]
            self._dealt += 1
            for request in groups[i]:
                ranks = instances[number]
                worker = ranks[self._dealt_in[number] % len(ranks)]
                self._dealt_in[number] += 1
                actions.append(
                    self._ledger.start(request, worker, request.remaining_tokens, reserve=False)
                )
        return actions
