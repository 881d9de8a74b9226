"""The responses of a pipeline as they come back: counted by step, and scored as they end."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable

from rl.rollouts import System, asked_to_stop
from rl.runtime.signals import Stopped
from rl.runtime.waits import POLL_S
from rl.scoring import Scorer
from rl.trajectory import Request, Trajectory
from rl.workers.results import Deferred, Result


class Receiver:
    """Receives results in the driver's thread, also while an update runs.

    A request that is deferred is expected in the step after its own.
    """

    def __init__(self, system: System, scorer: Scorer) -> None:
        self._system, self._scorer = system, scorer
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def expect(self, step: int, requests: Iterable[Request]) -> None:
        """Note requests of a step that are about to be submitted."""
        with self._changed:
            ids = [r.request_id for r in requests]
            self._step_of.update(dict.fromkeys(ids, step))
            self._expected[step] += len(ids)

    def take(self, step: int, num_tokens: Callable[[], int]) -> list[Trajectory]:
        """Return the responses of a step, once all are there but those of deferred requests.

        Raises Stopped, or what a worker raised.
        """
        while True:
            if asked_to_stop(self._system):
                raise Stopped
            with self._changed:
                if self._error is not None:
                    raise self._error
                finished, expected = len(self._finished[step]), self._expected[step]
                if finished == expected:
                    del self._expected[step]
                    return self._finished.pop(step)
                self._changed.wait(POLL_S)
            self._system.show.rollout(finished, expected, num_tokens())

    def enter(self, result: Result) -> None:
        """Called by the driver."""
        if isinstance(result, Trajectory):
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
