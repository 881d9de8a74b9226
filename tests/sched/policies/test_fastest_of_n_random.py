"""Copies of stragglers under random events: workers die, reports come late, requests are begun.

Each request ends once, nothing is done on workers or to requests that are not there, and no worker
idles beside a request that has no copy.
"""

from __future__ import annotations

import numpy as np
import pytest
from random_cluster import AheadCluster, CopiesCluster, random_work

from reprise.sched.policies.divided import ORDERS, Divided, Fifo
from reprise.sched.policies.fastest_of_n import FastestOfN
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.steps import Ahead
from reprise.sched.request import RequestSpec


def play(scheduler, name, rng, budgeted, most_requests):
    limit = int(rng.integers(2, 40))
    requests, lengths = random_work(
        rng,
        groups=int(rng.integers(1, 6)),
        size=int(rng.integers(1, 4)),
        limit=limit,
        known=name == "oracle",
    )
    kv_tokens = 3 + limit + int(rng.integers(0, 60)) if budgeted else 10**6
    cluster = CopiesCluster(
        *(scheduler, requests, lengths, rng),
        **{"kv_tokens": kv_tokens, "max_requests": int(rng.integers(1, 6)) if budgeted else 99},
        budgeted=budgeted,
        most_requests=most_requests,
    )
    cluster.play(workers=int(rng.integers(1, 6)), deaths=float(rng.choice([0, 0.02, 0.1])))
    return cluster


class SometimesBlocked(Divided):
    """A scheduler that lets requests wait now and then, while a worker has room."""

    rng: np.random.Generator

    def _dispatch(self):
        if self._ledger.num_running and self.rng.random() < 0.3:
            return []
        return super()._dispatch()


def random_scheduler(name, seed, rng):
    chunk = int(rng.integers(1, 12))
    if name == "group_fifo":
        inner = GroupFifo(seed=seed)
    elif name == "blocked":
        inner = SometimesBlocked(Fifo(), chunk_tokens=chunk)
        inner.rng = rng
    else:
        inner = Divided(ORDERS[name](seed), chunk_tokens=chunk)
    most = int(rng.integers(1, 5))
    return FastestOfN(inner, num_methods=int(rng.integers(1, 4)), max_copies=most), most


@pytest.mark.parametrize("name", ["group_fifo", "blocked", *ORDERS])
def test_each_request_ends_once_whatever_dies(name):
    won = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        scheduler, most = random_scheduler(name, seed, rng)
        budgeted = name != "group_fifo" and seed % 2 == 0
        won += play(scheduler, name, rng, budgeted, most).won
    assert won > 20, "copies are to be met"


class BothCluster(CopiesCluster, AheadCluster):
    """The next step is begun beside copies of this one's stragglers."""


def play_steps(seed):
    """Steps in turn on a scheduler that begins the next one; how many answers were copies'."""
    rng = np.random.default_rng(seed)
    scheduler, most = random_scheduler("divided_fifo", seed, rng)
    # a dry worker begins the next step's first, until a request is worth a copy
    least, limit = int(rng.integers(0, 20)), int(rng.integers(2, 30))
    scheduler._worth = lambda held, left: held >= least
    size, groups, count = (int(rng.integers(1, 4)) for _ in range(3))
    steps = [
        [
            RequestSpec((s * groups + g) * size + i, s * groups + g, 3, limit)
            for i in range(size)
            for g in range(groups)
        ]
        for s in range(count)
    ]
    flat = [r for step in steps for r in step]
    lengths = {r.request_id: int(rng.integers(1, limit + 1)) for r in flat}
    cluster = BothCluster(
        *(Ahead(scheduler, chunk_tokens=int(rng.integers(1, 12))), flat, lengths, rng),
        **{"kv_tokens": 10**6, "max_requests": 99, "most_requests": most},
        **{"budgeted": True, "all_are_worth_it": False},
    )
    cluster.play(steps, workers=int(rng.integers(1, 5)), deaths=float(rng.choice([0, 0.02, 0.1])))
    return cluster


def test_copies_beside_what_is_begun_whatever_dies():
    won = recalled = 0
    for seed in range(80):
        cluster = play_steps(seed)
        won, recalled = won + cluster.won, recalled + cluster.recalled_for_copies
    assert won > 20 and recalled > 4, "both are to be met"
