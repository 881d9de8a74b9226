"""A run of the engine in a worker's program: its requests come from the other program by messages.

Give → inbox → engine's thread → events → answer of Poll
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats
from rl.remote.drafter_messages import Caught, Tuner
from rl.remote.messages import Job
from rl.remote.records import of_stats
from rl.remote.run_messages import (
    Answered,
    ChunkEnded,
    Copied,
    Dropped,
    Event,
    Give,
    Parked,
    Report,
)
from rl.remote.wire import WireError
from rl.runtime.waits import code_line
from rl.trajectory import PartialRequest, Trajectory
from rl.workers.drive import drive
from spec.eagle.batch import HiddenStates

MOST_STATES_BYTES = 2**26  # of hidden states in a report, but for its last ones


class RunAborted(Exception):
    """The run was aborted."""


class WorkerRun:
    """One run, in a thread of its own; also its engine's `RequestSource`, and its sink.

    `tuner` returns the state of the worker's bandit.
    """

    def __init__(
        self,
        number: int,
        job: Job,
        engine: Engine,
        spec: Callable[[], AbstractContextManager[RolloutSpec]],
        tuner: Callable[[], Tuner | None] = lambda: None,
    ) -> None:
        self.number, self.job, self._engine, self._spec = number, job, engine, spec
        self._tuner = tuner
        self.most_requests, self.longest_tokens = job.most_requests, job.longest_tokens
        self.kv_tokens = job.kv_tokens
        self.stats, self.rounds = EngineStats(), 0
        self._inbox: queue.SimpleQueue[Give | None] = queue.SimpleQueue()
        self._drops: list[int] = []  # that the engine is to hear of
        self._copies: list[tuple[int, int]] = []
        self._closed = self._aborted = self.ended = self.lets_go = False
        self._events: collections.deque[Event] = collections.deque()
        self._wanted: collections.deque[int] = collections.deque()  # whose states are on their way
        self._grants: dict[int, int] = {}
        # how often a request was dropped that the engine has not heard of: its end needs no grant
        self._ending: collections.Counter[int] = collections.Counter()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"run-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def where(self) -> str:
        """Return the line of code that it is at."""
        return code_line(self._thread.ident or 0)

    # -- called for the other program ----------------------------------------------------

    def give(self, given: Give) -> None:
        """Take requests and grants, and what is to be done with requests that run."""
        with self._changed:
            for number in given.drops:
                self._grants.pop(number, None)
            self._ending.update(given.drops)
            self._grants.update(given.grants)
            self.lets_go |= given.lets_go
            self._inbox.put(given)
            self._changed.notify_all()

    def report(self, wait_s: float) -> Report:
        """Wait for events or the end; raise what the run has raised once all is told."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self.ended, wait_s)
            events = self._take_events()
            if self.ended and self._error is not None and not events:
                raise self._error
            over = self.ended and self._error is None and not self._events
            stats, tuner = (of_stats(self.stats), self._tuner()) if over else (None, None)
        return Report(self.number, events, self.rounds, self.stats.tokens, stats, tuner)

    def abort(self, limit_s: float) -> bool:
        """End the run; return whether it has ended within the limit."""
        with self._changed:
            self._aborted = True
            self._inbox.put(None)
            self._changed.notify_all()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _take_events(self) -> tuple[Event, ...]:
        """Return what has happened, up to about the bytes of hidden states that a report has."""
        taken: list[Event] = []
        num_bytes = 0
        while self._events and num_bytes < MOST_STATES_BYTES:
            taken.append(self._events.popleft())
            if isinstance(taken[-1], Caught):
                num_bytes += taken[-1].hidden_TW.nbytes
        return tuple(taken)

    # -- called by the engine's thread ---------------------------------------------------

    def take(self, *, wait: bool) -> Sequence[PartialRequest] | None:
        taken: list[PartialRequest] = []
        try:
            while True:  # what is dropped or copied is heard to the end
                given = self._inbox.get(block=wait and not self._closed)
                wait = False
                if given is None:
                    break
                taken = [p for p in taken if p.request.request_id not in given.drops]
                taken += given.starts
                self._drops += given.drops
                self._copies += given.copies
                self._closed |= given.closed
        except queue.Empty:
            pass
        self._leave_if_aborted()
        return taken if taken or not self._closed else None

    def dropped(self) -> Sequence[int]:
        """Return the requests to drop, and say that they are: the engine says no more of them."""
        drops, self._drops = self._drops, []
        with self._changed:
            self._ending.subtract(drops)
        for number in drops:
            self._tell(Dropped(number))
        return drops

    def copies(self) -> Sequence[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def copied(self, number: int, partial: PartialRequest | None) -> None:
        if partial is None:
            self._tell(Copied(number, None, None))
        else:
            prefix = partial.prefix if partial.num_tokens else None
            self._tell(Copied(number, prefix, partial.kv))

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        self._tell(ChunkEnded(request_id, response_tokens))
        with self._changed:  # the program ends where nobody speaks to it any more
            self._changed.wait_for(
                lambda: (
                    request_id in self._grants
                    or self._ending[request_id] > 0
                    or self._aborted
                    or self.lets_go
                )
            )
            self._leave_if_aborted()
            return self._grants.pop(request_id, 0)

    def park(self, leaving: Sequence[PartialRequest]) -> None:
        for partial in leaving:
            request_id = partial.request.request_id
            self._tell(Parked(request_id, partial.prefix, partial.kv))

    def wants(self, request_id: int, num_tokens: int) -> bool:
        sample = self.job.caught
        wanted = sample is not None and request_id in sample
        if wanted:
            self._wanted.append(request_id)
        return wanted

    def add(self, sequence: HiddenStates) -> None:
        request_id = self._wanted.popleft()  # they come in the order in which they were wanted
        tokens_T = np.asarray(sequence.tokens_T, np.int32)
        rest = sequence.prompt_tokens, sequence.hidden_TW, sequence.policy_version
        self._tell(Caught(request_id, tokens_T, *rest))

    def _finished(self, trajectory: Trajectory) -> None:
        self._tell(Answered(trajectory))

    def _on_round(self, finished: int, tokens: int) -> None:
        self.rounds += 1
        self._leave_if_aborted()

    def _tell(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _leave_if_aborted(self) -> None:
        if self._aborted:
            raise RunAborted

    def _run(self) -> None:
        try:
            with self._spec() as spec:
                sink = None if self.job.caught is None else self
                drive(
                    self._engine,
                    dataclasses.replace(spec, sink=sink),
                    self,
                    stats=self.stats,
                    on_finish=self._finished,
                    on_round=self._on_round,
                )
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()


def check_kv(engine: Engine, partial: PartialRequest) -> None:
    """Raise WireError for keys and values that are not those of this request in this engine."""
    if partial.kv is None:
        return
    entries, model = partial.kv.entries, engine.model
    shape = model.num_kv_heads, len(partial.token_ids) - 1, model.head_dim
    found = {(x.shape, x.dtype) for x in entries.values}
    if len(entries.values) != model.num_layers or found != {(shape, engine.dtype)}:
        raise WireError(
            f"request {partial.request.request_id}: expected keys and values of "
            f"{model.num_layers} layers of {shape} of {engine.dtype}, got {len(entries.values)} of "
            f"{sorted(map(str, found))[0]}"
        )
    layers = engine.feature_layers
    width = () if layers is None else (model.d_model * (len(layers) + 1),)
    states = [(x.shape, x.dtype) for x in entries.features]
    wanted = [((1, shape[1], n), engine.dtype) for n in width]
    if states != wanted or entries.feature_layers != (layers or ()):
        raise WireError(f"expected hidden states of {wanted or 'no layers'} with it, got {states}")
