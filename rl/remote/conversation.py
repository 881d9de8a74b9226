"""One run of a worker in another program: requests go there, what it reports comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from rl.engine.engine import OnFinish, OnRound
from rl.remote.caught_states import CaughtStates
from rl.remote.drafter_messages import Caught
from rl.remote.link import Link
from rl.remote.messages import Answered, ChunkEnded, Done, Give, Parked, Poll, Report
from rl.remote.records import enter_stats
from rl.remote.worker_run import check_kv
from rl.trajectory import PartialRequest
from rl.workers.worker_source import WorkerSource

if TYPE_CHECKING:
    from rl.remote.remote_engine import RemoteEngine

POLL_WAIT_S = 1.0  # that a worker has nothing to tell for, before it says so


class Conversation:
    """One run: what the source brings goes there, what is reported comes back."""

    def __init__(
        self,
        engine: RemoteEngine,
        link: Link,
        source: WorkerSource,
        states: CaughtStates | None,
        on_finish: OnFinish | None,
        on_round: OnRound | None,
    ) -> None:
        self._engine, self._link, self._number = engine, link, engine.run_number
        self._source, self._states = source, states
        self._on_finish, self._on_round = on_finish, on_round
        self._running: dict[int, PartialRequest] = {}
        self._leaving: set[int] = set()  # that have been told to, and are not here yet
        self._grants: dict[int, int] = {}
        self._closed = self._told_closed = False
        self._finished = self._rounds = 0
        self._polled_s = self._worked_s = engine.clock()
        source.wait_limit_s = POLL_WAIT_S

    def run(self) -> None:
        """Until the run has ended there."""
        try:
            self._converse()
        finally:
            self._source.has_requests = False

    def _converse(self) -> None:
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
                self._engine.bring_drafter(self._link)  # it may have learnt meanwhile
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
        self._source.has_requests = bool(self._running)
        taken = self._source.take(wait=not poll.done())
        self._closed = taken is None
        return taken or ()

    def _give(self, starts: Sequence[PartialRequest]) -> None:
        if not starts and not self._grants and self._closed == self._told_closed:
            return
        if not self._running:
            self._worked_s = self._engine.clock()
        self._running.update({s.request.request_id: s for s in starts})
        lets_go = self._source.lets_go
        given = Give(self._number, tuple(starts), self._grants, self._closed, lets_go)
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
            elif isinstance(event, Caught):
                self._caught(event)
            else:
                self._answered(event)
        if self._on_round is not None:
            self._on_round(self._finished, stats.tokens)
        if report.stats is None:
            return False
        if self._running:
            self._link.lose(f"it has ended with {len(self._running)} requests unfinished")
            raise self._link.lost or AssertionError
        if self._states is not None and self._states.waiting:
            self._distrust("it has ended without the responses whose hidden states it gave")
        if report.tuner is not None:
            try:
                self._engine.tuned(report.tuner)
            except ValueError as error:
                self._distrust(str(error))
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
        least = partial.num_tokens + (not self._source.lets_go)
        if not least <= event.response_tokens <= limit:
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
        if self._states is not None and (wrong := self._states.answered(t)):
            self._distrust(wrong)
        if self._on_finish is not None:
            self._on_finish(t)

    def _caught(self, event: Caught) -> None:
        if self._states is None:
            self._distrust("it gave hidden states that nobody has asked for")
        elif wrong := self._states.caught(event):
            self._distrust(wrong)

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
