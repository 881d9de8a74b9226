"""Workers whose calls a test runs, in the order that it chooses; their engines compute nothing."""

import collections
import contextlib
import dataclasses
import itertools
import math
from concurrent.futures import Future

import numpy as np
from replay import Recorded

from reprise.rl.engine.engine import ChunkEnd
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import FinishReason, HostKv, PartialRequest, Prefix, Trajectory
from reprise.rl.sessions.session import Session
from reprise.rl.slots.config import EngineConfig
from reprise.rl.workers.messages import WorkerLimits
from reprise.rl.workers.worker import RolloutWorker


@dataclasses.dataclass(eq=False)
class Row:
    partial: PartialRequest
    tokens: int
    until: int


class CountingEngine:
    """Gives each of its requests a token a step: token n of request r is (r + n) % 97.

    `lengths` are those of responses, by number.
    """

    config = EngineConfig(slots=4, min_slots=4)

    def __init__(self, lengths, slots=4):
        self.lengths, self.slots, self.number = lengths, slots, 0
        self.stats = EngineStats()
        self.clock = itertools.count().__next__  # a call runs one step

    def place(self, params):
        return params

    @contextlib.contextmanager
    def rollout(self, spec, *, max_requests, max_tokens, kv_tokens, stats):
        self.stats, self.waiting, self.rows = stats, collections.deque(), {}
        yield

    @property
    def has_work(self):
        return bool(self.waiting or self.rows)

    def add(self, requests):
        self.waiting.extend(requests)

    def step(self):
        while self.waiting and len(self.rows) < self.slots:
            partial = self.waiting.popleft()
            number = partial.request.request_id
            assert number not in self.rows, "a request runs once in a worker"
            if partial.kv is not None:
                assert partial.kv.tokens == partial.num_tokens
            until = partial.num_tokens + partial.max_tokens
            self.rows[number] = Row(partial, partial.num_tokens, until)
        events = []
        for number, row in list(self.rows.items()):
            assert row.tokens < row.until, "it was extended or taken"
            row.tokens += 1
            self.stats.tokens += 1
            if row.tokens == self.lengths[number % 2**40]:
                events.append(trajectory(self.rows.pop(number)))
            elif row.tokens == row.until:
                events.append(ChunkEnd(number, row.tokens))
        return events

    def extend(self, request_id, max_tokens):
        self.rows[request_id].until += max_tokens

    def take(self, request_ids):
        yield [state(self.rows.pop(number)) for number in request_ids if number in self.rows]

    def copy(self, request_id):
        return state(self.rows[request_id]) if request_id in self.rows else None

    def remove(self, request_ids):
        for number in request_ids:
            self.rows.pop(number, None)
        kept = [p for p in self.waiting if p.request.request_id not in request_ids]
        self.waiting = collections.deque(kept)

    def release(self):
        left = [state(row).without_kv() for row in self.rows.values()]
        left += [p.without_kv() for p in self.waiting]
        self.rows, self.waiting = {}, collections.deque()
        return left


@dataclasses.dataclass(frozen=True)
class Kv(HostKv):
    """Keys and values that are only counted."""

    entries: None = None
    tokens: int = 0

    @property
    def num_tokens(self):
        return self.tokens

    @property
    def num_bytes(self):
        return 8 * self.tokens


def arrays(request, tokens):
    ids = ((request.request_id % 2**40 + np.arange(tokens)) % 97).astype(np.int32)
    floats = np.zeros(tokens, np.float32)
    return ids, floats, ids, floats.astype(np.uint8)


def state(row):
    ids, floats, versions, origins = arrays(row.partial.request, row.tokens)
    prefix = Prefix(ids, floats, floats, versions, origins, 0, None)
    return PartialRequest(row.partial.request, prefix, Kv(tokens=row.tokens))


def trajectory(row):
    request = row.partial.request
    ids, floats, versions, origins = arrays(request, row.tokens)
    known = row.partial.num_tokens
    if known:
        assert row.partial.prefix.response_ids.tolist() == ids[:known].tolist()
    own = request.request_id, request.group_id, request.sample_index
    prompt = np.asarray(request.prompt_ids, np.int32)
    rest = prompt, ids, floats, versions, origins, FinishReason.STOP
    return Trajectory(*own, *rest, emission_logprobs=floats)


class ManualPlace:
    """A place whose calls wait for `run`, or are lost."""

    may_return, is_ready, hang_limit_s, where = False, True, float("inf"), "here"

    def __init__(self, number, lengths, slots):
        self.name, self._lengths, self._slots = f"worker {number}", lengths, slots
        self.calls = collections.deque()

    def announce(self, spec):
        pass

    def join(self, limits):
        self.worker = RolloutWorker(CountingEngine(self._lengths, self._slots), limits)

    def call(self, commands):
        return self._submit(lambda: self.worker.step(commands, 0.0))

    def leave(self, *, abort):
        return self._submit(lambda: self.worker.close(abort=abort))

    def nudge(self):
        pass

    def abandon(self):
        self.calls.clear()

    def run(self):
        future, work = self.calls.popleft()
        future.set_result(work())

    def lose(self, error=None):
        future, _ = self.calls.popleft()
        future.set_exception(error or RuntimeError("a device is gone"))

    def _submit(self, work):
        future = Future()
        self.calls.append((future, work))
        return future


def manual_driver(scheduler, lengths, count, slots=4, pool_bytes=2**30, **limits):
    """Return a session that the test runs, and its workers' places."""
    places = [ManualPlace(i, lengths, slots) for i in range(count)]
    own = WorkerLimits(**{"kv_tokens": 10**6, "max_requests": slots, "max_tokens": 10**4} | limits)
    options = {"pool_bytes": pool_bytes, "can_restart": True}
    recorded = Recorded(scheduler)
    limits = {"clock": lambda: 0.0, "hang_limit_s": math.inf}
    session = Session(places, recorded, own, **limits, **options)
    session.decisions = recorded.decisions
    return session, places
