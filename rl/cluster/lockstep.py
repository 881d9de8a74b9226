"""Detection of processes of one mesh that launch different programs, instead of a hang.

A thread compares the engine launches of a process (`rl.slots.lockstep`) with process 0, through
the shared store. The thread also runs while a collective hangs.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from typing import Self

from reprise.rl.cluster.processes import Processes

PREFIX = "reprise/lockstep/"
LAUNCHES = f"{PREFIX}launches/"
LINES = f"{PREFIX}lines/"
BEAT_S = 0.5  # between two comparisons
KEPT = 4096  # launches that a process remembers
SHOWN = 256  # last launches of process 0 in the store
MAX_CHARACTERS = 400  # of a launch
LEAVING_S = 5.0  # for the thread to stop


class LockstepWatch:
    """The `Lockstep` observer of the engines of a process; a context manager.

    If a process and process 0 launch differently, `differs` is called in the watching thread, once
    in every process, with one line that names the process and both launches.
    """

    def __init__(
        self,
        processes: Processes,
        differs: Callable[[str], object],
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        self._processes = processes
        self._differs = differs
        self._beat_s = beat_s
        self._number = itertools.count(1)
        # appended to by the engine thread, copied by the watching thread
        self._launches: collections.deque[tuple[int, int, object]]
        self._launches = collections.deque(maxlen=KEPT)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep", daemon=True)

    def launched(self, digest: int, what: object) -> None:
        """Record a launch (see `rl.slots.lockstep.Lockstep`)."""
        if not self._processes.alone:
            self._launches.append((next(self._number), digest, what))

    def __enter__(self) -> Self:
        if not self._processes.alone:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread, after a last comparison."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(LEAVING_S)

    def _watch(self) -> None:
        # `Processes` reports the loss of the store
        with contextlib.suppress(ConnectionError, TimeoutError):
            is_over = False
            while not is_over:
                is_over = self._over.wait(self._beat_s)
                if (line := self._compare()) is not None:
                    self._differs(line)
                    return

    def _compare(self) -> str | None:
        """Compare once; return the line of a difference that any process has found, or None."""
        store = self._processes.store
        index = self._processes.index
        if index == 0:
            last = list(self._launches.copy())[-SHOWN:]
            store.set(f"{LAUNCHES}0", json.dumps([[n, d, _text(w)] for n, d, w in last]).encode())
        elif shown := store.entries(LAUNCHES):
            if (line := self._difference(next(iter(shown.values())))) is not None:
                store.set(f"{LINES}{index}", line.encode())
        lines = store.entries(LINES)
        return lines[min(lines)].decode() if lines else None

    def _difference(self, shown: bytes) -> str | None:
        """Return the line of the first launch that differs from process 0, or None."""
        first = {n: (digest, text) for n, digest, text in json.loads(shown)}
        for n, digest, what in self._launches.copy():
            if n in first and first[n][0] != digest:
                own = _text(what)
                other = first[n][1]
                other = "the same with other contents" if own == other else other
                return (
                    f"process {self._processes.index} diverged in launch {n}: {own}; process 0: "
                    f"{other}"
                )
        return None


def _text(what: object) -> str:
    return str(what)[:MAX_CHARACTERS]
