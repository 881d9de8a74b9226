"""The threads of drafting workers, which are replaced where they raise or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rl.drafting.worker import DraftingWorker
from rl.engine.engine import Engine

MOST_RESTARTS = 3  # of one worker: what fails more often will not heal
LEAVING_S = 5.0  # that threads have to end


class DraftingThreads:
    """A drafting worker on each of these engines.

    `told` is called with a line about each loss. One that raises, or hangs for `hang_limit_s` with
    something to do, is replaced: what it knew is forgotten.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        clock: Callable[[], float],
        told: Callable[[str], None],
        hang_limit_s: float,
    ) -> None:
        self._clock, self._told, self._hang_limit_s = clock, told, hang_limit_s
        self._lock, self._looked_s = threading.Lock(), 0.0
        self.workers = [DraftingWorker(engine, clock) for engine in engines]

    def close(self) -> None:
        for worker in self.workers:
            worker.close(LEAVING_S)

    def look(self) -> None:
        """Replace workers that have raised or hang; any thread may call it, as often as it likes.

        Hangs are looked for four times in `hang_limit_s`.
        """
        if not any(worker.error for worker in self.workers):
            now_s = self._clock()
            if now_s - self._looked_s < self._hang_limit_s / 4:
                return
            self._looked_s = now_s
        with self._lock:
            for k, worker in enumerate(self.workers):
                lost = self._why_lost(worker)
                if lost is None or worker.restarts > MOST_RESTARTS:
                    continue
                again = worker.restarts < MOST_RESTARTS
                self._told(
                    f"warning: drafting worker {k} {lost}; "
                    + ("it is replaced" if again else "verifying workers go on without it")
                )
                if again:
                    worker.restart()
                else:
                    worker.give_up()

    def _why_lost(self, worker: DraftingWorker) -> str | None:
        if worker.error is not None:
            return f"failed: {type(worker.error).__name__}: {worker.error}"
        alive_s = worker.alive_s
        if alive_s is not None and (silent_s := self._clock() - alive_s) > self._hang_limit_s:
            return f"hangs: no sign of life for {silent_s:.1f} s"
        return None
