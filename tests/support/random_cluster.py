"""A cluster that obeys a scheduler, in a random order of events, with workers that die.

It keeps its own books: whatever the scheduler does wrong fails an assertion here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sched.protocol import (
    ChunkDone,
    Defer,
    Finished,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from sched.request import Kv, RequestSpec


@dataclasses.dataclass
class Running:
    start: Start
    generated: int  # when it started


class RandomCluster:
    def __init__(self, scheduler, requests, lengths, rng, *, kv_tokens, max_requests, budgeted):
        self.scheduler, self.lengths, self.rng = scheduler, lengths, rng
        self.requests = {spec.request_id: spec for spec in requests}
        self.kv_tokens, self.max_requests, self.budgeted = kv_tokens, max_requests, budgeted
        self.workers: dict[int, dict[int, Running]] = {}
        self.generated = dict.fromkeys(self.requests, 0)  # of whole chunks
        self.pooled: set[int] = set()
        self.finished: list[int] = []
        self.now_s, self.next_worker = 0.0, 0
        self.late: list[Finished] = []  # reports of dead workers, still under way

    def play(self, *, workers: int, deaths: float) -> None:
        for _ in range(workers):
            self.join()
        self.step_of = {spec.request_id: spec.step for spec in self.requests.values()}
        self.updates = 0
        for requests in by_step(self.requests.values()):
            first = tuple(spec for spec in requests if not spec.urgent)
            self.tell(Submitted(first))
            if len(first) < len(requests):  # what the step before asks once its others are done
                self.tell(Submitted(requests[len(first) :]))
        steps = 0
        while len(self.finished) < len(self.requests):
            steps += 1
            assert steps < 100 * len(self.requests) + 1000, "starved"
            self.train()
            self.now_s += float(self.rng.exponential())
            if self.rng.random() < deaths:
                self.lose_one()
            elif not self.workers or (len(self.workers) < workers and self.rng.random() < 0.3):
                self.join()
            else:
                self.report_one()
        assert self.scheduler.num_unfinished == 0
        assert not any(self.workers.values())

    def train(self) -> None:
        """The update of the next step, where all its requests have finished."""
        unfinished = {self.step_of[r] for r in self.requests if r not in self.finished}
        if unfinished and self.updates < min(unfinished):
            self.updates += 1
            self.tell(Trained(self.updates - 1))

    def join(self) -> None:
        self.workers[self.next_worker] = {}
        self.next_worker += 1
        self.tell(WorkerJoined(self.next_worker - 1, self.kv_tokens, self.max_requests))

    def lose_one(self) -> None:
        if not self.workers:
            return
        worker_id = int(self.rng.choice(list(self.workers)))
        for running in self.workers.pop(worker_id).values():
            start = running.start
            tokens = running.generated + start.max_tokens
            self.late.append(Finished(start.request_id, worker_id, start.chunk, tokens))
        self.tell(WorkerLost(worker_id))
        if self.late and self.rng.random() < 0.5:
            self.tell(self.late.pop())

    def report_one(self) -> None:
        busy = [worker for worker, running in self.workers.items() if running]
        assert busy, "requests wait, and nothing runs"
        worker_id = int(self.rng.choice(busy))
        self.report(worker_id, int(self.rng.choice(list(self.workers[worker_id]))))

    def report(self, worker_id: int, request_id: int) -> None:
        """The request has used up the tokens of its start, or has ended."""
        running = self.workers[worker_id].pop(request_id)
        length, most = self.lengths[request_id], running.generated + running.start.max_tokens
        chunk = running.start.chunk
        if length <= most:
            assert request_id not in self.finished
            self.finished.append(request_id)
            self.tell(Finished(request_id, worker_id, chunk, length))
        else:
            self.generated[request_id] = most
            self.pooled.add(request_id)
            self.tell(ChunkDone(request_id, worker_id, chunk, most, True))

    def tell(self, event) -> None:
        chunk_done = isinstance(event, ChunkDone)
        self.held = (event.request_id, event.worker_id) if chunk_done else None
        for action in self.scheduler.handle(event, self.now_s):
            if isinstance(action, Defer):
                self.step_of[action.request_id] += 1
            else:
                self.obey(action)

    def obey(self, action) -> None:
        request_id, spec = action.request_id, self.requests[action.request_id]
        assert request_id not in self.finished
        assert all(request_id not in running for running in self.workers.values()), "runs twice"
        worker = self.workers[action.worker_id]
        generated = self.generated[request_id]
        assert 0 < action.max_tokens <= spec.max_new_tokens - generated
        assert action.kv is not Kv.POOL or request_id in self.pooled
        assert action.kv is not Kv.HELD or self.held == (request_id, action.worker_id)
        worker[request_id] = Running(action, generated)
        if self.budgeted:
            assert len(worker) <= self.max_requests
            most = sum(
                self.requests[r].prompt_tokens + x.generated + x.start.max_tokens
                for r, x in worker.items()
            )
            assert most <= self.kv_tokens, "what runs may come to exceed the memory"


def by_step(requests):
    """The requests of each step, steps in order; halves where there is one step only."""
    steps: dict[int, list[RequestSpec]] = {}
    for spec in requests:
        steps.setdefault(spec.step, []).append(spec)
    if len(steps) > 1:
        return [tuple(step) for step in steps.values()]
    (only,) = steps.values()
    return [tuple(only[: len(only) // 2]), tuple(only[len(only) // 2 :])]


def random_steps(rng, *, steps: int, groups: int, size: int, limit: int, further: bool = False):
    """(requests, lengths) of several steps, each prompt with what its last epoch was like.

    With `further` the last group of a step is asked later, where there are several.
    """
    requests, lengths = [], {}
    for step in range(steps):
        for group in range(groups):
            typical = int(rng.integers(1, limit + 1))
            past = tuple(np.clip(rng.normal(typical, limit / 10, size), 1, limit).astype(int))
            for _ in range(size):
                number, name = len(requests), step * groups + group
                lengths[number] = int(np.clip(rng.normal(typical, limit / 4), 1, limit))
                requests.append(
                    RequestSpec(
                        *(number, name, 3, limit, None, tuple(map(int, past)), step),
                        urgent=further and 0 < group == groups - 1,
                    )
                )
    return requests, lengths


def random_work(rng, *, groups: int, size: int, limit: int, known: bool):
    """(requests, lengths): groups of requests whose lengths are alike."""
    requests, lengths = [], {}
    for sample in range(size):
        for group in range(groups):
            number = group * size + sample
            typical = np.random.default_rng(group).integers(1, limit + 1)
            length = int(np.clip(rng.normal(typical, limit / 10), 1, limit))
            lengths[number] = length
            requests.append(RequestSpec(number, group, 3, limit, length if known else None))
    return requests, lengths
