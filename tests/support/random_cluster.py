"""A cluster that obeys a scheduler, in a random order of events, with workers that die.

It keeps its own books: whatever the scheduler does wrong fails an assertion here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from reprise.sched.protocol import (
    ChunkDone,
    Copy,
    Defer,
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
    WorkerLost,
)
from reprise.sched.request import COPIES, Kv, RequestSpec, copy_of

BEGUN = 1000  # added to the numbers of requests that are begun ahead of their step


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


class AheadCluster(RandomCluster):
    """Steps in turn, the next one ahead; whoever lets go has a part of its chunk."""

    def play(self, steps, *, workers, deaths):
        self.count, self.deaths = workers, deaths
        for _ in range(workers):
            self.join()
        for step, requests in enumerate(steps):
            self.tell(Submitted(tuple(requests)))
            self.open = {}
            if step + 1 < len(steps):
                ahead = [
                    dataclasses.replace(r, request_id=r.request_id + BEGUN, ahead=True)
                    for r in steps[step + 1]
                ]
                self.open = {r.request_id: r for r in ahead}
                self.requests |= self.open
                self.generated |= dict.fromkeys(self.open, 0)
                self.lengths |= {r: self.lengths[r - BEGUN] for r in self.open}
                self.tell(Submitted(tuple(ahead)))
            self.until(lambda wanted=requests: all(r.request_id in self.finished for r in wanted))
            for _ in range(int(self.rng.integers(0, 20))):  # an update
                self.something()
            self.tell(Recalled())
            self.until(lambda: not self.open)
            self.finished = [r for r in self.finished if r < BEGUN]
            assert self.scheduler.num_unfinished == 0 and not any(self.workers.values())

    def until(self, done):
        for _ in range(5000):
            if done():
                return
            self.something()
        raise AssertionError("starved")

    def something(self):
        self.now_s += 1.0
        if self.rng.random() < self.deaths:
            self.lose_one()
        elif not self.workers or (len(self.workers) < self.count and self.rng.random() < 0.3):
            self.join()
        elif any(self.workers.values()):
            self.report_one()

    def report_one(self):
        before = set(self.finished)
        super().report_one()
        for request_id in set(self.finished) - before:
            self.open.pop(request_id, None)

    def obey(self, action):
        if isinstance(action, Return):
            assert all(action.request_id not in running for running in self.workers.values())
            del self.open[action.request_id]
            return
        if isinstance(action, Recall):
            for running in self.workers[action.worker_id].values():
                assert BEGUN <= running.start.request_id < COPIES
                most = int(self.rng.integers(0, running.start.max_tokens + 1))
                running.start = running.start._replace(max_tokens=most)  # what it has by then
            return
        kinds = {r >= BEGUN for r in self.workers[action.worker_id]}
        if action.request_id >= BEGUN:
            assert kinds <= {True}, "a worker that is not dry begins nothing"
        let_go = {r: x for r, x in self.workers[action.worker_id].items() if r >= BEGUN}
        if action.request_id < BEGUN:  # it takes the place of what has been told to leave
            for request_id in let_go:
                del self.workers[action.worker_id][request_id]
        super().obey(action)
        if action.request_id < BEGUN:
            self.workers[action.worker_id] |= let_go


class CopiesCluster(RandomCluster):
    """Originals and copies run side by side; whichever ends first answers the request."""

    def __init__(self, *args, most_requests, all_are_worth_it=True, **options):
        super().__init__(*args, **options)
        self.most_requests, self.all_are_worth_it = most_requests, all_are_worth_it
        self.submitted: set[int] = set()
        self.stale: list[Finished] = []  # reports of what was dropped, as it ended
        self.won = self.recalled_for_copies = 0

    def originals(self):
        """Where requests run, but for those that are begun ahead of their step."""
        return {r: w for w, x in self.workers.items() for r in x if r < BEGUN}

    def copies(self):
        return {r: w for w, x in self.workers.items() for r in x if copy_of(r)[1]}

    def report_one(self):
        if self.rng.random() < 0.1:
            some = [r for r in self.submitted if r not in self.finished]
            self.tell(Profiled({r: float(self.rng.random()) for r in some}))
        if self.stale and self.rng.random() < 0.5:
            late = self.stale.pop()
            if late.request_id not in self.workers.get(late.worker_id, ()):
                self.tell(late)
        super().report_one()

    def report(self, worker_id, number):
        request_id, copy = copy_of(number)
        if not copy:
            super().report(worker_id, number)
            return
        start = self.workers[worker_id].pop(number).start
        assert request_id not in self.finished, "it was to be dropped"
        self.finished.append(request_id)
        self.won += 1
        assert self.lengths[request_id] <= start.max_tokens
        self.tell(Finished(number, worker_id, start.chunk, self.lengths[request_id]))

    def tell(self, event):
        if isinstance(event, Submitted):
            self.submitted |= {r.request_id for r in event.requests if not r.ahead}
        super().tell(event)
        open_requests = self.submitted - set(self.finished)
        assert self.scheduler.num_unfinished == len(open_requests)
        assert {copy_of(r)[0] for r in self.copies()} <= open_requests
        assert set(self.originals()) <= open_requests
        self.check_nobody_idles(open_requests)

    def check_nobody_idles(self, open_requests):
        """Where copies may be made, a worker has none only if all requests have one."""
        if self.budgeted or not self.all_are_worth_it or not open_requests:
            return
        if set(self.originals()) != open_requests:
            return  # something waits
        answered = {copy_of(r)[0] for r in self.copies()}
        if not all(self.workers.values()):
            assert answered == open_requests, "a worker idles beside a request without a copy"

    def obey(self, action):
        if isinstance(action, Copy):
            self.copy(action)
        elif isinstance(action, Drop):
            self.drop(action)
        elif not isinstance(action, Start):
            super().obey(action)
        else:
            assert not copy_of(action.request_id)[1]
            assert not any(copy_of(r)[1] for r in self.workers[action.worker_id])
            super().obey(action)

    def copy(self, action):
        start, worker = action.start, self.workers[action.start.worker_id]
        request_id, number = copy_of(start.request_id)
        spec = self.requests[request_id]
        assert request_id == action.request_id and number
        assert action.request_id in self.workers[action.worker_id], "it does not run there"
        assert set(self.originals()) == self.submitted - set(self.finished), "something waits"
        assert start.request_id not in self.copies(), "runs twice"
        let_go = {r: worker.pop(r) for r in list(worker) if BEGUN <= r < COPIES}
        self.recalled_for_copies += bool(let_go)
        assert {copy_of(r)[1] for r in worker} <= {number}, "a worker has one method"
        assert (start.max_tokens, start.kv) == (spec.max_new_tokens, Kv.POOL)
        worker[start.request_id] = Running(start, 0)
        assert len(worker) <= min(self.most_requests, self.max_requests)
        assert sum(x.start.reserved_tokens for x in worker.values()) <= self.kv_tokens
        worker |= let_go

    def drop(self, action):
        request_id, number = copy_of(action.request_id)
        worker = self.workers[action.worker_id]
        if not number:
            assert request_id in self.finished
            if request_id not in worker:  # it waited, and was answered: it was never started
                assert request_id not in self.originals()
                return
        assert action.request_id in worker, "it does not run there"
        running = worker.pop(action.request_id)
        length, chunk = self.lengths[request_id], running.start.chunk
        self.stale.append(Finished(action.request_id, action.worker_id, chunk, length))


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
