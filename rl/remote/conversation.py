"""One run of a worker in another program: requests go there, what it reports comes back.

source: starts, drops, copies → Give → worker
worker → Report → what was asked for, checked → source: chunks' ends, requests that leave, copies
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, NoReturn

from rl.engine.engine import OnFinish, OnRound
from rl.remote.caught_states import CaughtStates
from rl.remote.drafter_messages import Caught
from rl.remote.link import Link
from rl.remote.messages import Done
from rl.remote.records import enter_stats
from rl.remote.run_messages import (
    Answered,
    ChunkEnded,
    Copied,
    Dropped,
    Event,
    Give,
    Parked,
    Poll,
    Report,
)
from rl.remote.wire import WireError
from rl.remote.worker_run import check_kv
from rl.trajectory import HostKv, PartialRequest, Prefix
from rl.workers.worker_source import WorkerSource
from sched.request import copy_of

if TYPE_CHECKING:
    from rl.remote.remote_engine import RemoteEngine

POLL_WAIT_S = 1.0  # that a worker has nothing to tell for, before it says so


class _Asked:
    """Requests that a worker has an answer to give for, by number; the oldest first."""

    def __init__(self) -> None:
        self._requests: dict[int, collections.deque[PartialRequest]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def add(self, number: int, partial: PartialRequest) -> None:
        self._requests.setdefault(number, collections.deque()).append(partial)

    def first(self, number: int) -> PartialRequest | None:
        return self._requests[number][0] if number in self._requests else None

    def pop(self, number: int) -> PartialRequest | None:
        """Remove and return the oldest request of a number; None if there is none."""
        if number not in self._requests:
            return None
        found = self._requests[number].popleft()
        if not self._requests[number]:
            del self._requests[number]
        return found


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
        self._copying, self._dropped = _Asked(), _Asked()  # copies, and ends, that are to come
        self._grants: dict[int, int] = {}
        self._closed = self._told_closed = False
        self._finished = self._rounds = 0
        self._polled_s = self._worked_s = self._handed_s = engine.clock()
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
            # what is promised comes before any wait for what others promise
            if self._leaving or self._copying:
                self._wait(poll)
                self._look_for_promised()
            else:
                starts = self._take(poll)
                self._handed_s = self._engine.clock()  # nothing is promised
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
        if self._closed:
            self._wait(poll)
            taken = self._source.take(wait=False)  # drops may still come
            assert not taken, "nothing starts behind the end"
            return ()
        self._source.has_requests = bool(self._running)
        taken = self._source.take(wait=not poll.done())
        self._closed = taken is None
        return taken or ()

    def _give(self, starts: Sequence[PartialRequest]) -> None:
        drops = self._drops()
        if starts and not self._running:
            self._worked_s = self._engine.clock()
        self._running.update({s.request.request_id: s for s in starts})
        copies = self._copies()
        news = starts or drops or copies or self._grants
        if not news and self._closed == self._told_closed:
            return
        lets_go, closed = self._source.lets_go, self._closed
        given = Give(
            self._number, tuple(starts), self._grants, closed, lets_go, tuple(drops), tuple(copies)
        )
        self._grants, self._told_closed = {}, closed
        self._link.ask(given, Done)

    def _drops(self) -> list[int]:
        """Forget the requests that others have answered; return those that are there."""
        found = [number for number in self._source.dropped() if number in self._running]
        for number in found:
            self._dropped.add(number, self._running.pop(number))
            self._leaving.discard(number)
            self._grants.pop(number, None)
        return found

    def _copies(self) -> list[tuple[int, int]]:
        """Return the copies that it is to give, of requests that are there."""
        found = []
        for original, number in self._source.copies():
            if original in self._running and not self._told_closed:
                self._copying.add(number, self._running[original])
                found.append((original, number))
            else:
                self._source.copied(number, None)
        return found

    def _hear(self, report: Report) -> bool:
        """Pass on what has happened; return True at the end of the run."""
        if report.run != self._number:
            self._link.lose(f"expected run {self._number}, got {report.run}")
            raise self._link.lost or AssertionError
        self._look_for_rounds(report.rounds)
        stats = self._engine.stats
        stats.tokens = max(stats.tokens, report.tokens)
        for event in report.events:
            self._happened(event)
        if self._on_round is not None:
            self._on_round(self._finished, stats.tokens)
        if report.stats is None:
            return False
        if self._running:
            self._distrust(f"it has ended with {len(self._running)} requests unfinished")
        if self._copying:
            self._distrust(f"it has ended without {len(self._copying)} copies of requests")
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

    def _look_for_promised(self) -> None:
        silent_s = self._engine.clock() - self._handed_s
        if silent_s > self._engine.hang_limit_s:
            why = f"no request for {silent_s:.1f} s, though it was to hand some over"
            self._link.lose(why, silent=True)

    def _happened(self, event: Event) -> None:
        """Check an event and pass it on, unless it is of a request that is to be dropped."""
        if isinstance(event, ChunkEnded):
            self._chunk_ended(event)
        elif isinstance(event, Parked):
            self._parked(event)
        elif isinstance(event, Copied):
            self._copied(event)
        elif isinstance(event, Dropped):
            self._has_dropped(event)
        elif isinstance(event, Caught):
            self._caught(event)
        else:
            self._answered(event)

    def _chunk_ended(self, event: ChunkEnded) -> None:
        request_id, partial = event.request_id, self._known(event.request_id)
        limit = partial.num_tokens + (partial.max_tokens or 2**31)
        least = partial.num_tokens + (not self._source.lets_go)
        if not least <= event.response_tokens <= limit:
            self._distrust(f"request {request_id} ended a chunk at {event.response_tokens} tokens")
        if request_id in self._dropped:
            return
        more = self._source.chunk_ended(request_id, event.response_tokens)
        self._grants[request_id] = more
        if more:
            most = event.response_tokens - partial.num_tokens + more
            self._running[request_id] = dataclasses.replace(partial, max_tokens=most)
        else:
            self._leaving.add(request_id)

    def _parked(self, event: Parked) -> None:
        request_id, mine = event.request_id, self._known(event.request_id)
        is_dropped = request_id in self._dropped
        if request_id not in self._leaving and not is_dropped:
            self._distrust(f"request {request_id} left without being told to")
        partial = self._handed_over(mine, event.prefix, event.kv)
        if is_dropped:
            return
        self._leaving.discard(request_id)
        del self._running[request_id]
        self._source.park([partial])

    def _copied(self, event: Copied) -> None:
        mine = self._copying.pop(event.number)
        if mine is None:
            original, _ = copy_of(event.number)
            self._distrust(f"it gave a copy of request {original} that nobody has asked for")
        elif event.kv is None:
            self._source.copied(event.number, None)
        else:
            self._source.copied(event.number, self._handed_over(mine, event.prefix, event.kv))

    def _has_dropped(self, event: Dropped) -> None:
        if self._dropped.pop(event.request_id) is None:
            self._distrust(f"it dropped request {event.request_id}, which it was not told to")

    def _answered(self, event: Answered) -> None:
        t = event.trajectory
        mine = self._known(t.request_id).request
        same = (t.group_id, t.sample_index) == (mine.group_id, mine.sample_index)
        if not same or tuple(t.prompt_ids.tolist()) != mine.prompt_ids or t.reward is not None:
            self._distrust(f"the answer to request {t.request_id} is to another one")
        self._check_ids(t.request_id, t.response_ids)
        if t.sampling != mine.sampling:
            self._distrust(f"the answer to request {t.request_id} has another sampling")
        # its states come though another worker was first; those of copies do not
        if self._states is not None and not copy_of(t.request_id)[1]:
            if wrong := self._states.answered(t):
                self._distrust(wrong)
        if t.request_id in self._dropped:
            return
        del self._running[t.request_id]
        self._finished += 1
        if self._on_finish is not None:
            self._on_finish(t)

    def _caught(self, event: Caught) -> None:
        if self._states is None:
            self._distrust("it gave hidden states that nobody has asked for")
        elif wrong := self._states.caught(event):
            self._distrust(wrong)

    def _known(self, request_id: int) -> PartialRequest:
        """Return a request that it has; one that is to be dropped until it says that it is."""
        found = self._dropped.first(request_id) or self._running.get(request_id)
        if found is None:
            self._distrust(f"it reported request {request_id}, which it does not have")
        return found

    def _handed_over(
        self, mine: PartialRequest, prefix: Prefix | None, kv: HostKv | None
    ) -> PartialRequest:
        """Return a request with what came of it, once that is checked."""
        partial = PartialRequest(mine.request, prefix, kv)
        self._handed_s, request_id = self._engine.clock(), mine.request.request_id
        if prefix is not None:
            self._check_ids(request_id, prefix.response_ids)
        most = self._source.longest_tokens
        if partial.num_tokens < mine.num_tokens or len(partial.token_ids) > most:
            self._distrust(f"request {request_id} came with {partial.num_tokens} tokens")
        try:
            check_kv(self._engine, partial)
        except WireError as wrong:
            self._distrust(str(wrong))
        return partial

    def _check_ids(self, request_id: int, ids: Any) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._engine.model.vocab_size:
            self._distrust(f"request {request_id} has tokens outside of the vocabulary")

    def _distrust(self, why: str) -> NoReturn:
        self._link.lose(why)
        raise self._link.lost or AssertionError
