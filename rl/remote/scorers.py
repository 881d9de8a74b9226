"""The scorers of a run: responses go to the one with the fewest, and elsewhere if it is lost.

What a run sees is `rl.rewards.scores.Rewards`, as with reward workers of its own program.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rl.remote import scoring
from rl.remote.link import Channel, Link
from rl.remote.messages import Done
from rl.remote.scoring import Give, Meet, Open, Poll, Response, Scored, file_identity, response_of
from rl.remote.service import MOST_STARTS, Service, ServiceDeadlines, service_identity, wait_started
from rl.rewards.config import RewardConfig, validate
from rl.rewards.process import RewardWorkerError
from rl.rewards.scores import MARGIN_S, MOST_ATTEMPTS, Rewards, Score, ScoreJob
from rl.runtime.waits import ProgramLost

STARTUP_S = 120.0  # of reward workers, as `rl.rewards.pool.RewardPool` has it
BEAT_S = 2.0  # a scorer that has nothing to tell says so as often
MOST_RESPONSES = 64  # in a message, and
MOST_CHARACTERS = 2**22  # of them together, but for one alone
Connect = Callable[[int], Channel]  # reaches or starts the scorer of a number; may wait


@dataclasses.dataclass(eq=False)
class _Job:
    """A response that waits for its score; `losses`: scorers that were lost while they had it."""

    response: Response
    future: Future[Score]
    losses: int = 0

    @property
    def characters(self) -> int:
        r = self.response
        return len(r.prompt) + len(r.columns) + len(r.completion)


class Scorers(Rewards):
    """Responses are scored by other programs, each with `Reward.workers` processes."""

    def __init__(
        self,
        config: RewardConfig,
        tasks: Sequence[str],
        count: int,
        connect: Connect,
        config_text: str,
        deadlines: ServiceDeadlines,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Raises what `validate(config)` raises, before any program is started."""
        validate(config)
        limits = 2 * STARTUP_S + max(config.deadline_s, MARGIN_S) + MARGIN_S
        again = deadlines.start_s + deadlines.answer_s + STARTUP_S + MARGIN_S
        super().__init__(config, MOST_ATTEMPTS * (limits + MOST_STARTS * again))
        self._start_s = again
        self._say, self._numbers = say, itertools.count(1)
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._unplaced: collections.deque[_Job] = collections.deque()  # no scorer is there
        identity = service_identity(config_text) | file_identity(config)
        self.scorers = [
            _Scorer(self, i, tuple(tasks), identity, partial(connect, i), deadlines, say)
            for i in range(count)
        ]

    def start(self) -> None:
        for scorer in self.scorers:
            scorer.start()

    def wait_started(self) -> None:
        """Raises RewardWorkerError, with the scorer's own words, where one cannot serve."""
        try:
            wait_started(self.scorers, self._start_s)
        except ProgramLost as error:
            self.close()
            raise RewardWorkerError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def submit(self, job: ScoreJob) -> Future[Score]:
        """Queue a sample; returns at once.

        Raises RuntimeError where all is closed, TypeError for columns that are not JSON. The
        future raises RewardWorkerError where no scorer can be started any more.
        """
        waiting = _Job(response_of(next(self._numbers), job), Future())
        with self._changed:
            if self._closed:
                raise RuntimeError("the scorers are closed")
            self._place(waiting)
        return waiting.future

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = [*self._unplaced, *(j for s in self.scorers for j in s.jobs.values())]
            self._unplaced.clear()
            self._changed.notify_all()
        for scorer in self.scorers:
            scorer.close()
        for job in left:
            if not job.future.cancel():
                _fail(job, RuntimeError("the scorers were closed before this sample was scored"))

    # -- called by the scorers' threads ------------------------------------------------------

    def _place(self, job: _Job) -> None:
        """Queue a job at the scorer with the fewest; the lock is held."""
        there = [s for s in self.scorers if s.is_open]
        if there:
            min(there, key=lambda s: len(s.jobs)).put(job)
            self._changed.notify_all()
        elif self._error is not None:
            _fail(job, self._error)
        else:
            self._unplaced.append(job)

    def opened(self, scorer: _Scorer) -> None:
        with self._changed:
            scorer.is_open = True
            unplaced, self._unplaced = self._unplaced, collections.deque()
            for job in unplaced:
                self._place(job)

    def next_batch(self, scorer: _Scorer, poll: Future[Any]) -> list[_Job] | None:
        """Wait for responses to send, the answer of `poll`, or a while; None: all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or scorer.inbox or poll.done(), BEAT_S)
            if self._closed:
                return None
            batch, characters = list[_Job](), 0
            while scorer.inbox and len(batch) < MOST_RESPONSES:
                characters += scorer.inbox[0].characters
                if batch and characters > MOST_CHARACTERS:
                    break
                job = scorer.inbox.popleft()
                if job.future.running() or job.future.set_running_or_notify_cancel():
                    batch.append(job)
                else:
                    del scorer.jobs[job.response.number]
            return batch

    def wake(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def came(self, scorer: _Scorer, scored: Scored, link: Link) -> None:
        """Answer the futures of what was scored; the link is lost for what was not asked."""
        functions, asked = len(self.config.names), dict[int, _Job]()
        with self._changed:
            unsent = {job.response.number for job in scorer.inbox}
            for n, said in scored.said.items():
                if n in scorer.jobs and n not in unsent and len(said) == functions:
                    asked[n] = scorer.jobs.pop(n)
            if asked:
                self._answered_s = time.monotonic()
        if len(asked) < len(scored.said):
            link.lose(f"expected what {functions} functions say of the responses that it has")
        for n, job in asked.items():
            score = self._to_score([[x.value, x.kind, x.message] for x in scored.said[n]])
            if not job.future.done():  # closed meanwhile
                job.future.set_result(score)

    def lost(self, scorer: _Scorer, why: str) -> None:
        """Have others score what a lost one had."""
        with self._changed:
            scorer.is_open = False
            unsent = {job.response.number for job in scorer.inbox}
            jobs, scorer.jobs = scorer.jobs, {}
            scorer.inbox.clear()
            if all(s.given_up is not None for s in self.scorers):
                self._error = RewardWorkerError(f"no scorer is left: {why}")
                jobs |= {job.response.number: job for job in self._unplaced}
                self._unplaced.clear()
            for n, job in jobs.items():
                job.losses += n not in unsent
                if job.losses >= MOST_ATTEMPTS:
                    told = f"{MOST_ATTEMPTS} scorers were lost while they had one sample: {why}"
                    _fail(job, RewardWorkerError(told))
                elif not self._closed:
                    self._place(job)
        again = "" if scorer.given_up is not None else ", and it is started again"
        self._say(f"{why}; its {len(jobs)} responses are scored elsewhere{again}")


class _Scorer(Service):
    """One scorer, and the responses that it has: `jobs`, of which `inbox` are not sent yet."""

    def __init__(
        self,
        team: Scorers,
        number: int,
        tasks: tuple[str, ...],
        identity: Mapping[str, str],
        connect: Callable[[], Channel],
        deadlines: ServiceDeadlines,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(f"scorer {number}", scoring.CODEC, connect, deadlines, say)
        self._team, self._tasks, self._identity = team, tasks, identity
        self.is_open = False
        self.jobs: dict[int, _Job] = {}
        self.inbox: collections.deque[_Job] = collections.deque()

    def put(self, job: _Job) -> None:
        self.jobs[job.response.number] = job
        self.inbox.append(job)

    def hello(self) -> tuple[Meet, Mapping[str, str]]:
        met = Meet(self._identity, self.deadlines.silence_s, self._team.config)
        return met, self._identity

    def prepare(self, link: Link) -> None:
        link.ask(Open(self._tasks), Done, STARTUP_S + MARGIN_S)

    def serve(self, link: Link) -> None:
        self._team.opened(self)
        poll, sent_s = self._poll(link)
        while (batch := self._team.next_batch(self, poll)) is not None:
            if batch:
                link.ask(Give(tuple(job.response for job in batch)), Done)
            if poll.done():
                scored = link.expect(poll.result(), Scored)
                self._team.came(self, scored, link)
                self.worked = self.worked or bool(scored.said)
                if scored.broken is not None:
                    raise ProgramLost(f"{link.name}: {scored.broken}")
                poll, sent_s = self._poll(link)
            elif (silent_s := time.monotonic() - sent_s) > BEAT_S + link.deadline_s:
                link.lose(f"no sign of life for {silent_s:.1f} s", silent=True)

    def _poll(self, link: Link) -> tuple[Future[Any], float]:
        poll = link.submit(Poll(BEAT_S))
        poll.add_done_callback(self._team.wake)
        return poll, time.monotonic()

    def lost(self, why: str) -> None:
        self._team.lost(self, why)


def _fail(job: _Job, error: Exception) -> None:
    if not job.future.done():
        job.future.set_exception(error)
