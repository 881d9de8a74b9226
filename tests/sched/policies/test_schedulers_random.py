"""Every scheduler under random orders of events, deaths and restarts of workers.

Each request finishes exactly once, memory is never promised twice, nothing starves.
"""

from __future__ import annotations

import numpy as np
import pytest
from random_cluster import RandomCluster, random_steps, random_work

from reprise.sched.policies.divided import ORDERS, Divided
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.histopipe import HistoPipe, HistoPipeConfig
from reprise.sched.policies.steps import StepOrder

SEQUENCES = 100  # of each scheduler


def make(name, seed, chunk):
    if name == "group_fifo":
        return GroupFifo(seed=seed)
    return Divided(ORDERS[name](seed), chunk_tokens=chunk)


def shared_work(length, requests):
    return length * requests


def play(scheduler, name, rng):
    limit = int(rng.integers(2, 40))
    requests, lengths = random_work(
        rng,
        groups=int(rng.integers(1, 6)),
        size=int(rng.integers(1, 5)),
        limit=limit,
        known=name == "oracle",
    )
    cluster = RandomCluster(
        scheduler,
        requests,
        lengths,
        rng,
        kv_tokens=3 + limit + int(rng.integers(0, 60)),
        max_requests=int(rng.integers(1, 8)),
        budgeted=name != "group_fifo",
    )
    cluster.play(workers=int(rng.integers(1, 4)), deaths=float(rng.choice([0, 0.02, 0.1])))


@pytest.mark.parametrize("name", ["group_fifo", *ORDERS])
def test_each_request_finishes_once_whatever_dies(name):
    for seed in range(SEQUENCES):
        rng = np.random.default_rng(seed)
        play(make(name, seed, int(rng.integers(1, 12))), name, rng)


@pytest.mark.parametrize("name", ["histopipe", "sync", "one_step_off"])
def test_steps_finish_once_whatever_dies(name):
    moved = 0
    for seed in range(SEQUENCES):
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(2, 6))
        if name == "histopipe":
            groups, share = int(rng.integers(1, 4)), float(rng.uniform(0.1, 1))
            tau = None if seed % 3 else lambda: shared_work
            scheduler = HistoPipe(HistoPipeConfig(steps, groups, share, tau=tau))
        else:
            scheduler = StepOrder(GroupFifo(seed=seed), name)
        requests, lengths = random_steps(
            rng,
            further=seed % 2 == 0,
            steps=steps,
            groups=int(rng.integers(1, 5)),
            size=int(rng.integers(1, 4)),
            limit=int(rng.integers(2, 40)),
        )
        cluster = RandomCluster(
            scheduler, requests, lengths, rng, kv_tokens=10**6, max_requests=99, budgeted=False
        )
        cluster.play(workers=int(rng.integers(1, 4)), deaths=float(rng.choice([0, 0.02, 0.1])))
        moved += scheduler.num_moved if name == "histopipe" else 0
    if name == "histopipe":
        assert moved > 20, "outliers are to be met"
