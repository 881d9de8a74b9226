"""Requests of the next step on dry workers: by hand, and under random events with deaths."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from random_cluster import AheadCluster

from reprise.sched.policies.divided import ContextAware, Divided, Fifo
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.steps import Ahead
from reprise.sched.protocol import (
    ChunkDone,
    Drop,
    Finished,
    Profiled,
    Recall,
    Recalled,
    Return,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
)
from reprise.sched.request import Kv, RequestSpec

BEGUN = 100  # added to the numbers of what is begun


def scheduler(workers=2, chunk=10, present=None, max_requests=4, kv_tokens=1000):
    made = Ahead(present or Divided(Fifo(), chunk_tokens=50), chunk_tokens=chunk)
    for worker_id in range(workers):
        assert made.handle(WorkerJoined(worker_id, kv_tokens, max_requests), 0.0) == []
    return made


def present(*numbers, **fields):
    return Submitted(tuple(RequestSpec(i, i, 5, 50, **fields) for i in numbers))


def begun(*numbers, past=()):
    pairs = zip(numbers, past or [()] * len(numbers), strict=True)
    return Submitted(
        tuple(
            RequestSpec(i + BEGUN, i, 5, 50, past_tokens=tokens, ahead=True) for i, tokens in pairs
        )
    )


def started(actions):
    return [(a.request_id, a.worker_id) for a in actions if isinstance(a, Start)]


def test_a_worker_begins_the_next_step_once_it_has_run_dry():
    s = scheduler()
    assert started(s.handle(present(0, 1, 2), 0.0)) == [(0, 0), (1, 1), (2, 0)]
    assert s.handle(begun(0, 1), 0.0) == []
    assert s.handle(Finished(0, 0, 1, 20), 1.0) == [], "another one runs there"
    assert started(s.handle(Finished(2, 0, 1, 20), 1.0)) == [(BEGUN, 0), (BEGUN + 1, 0)]
    assert s.num_unfinished == 1, "what is begun keeps nobody waiting"
    assert s.handle(Finished(1, 1, 1, 30), 2.0) == []
    assert s.num_unfinished == 0


def test_early_chunks_of_the_longest_expected_go_first():
    s = scheduler(workers=1, max_requests=2)
    past = [(10, 12), (40, 30), (), (20,)]  # nothing known: as long as can be
    actions = s.handle(begun(0, 1, 2, 3, past=past), 0.0)
    assert started(actions) == [(BEGUN + 2, 0), (BEGUN + 1, 0)]
    assert started(s.handle(ChunkDone(BEGUN + 2, 0, 1, 10, True), 1.0)) == [(BEGUN + 3, 0)]
    assert started(s.handle(Finished(BEGUN + 1, 0, 1, 4), 1.0)) == [(BEGUN, 0)]
    # then second chunks
    (again,) = s.handle(ChunkDone(BEGUN, 0, 1, 10, True), 2.0)
    assert (again.request_id, again.chunk, again.kv) == (BEGUN + 2, 2, Kv.POOL)


def test_a_lone_request_keeps_its_row_from_chunk_to_chunk():
    s = scheduler(workers=1)
    s.handle(begun(0), 0.0)
    (again,) = s.handle(ChunkDone(BEGUN, 0, 1, 10, True), 1.0)
    assert again.kv is Kv.HELD


def test_a_worker_that_was_recalled_holds_no_row():
    """Also if the start that needed it is dropped before it has released the requests."""
    copy = Start(0, 0, 1, 50, 55, Kv.PREFILL)
    answers = {Trained: [copy], Profiled: [Drop(0, 0)]}
    stub = SimpleNamespace(handle=lambda event, now_s: answers.get(type(event), []))
    s = scheduler(workers=1, present=stub)
    s.handle(begun(0), 0.0)
    assert s.handle(Trained(0), 1.0) == [Recall(0), copy]
    assert s.handle(Profiled({}), 2.0) == [Drop(0, 0)]
    (again,) = s.handle(ChunkDone(BEGUN, 0, 1, 10, True), 3.0)
    assert again.kv is Kv.POOL


def test_what_let_go_of_its_worker_is_held_nowhere():
    """The present step's requests come and go between: the row is another one's by then."""
    s = scheduler(workers=1)
    s.handle(begun(0), 0.0)
    assert s.handle(present(0), 1.0)[0] == Recall(0)
    assert s.handle(ChunkDone(BEGUN, 0, 1, 3, True), 1.0) == []
    (again,) = s.handle(Finished(0, 0, 1, 20), 2.0)
    assert (again.request_id, again.kv) == (BEGUN, Kv.POOL)


def test_what_is_begun_yields_at_once():
    s = scheduler()
    assert started(s.handle(begun(0, 1), 0.0)) == [(BEGUN, 0), (BEGUN + 1, 1)]
    actions = s.handle(present(0), 1.0)
    assert actions[0] == Recall(0) and started(actions) == [(0, 0)]
    # what left goes on elsewhere, from what it has
    (elsewhere,) = s.handle(ChunkDone(BEGUN, 0, 1, 7, True), 1.0)
    assert (elsewhere.request_id, elsewhere.worker_id, elsewhere.max_tokens) == (BEGUN, 1, 10)


def test_recalled_requests_come_back_from_wherever_they_are():
    s = scheduler(workers=2, max_requests=1)
    s.handle(present(0, 1), 0.0)
    s.handle(begun(0, 1, 2), 0.0)
    assert started(s.handle(Finished(0, 0, 1, 20), 1.0)) == [(BEGUN, 0)]
    s.handle(Finished(1, 1, 1, 20), 1.0)
    actions = s.handle(Recalled(), 2.0)
    assert set(actions) == {Recall(0), Recall(1), Return(BEGUN + 2)}
    assert s.handle(ChunkDone(BEGUN, 0, 1, 7, True), 2.0) == [Return(BEGUN)]
    assert s.handle(Finished(BEGUN + 1, 1, 1, 9), 2.0) == [], "it has ended, whole"
    # and the next step is as if nothing had been begun
    assert len(started(s.handle(present(2, 3), 3.0))) == 2
    assert s.handle(begun(0, 1), 3.0) == []


@pytest.mark.parametrize("name", ["group_fifo", "seer"])
def test_all_come_back_whatever_dies(name):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        chunk, limit = int(rng.integers(1, 12)), int(rng.integers(2, 30))
        inner = GroupFifo(seed=seed)
        if name == "seer":
            inner = Divided(ContextAware(seed=seed), chunk_tokens=chunk)
        size, groups, steps = (int(rng.integers(1, 4)) for _ in range(3))
        requests = [
            [
                RequestSpec(((s * groups) + g) * size + i, s * groups + g, 3, limit)
                for i in range(size)
                for g in range(groups)
            ]
            for s in range(steps)
        ]
        flat = [r for step in requests for r in step]
        lengths = {r.request_id: int(rng.integers(1, limit + 1)) for r in flat}
        most = int(rng.integers(1, 6))
        cluster = AheadCluster(
            *(Ahead(inner, chunk_tokens=chunk), flat, lengths, rng),
            **{"kv_tokens": 3 + limit + int(rng.integers(0, 60)), "max_requests": most},
            budgeted=name == "seer",
        )
        deaths = float(rng.choice([0, 0.02, 0.1]))
        cluster.play(requests, workers=int(rng.integers(1, 4)), deaths=deaths)
