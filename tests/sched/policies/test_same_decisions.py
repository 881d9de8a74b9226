"""Schedulers decide as the ones that look through everything after each event.

These say what is meant; the indices of the real ones must never make a difference.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest
from random_cluster import RandomCluster, random_work

from reprise.sched.policies.divided import SPARE, ContextAware, Divided, Fifo, LazyHeap
from reprise.sched.request import Status

SEQUENCES = 60  # of each scheduler


class PlainWorkers:
    """All workers are looked through for the one with the most room."""

    def __init__(self, workers):
        self._workers = workers

    def update(self, worker_id):
        """Nothing is kept."""

    def least_loaded(self):
        free = [w for w in self._workers.values() if len(w.running) < w.max_requests]
        return min(free, key=lambda w: (-w.free_tokens, w.worker_id), default=None)


class PlainSeer:
    """Seer's order, by looking through all groups."""

    def __init__(self, seed, explore):
        self._rng, self._explore = np.random.default_rng(seed), explore
        self._probes, self._probe_of = [], {}
        self._waiting, self._groups = collections.defaultdict(list), {}

    def push(self, request, group):
        if self._probe_of.setdefault(group.group_id, request.request_id) == request.request_id:
            self._probes.append(request)
        else:
            first = 0 if request.generated_tokens else len(self._waiting[group.group_id])
            self._waiting[group.group_id].insert(first, request)
            self._groups[group.group_id] = group

    def put_back(self, request, group):
        if self._probe_of[group.group_id] == request.request_id:
            self._probes.append(request)
        else:
            self._waiting[group.group_id].insert(0, request)

    def group_changed(self, group):
        if not group.num_unfinished:
            self._probe_of.pop(group.group_id, None)
            self._waiting.pop(group.group_id, None)

    def pop(self):
        if self._probes:
            first = min(self._probes, key=lambda r: (r.generated_tokens, r.request_id))
            self._probes.remove(first)
            return first
        waiting = [self._groups[g] for g, requests in self._waiting.items() if requests]
        by_service = self._explore and self._rng.random() < self._explore
        if not waiting:
            return None
        if by_service:
            group = min(waiting, key=lambda g: (g.served_tokens, g.group_id))
        else:
            group = min(waiting, key=lambda g: (-g.estimated_tokens, g.group_id))
        return self._waiting[group.group_id].pop(0)


class PlainDivided(Divided):
    def __init__(self, order, **more):
        super().__init__(order, **more)
        self._heap = PlainWorkers(self._ledger.workers)

    def _refuse_what_never_fits(self, request, needed_tokens):
        assert self._ledger.num_running == sum(
            r.status is Status.RUNNING for r in self._ledger.requests.values()
        )
        super()._refuse_what_never_fits(request, needed_tokens)


class Both:
    """Two schedulers that are told the same, and must answer the same."""

    def __init__(self, scheduler, plain):
        self.scheduler, self._plain, self.num_actions = scheduler, plain, 0

    @property
    def num_unfinished(self):
        return self.scheduler.num_unfinished

    def handle(self, event, now_s):
        actions = self.scheduler.handle(event, now_s)
        assert actions == self._plain.handle(event, now_s), event
        self.num_actions += len(actions)
        return actions


def play(both, rng):
    workers, limit = int(rng.integers(1, 9)), int(rng.integers(2, 40))
    sizes = {"groups": int(rng.integers(1, 12)), "size": int(rng.integers(1, 6)), "limit": limit}
    requests, lengths = random_work(rng, **sizes, known=False)
    room = {
        "kv_tokens": 3 + limit + int(rng.integers(0, 60)),
        "max_requests": int(rng.integers(1, 8)),
    }
    cluster = RandomCluster(both, requests, lengths, rng, **room, budgeted=True)
    cluster.play(workers=workers, deaths=float(rng.choice([0, 0.02, 0.1])))


def divided(kind, order):
    return kind(order, chunk_tokens=5, prefer_pool=lambda tokens: tokens % 3 > 0)


def pair(name, seed):
    rng = np.random.default_rng(seed)
    if name == "divided_fifo":
        return divided(Divided, Fifo()), divided(PlainDivided, Fifo())
    explore = float(rng.choice([0, 0.05, 0.5]))
    return (
        divided(Divided, ContextAware(seed=seed, explore=explore)),
        divided(PlainDivided, PlainSeer(seed, explore)),
    )


@pytest.mark.parametrize("name", ["divided_fifo", "seer"])
def test_decisions_are_those_of_looking_through_everything(name):
    decided = 0
    for seed in range(SEQUENCES):
        both = Both(*pair(name, seed))
        play(both, np.random.default_rng(seed))
        decided += both.num_actions
    assert decided > 20 * SEQUENCES


def test_a_heap_has_the_least_of_keys_that_change_and_no_more_than_twice_their_number():
    rng = np.random.default_rng(0)
    heap, keys = LazyHeap(), {}
    for _ in range(5000):
        number = int(rng.integers(12))
        if rng.random() < 0.2:
            heap.drop(number)
            keys.pop(number, None)
        else:
            key = int(rng.integers(20))
            heap.set(number, key)
            keys[number] = key
        assert len(heap) == len(keys)
        assert len(heap._heap) <= 2 * 12 + SPARE
        assert heap.first() == min(keys, key=lambda n: (keys[n], n), default=None)
