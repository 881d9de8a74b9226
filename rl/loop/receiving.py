"""The responses of a pipeline as they come back: counted by step, and scored as they end."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterable

from rl.loop.generation import System, asked_to_stop
from rl.loop.rewards import Scorer
from rl.runtime.signals import Stopped
from rl.runtime.waits import POLL_S, Hang, code_line
from rl.trajectory import Request, Trajectory
from rl.workers.messages import Deferred, Returned
from rl.workers.session import Session
from rl.workers.worker_group import LEAVING_S


class Receiver:
    """Takes what a session answers, in a thread of its own, also while an update runs.

    It ends with `close`. A request that is deferred is expected in the step after its own.
    """

    def __init__(self, system: System, session: Session, scorer: Scorer) -> None:
        self._system, self._session, self._scorer = system, session, scorer
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._closed, self._error = False, list[BaseException]()
        self._received_s = time.monotonic()  # sign of life of the thread
        self._thread = threading.Thread(target=self._receive, name="pipeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs is left behind."""
        self._closed = True
        self._thread.join(min(LEAVING_S, self._system.config.run.hang_limit_s))

    def expect(self, step: int, requests: Iterable[Request]) -> None:
        """Note requests of a step that are about to be submitted."""
        with self._changed:
            ids = [r.request_id for r in requests]
            self._step_of.update(dict.fromkeys(ids, step))
            self._expected[step] += len(ids)

    def take(self, step: int, place: int) -> list[Trajectory]:
        """Return the responses of a step, once all are there but those of deferred requests.

        `place` is the session's number of the step. Raises Stopped, or what a worker raised.
        """
        while True:
            if asked_to_stop(self._system):
                raise Stopped
            with self._changed:
                if self._error:
                    raise self._error[0]
                finished, expected = len(self._finished[step]), self._expected[step]
                if finished == expected:
                    del self._expected[step]
                    return self._finished.pop(step)
                self._changed.wait(POLL_S)
            self._look_after_the_thread()
            self._system.show.rollout(finished, expected, self._session.num_tokens(place))

    def _look_after_the_thread(self) -> None:
        limit_s = self._system.config.run.hang_limit_s
        silent_s = time.monotonic() - self._received_s
        if silent_s > limit_s:
            where = code_line(self._thread.ident or 0)
            raise Hang(f"no sign of life for {silent_s:.1f} s from the pipeline's thread ({where})")

    # -- the thread ---------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while not self._closed:
                self._received_s = time.monotonic()
                result = self._session.next_result(POLL_S)
                assert not isinstance(result, Returned), "nothing runs ahead of its step"
                if isinstance(result, Trajectory):
                    self._scorer(result)
                if result is not None:
                    with self._changed:
                        self._enter(result)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error.append(error)
                self._changed.notify_all()

    def _enter(self, result: Trajectory | Deferred) -> None:
        step = self._step_of.pop(result.request_id)
        if isinstance(result, Trajectory):
            self._finished[step].append(result)
            return
        self._expected[step] -= 1
        self._expected[step + 1] += 1
        self._step_of[result.request_id] = step + 1
