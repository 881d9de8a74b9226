"""Responses of the steps of a pipeline, received and scored as they finish."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable

from reprise.rl.assembly.system import System
from reprise.rl.exchange.responses import Scorer
from reprise.rl.records.trajectory import NonFiniteLogits, Request, Trajectory, check_finite
from reprise.rl.runtime.signals import Stopped
from reprise.rl.runtime.waits import POLL_S
from reprise.rl.workers.messages import Deferred, Result


class ResultCollector:
    """Receives results in the driver thread, even while an update runs.

    A deferred request is expected in the next step.
    """

    def __init__(self, system: System, scorer: Scorer) -> None:
        self._system = system
        self._scorer = scorer
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def expect(self, step: int, requests: Iterable[Request]) -> None:
        """Record the requests of a step that will be submitted next."""
        with self._changed:
            ids = [r.request_id for r in requests]
            self._step_of.update(dict.fromkeys(ids, step))
            self._expected[step] += len(ids)

    def take(self, step: int, num_tokens: Callable[[], int]) -> list[Trajectory]:
        """Wait for the responses of a step, except for deferred requests, and return them.

        Raises Stopped, or the error of a worker.
        """
        while True:
            if self._system.is_stop_requested():
                raise Stopped
            with self._changed:
                if self._error is not None:
                    raise self._error
                finished = len(self._finished[step])
                expected = self._expected[step]
                if finished == expected and (result := self._complete(step)) is not None:
                    return result
                self._changed.wait(POLL_S)
            self._system.show.rollout(finished, expected, num_tokens())

    def _complete(self, step: int) -> list[Trajectory] | None:
        """Return the finished responses of a step; None if all wait for their siblings.

        A response that is scored together with a deferred response moves to the next step too.
        """
        finished = self._finished[step]
        late = [t for t in finished if self._scorer.waits_for(t.group_id)]
        if late and len(late) == len(finished):
            return None
        self._finished[step + 1] += late
        self._expected[step + 1] += len(late)
        del self._expected[step], self._finished[step]
        moved = {t.request_id for t in late}
        return [t for t in finished if t.request_id not in moved]

    def enter(self, result: Result) -> None:
        """Score and store a result; the driver calls this."""
        if isinstance(result, Trajectory):
            try:
                check_finite(result)
            except NonFiniteLogits as error:
                step = self._step_of[result.request_id]
                result = NonFiniteLogits(f"step {step}: {error}")
            else:
                self._scorer(result)
        with self._changed:
            if isinstance(result, BaseException):
                self._error = result
            elif isinstance(result, Trajectory):
                self._finished[self._step_of.pop(result.request_id)].append(result)
            else:
                assert isinstance(result, Deferred), "nothing runs ahead of its step"
                step = self._step_of.pop(result.request_id)
                self._expected[step] -= 1
                self._expected[step + 1] += 1
                self._step_of[result.request_id] = step + 1
            self._changed.notify_all()
