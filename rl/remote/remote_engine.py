"""An engine whose rounds run in another program: a worker's thread here speaks for it.

    scheduler ⇄ coordinator ⇄ WorkerSource ⇄ RemoteEngine.run ⇄ link ⇄ WorkerProgram ⇄ engine

The thread waits for starts and for answers at once, and sends nothing where nothing has happened.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from models.config import ModelConfig
from models.transformer import Params
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine, OnFinish, OnRound
from rl.engine.rollout_spec import RequestSource, RolloutSpec
from rl.engine.stats import EngineStats
from rl.remote.jobs import Jobs
from rl.remote.link import Link, RemoteError
from rl.remote.messages import (
    Abort,
    Answered,
    Begin,
    ChunkEnded,
    Done,
    Give,
    Parked,
    Poll,
    Report,
)
from rl.remote.records import enter_stats
from rl.remote.worker import LEAVING_S, MOST_VERSIONS, check_kv
from rl.runtime.waits import ProgramLost
from rl.trajectory import PartialRequest, Request, Trajectory
from rl.weights.offers import VersionId
from rl.workers.worker_source import WorkerSource

POLL_WAIT_S = 1.0  # that a worker has nothing to tell for, before it says so


class RemoteEngine(Engine):
    """A worker of another program, as a scheduler's workers have engines.

    `connect` reaches or starts the program, tells it who it is and has it compile: in a thread,
    again after each loss. Its weights are published by `jobs`, which the engines of a run share.
    A program that has requests and whose engine has no round for `hang_limit_s` hangs.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: Any,
        number: int,
        jobs: Jobs,
        hang_limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(model, config, dtype=dtype, number=number, clock=clock)
        self._jobs, self.hang_limit_s = jobs, hang_limit_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self.later_s = 0.0  # this program's clock less the other's
        self._versions: list[int] = []  # of the weights that are there
        self._have: VersionId | None = None  # the base of the next deltas
        self._number = 0  # of the last run
        self.pid, self.host = 0, ""  # of the program
        self.runs = False
        self.given_up, self._why = False, f"worker program {number} has not started"
        self.has_worked = False  # since it was connected

    # -- the program ---------------------------------------------------------------------

    @property
    def link(self) -> Link | None:
        """The link to the program; None where there is none, or it is lost."""
        link = self._link
        return None if link is None or link.lost is not None else link

    @property
    def where(self) -> str:
        return f"{self.host}, process {self.pid}"

    @property
    def is_ready(self) -> bool:
        return self.link is not None

    @property
    def may_return(self) -> bool:
        return not self.given_up

    def connected(self, link: Link, later_s: float, have: VersionId | None = None) -> None:
        """Run over `link` from now on, whose program has these weights."""
        with self._lock:
            self.later_s, self.has_worked = later_s, False
            self._have, self._versions = have, [] if have is None else [have.version]
            self._link = link

    def failed_to_start(self, why: str) -> None:
        """Note why there is no program."""
        with self._lock:
            self._why, self._link = why, None

    def why_lost(self) -> str:
        """Return why there is no link."""
        link = self._link
        return str(link.lost) if link is not None and link.lost is not None else self._why

    @property
    def last_name(self) -> str:
        """The name of the link that there was last; empty where there was none."""
        return "" if self._link is None else self._link.name

    def abandoned(self) -> Engine:
        """End the program, which hangs; the engine stays, and comes back with another one."""
        if self._link is not None:
            self._link.lose("it hangs, and is ended", silent=True)
        return self

    def place(self, params: Params, model: ModelConfig | None = None) -> Params:
        """Publish weights, which `run` has fetched where they are needed."""
        assert model is None, "weights of other models do not leave this program"
        self._jobs.weights.publish(params)
        return params

    # -- the rollout -----------------------------------------------------------------------

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        source: RequestSource | None = None,
        stats: EngineStats | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """See `Engine.run`; `source` is that of a worker in a group, which brings all requests.

        Raises ProgramLost where the program is lost, and RemoteError for what it has raised.
        """
        assert isinstance(source, WorkerSource) and not requests, "a worker of a group"
        link, self.stats = self.link, stats or EngineStats()
        if link is None:
            raise ProgramLost(f"worker program {self.number} is not there")
        self._number += 1
        self.runs, begun = True, False
        try:
            job = self._jobs.job(spec, source)
            self._bring_weights(link, spec.params)
            link.ask(Begin(self._number, job), Done)
            begun = True
            _Conversation(self, link, self._number, source, on_finish, on_round).run()
        except (ProgramLost, RemoteError):
            raise
        except BaseException:
            if begun:
                self._abort(link)
            raise
        finally:
            self.runs = False
        return []

    def _bring_weights(self, link: Link, params: Params) -> None:
        weights = self._jobs.weights
        version = weights.publish(params)
        if version not in self._versions:
            self._have = weights.bring(link, self._have, version, params, self.hang_limit_s)
            new = {version} if self._have is None else {version, self._have.version}
            self._versions = sorted({*self._versions, *new})[-MOST_VERSIONS:]

    def _abort(self, link: Link) -> None:
        """Have the program end its run; end the program where it does not."""
        try:
            link.ask(Abort(self._number), Done, 2 * LEAVING_S)
        except RemoteError as error:
            link.lose(str(error))
        except ProgramLost:
            return


class _Conversation:
    """One run: what the source brings goes there, what is reported comes back."""

    def __init__(
        self,
        engine: RemoteEngine,
        link: Link,
        number: int,
        source: WorkerSource,
        on_finish: OnFinish | None,
        on_round: OnRound | None,
    ) -> None:
        self._engine, self._link, self._number = engine, link, number
        self._source, self._on_finish, self._on_round = source, on_finish, on_round
        self._running: dict[int, PartialRequest] = {}
        self._leaving: set[int] = set()  # that have been told to, and are not here yet
        self._grants: dict[int, int] = {}
        self._closed = self._told_closed = False
        self._finished = self._rounds = 0
        self._polled_s = self._worked_s = engine.clock()
        source.wait_limit_s = POLL_WAIT_S

    def run(self) -> None:
        """Until the run has ended there."""
        poll = self._poll()
        while True:
            starts: Sequence[PartialRequest] = ()
            # a promised copy comes before any wait for another worker's
            if self._leaving or self._closed:
                self._wait(poll)
            else:
                starts = self._take(poll)
            self._give(starts)
            if poll.done():
                if self._hear(self._link.expect(poll.result(), Report)):
                    return
                self._give(())
                poll = self._poll()
            elif self._engine.clock() - self._polled_s > POLL_WAIT_S + self._link.deadline_s:
                why = f"no answer to Poll for {self._link.deadline_s:.1f} s"
                self._link.lose(why, silent=True)

    def _poll(self) -> Future[Any]:
        self._polled_s = self._engine.clock()
        poll = self._link.submit(Poll(self._number, POLL_WAIT_S))
        poll.add_done_callback(lambda _: self._source.wake())
        return poll

    def _wait(self, poll: Future[Any]) -> None:
        try:
            poll.exception(POLL_WAIT_S)
        except FutureTimeoutError:
            return

    def _take(self, poll: Future[Any]) -> Sequence[PartialRequest]:
        """Wait for starts or for the poll's answer, whichever comes first."""
        taken = self._source.take(wait=not poll.done())
        self._closed = taken is None
        return taken or ()

    def _give(self, starts: Sequence[PartialRequest]) -> None:
        if not starts and not self._grants and self._closed == self._told_closed:
            return
        if not self._running:
            self._worked_s = self._engine.clock()
        self._running.update({s.request.request_id: s for s in starts})
        given = Give(self._number, tuple(starts), self._grants, self._closed)
        self._grants, self._told_closed = {}, self._closed
        self._link.ask(given, Done)

    def _hear(self, report: Report) -> bool:
        """Pass on what has happened; return True at the end of the run."""
        if report.run != self._number:
            self._link.lose(f"expected run {self._number}, got {report.run}")
            raise self._link.lost or AssertionError
        self._look_for_rounds(report.rounds)
        stats = self._engine.stats
        stats.tokens = max(stats.tokens, report.tokens)
        for event in report.events:
            if isinstance(event, ChunkEnded):
                self._chunk_ended(event)
            elif isinstance(event, Parked):
                self._parked(event)
            else:
                self._answered(event)
        if self._on_round is not None:
            self._on_round(self._finished, stats.tokens)
        if report.stats is None:
            return False
        if self._running:
            self._link.lose(f"it has ended with {len(self._running)} requests unfinished")
            raise self._link.lost or AssertionError
        enter_stats(stats, report.stats, later_s=self._engine.later_s)
        return True

    def _look_for_rounds(self, rounds: int) -> None:
        now_s = self._engine.clock()
        if rounds != self._rounds or not self._running:
            self._rounds, self._worked_s, self._engine.has_worked = rounds, now_s, True
        elif now_s - self._worked_s > self._engine.hang_limit_s:
            why = f"no round for {now_s - self._worked_s:.1f} s, with requests to answer"
            self._link.lose(why, silent=True)

    def _chunk_ended(self, event: ChunkEnded) -> None:
        request_id, partial = event.request_id, self._known(event.request_id)
        limit = partial.num_tokens + (partial.max_tokens or 2**31)
        if not partial.num_tokens < event.response_tokens <= limit:
            self._distrust(f"request {request_id} ended a chunk at {event.response_tokens} tokens")
        more = self._source.chunk_ended(request_id, event.response_tokens)
        self._grants[request_id] = more
        if more:
            most = event.response_tokens - partial.num_tokens + more
            self._running[request_id] = dataclasses.replace(partial, max_tokens=most)
        else:
            self._leaving.add(request_id)

    def _parked(self, event: Parked) -> None:
        request_id, mine = event.request_id, self._known(event.request_id)
        if request_id not in self._leaving:
            self._distrust(f"request {request_id} left without being told to")
        partial = PartialRequest(mine.request, event.prefix, event.kv)
        self._check_tokens(partial)
        check_kv(self._engine, partial)
        self._leaving.discard(request_id)
        del self._running[request_id]
        self._source.park([partial])

    def _answered(self, event: Answered) -> None:
        t = event.trajectory
        mine = self._known(t.request_id).request
        same = (t.group_id, t.sample_index) == (mine.group_id, mine.sample_index)
        if not same or tuple(t.prompt_ids.tolist()) != mine.prompt_ids or t.reward is not None:
            self._distrust(f"the answer to request {t.request_id} is to another one")
        self._check_ids(t.request_id, t.response_ids)
        if t.sampling != mine.sampling:
            self._distrust(f"the answer to request {t.request_id} has another sampling")
        del self._running[t.request_id]
        self._finished += 1
        if self._on_finish is not None:
            self._on_finish(t)

    def _known(self, request_id: int) -> PartialRequest:
        if request_id not in self._running:
            self._distrust(f"it reported request {request_id}, which it does not have")
        return self._running[request_id]

    def _check_tokens(self, partial: PartialRequest) -> None:
        if partial.prefix is not None:
            self._check_ids(partial.request.request_id, partial.prefix.response_ids)

    def _check_ids(self, request_id: int, ids: Any) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._engine.model.vocab_size:
            self._distrust(f"request {request_id} has tokens outside of the vocabulary")

    def _distrust(self, why: str) -> None:
        self._link.lose(why)
        raise self._link.lost or AssertionError
