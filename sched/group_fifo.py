"""Whole groups bound to a worker, as synchronous trainers do it: the baseline.

All is handed out at once; each worker admits, and pre-empts, as its own memory allows.
"""

from __future__ import annotations

import numpy as np

from sched.ledger import Ledger
from sched.protocol import Action, Event
from sched.request import Request


class GroupFifo:
    """Groups are dealt in turn to the workers, in an order shuffled by `seed`.

    A worker that was lost leaves its requests to the others, in turn as well.
    """

    def __init__(self, *, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._ledger = Ledger()
        self._waiting: dict[int, list[Request]] = {}  # group → requests that no worker has
        self._dealt = 0

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        for request in self._ledger.apply(event):
            self._waiting.setdefault(request.ask.group_id, []).append(request)
        workers = list(self._ledger.workers.values())
        if not workers or not self._waiting:
            return []
        groups, self._waiting = list(self._waiting.values()), {}
        actions: list[Action] = []
        for i in self._rng.permutation(len(groups)).tolist():
            worker = workers[self._dealt % len(workers)]
            self._dealt += 1
            for request in groups[i]:
                actions.append(
                    self._ledger.start(request, worker, request.remaining_tokens, reserve=False)
                )
        return actions
