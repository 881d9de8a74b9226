"""Processes of one mesh that launch different programs are named, instead of hanging together.

Each process tells what its engine is about to launch (`rl.engine.lockstep`); a thread compares that
with what process 0 launched, through the store that all processes reach: once a collective hangs,
nothing else of a process goes on.
"""

from __future__ import annotations

import array
import collections
import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from typing import Self

from rl.cluster.processes import Processes

PREFIX = "reprise/lockstep/"
DIGESTS, ASKED, TOLD = f"{PREFIX}digests/", f"{PREFIX}asked/", f"{PREFIX}told/"
BEAT_S = 0.5  # between two comparisons
KEPT = 4096  # launches that are remembered
SHOWN = 2048  # of which process 0 shows the digests
SHOWN_CHARACTERS = 400  # of a launch
ANSWER_S = 5.0  # that process 0 has to say what it launched


class LockstepWatch:
    """The `Lockstep` observer of a process's engines; a context manager.

    All processes launch alike, in one thread. Where this process and process 0 do not, `differs` is
    called in the watching thread, once in every process, with one line that names the process, the
    launch, and what the two decided. The thread is started by entering, and does nothing alone.
    """

    def __init__(
        self,
        processes: Processes,
        differs: Callable[[str], object],
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        self._processes, self._differs, self._beat_s = processes, differs, beat_s
        self._number = itertools.count(1)
        # appended to by the engine's thread, copied by the other
        self._heard: collections.deque[tuple[int, int, object]] = collections.deque(maxlen=KEPT)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep", daemon=True)

    def launched(self, digest: int, what: object) -> None:
        """Hear of a launch, as of `rl.engine.lockstep.Lockstep`."""
        if not self._processes.alone:
            self._heard.append((next(self._number), digest, what))

    def __enter__(self) -> Self:
        if not self._processes.alone:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, after a last comparison."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_S)

    # -- the thread ---------------------------------------------------------------------

    def _watch(self) -> None:
        # that the store is gone is for `Processes` to say
        with contextlib.suppress(ConnectionError, TimeoutError):
            going_on = True
            while going_on:
                going_on = not self._over.wait(self._beat_s)
                if (line := self._found()) is not None:
                    self._differs(line)
                    return

    def _found(self) -> str | None:
        """Compare once; return the line of a difference, this process's or another's."""
        processes, store = self._processes, self._processes.store
        if processes.is_first:
            self._show()
            for key, asked in store.entries(ASKED).items():
                index = int(key.rpartition("/")[2])
                line = self._line(index, *json.loads(asked))
                store.set(f"{TOLD}{index}", line.encode())
        elif (own := self._difference()) is not None:
            number, what = own
            store.set(f"{ASKED}{processes.index}", json.dumps([number, what]).encode())
            with contextlib.suppress(TimeoutError):
                return store.get(f"{TOLD}{processes.index}", ANSWER_S).decode()
            return self._line(processes.index, number, what, first="something else")
        told = store.entries(TOLD)
        return told[min(told)].decode() if told else None

    def _show(self) -> None:
        """Let the others read the digests of the last launches, and the number of the first."""
        heard = list(self._heard.copy())[-SHOWN:]
        if heard:
            table = array.array("Q", [heard[0][0], *(digest for _, digest, _ in heard)])
            self._processes.store.set(f"{DIGESTS}0", table.tobytes())

    def _difference(self) -> tuple[int, str] | None:
        """Return this process's first launch that is not process 0's: its number, and what it is.

        Of those that are still remembered: digests differ ever after.
        """
        shown = self._processes.store.entries(DIGESTS)
        if not shown:
            return None
        [table] = shown.values()
        first, *digests = array.array("Q", table)
        for number, digest, what in self._heard.copy():
            at = number - first
            if 0 <= at < len(digests) and digests[at] != digest:
                return number, str(what)[:SHOWN_CHARACTERS]
        return None

    def _line(self, index: int, number: int, what: str, first: str | None = None) -> str:
        if first is None:
            own = {n: w for n, _, w in self._heard.copy()}
            first = str(own.get(number, "something else"))[:SHOWN_CHARACTERS]
            first = "the same with other contents" if first == what else first
        return f"process {index} diverged in launch {number}: {what}; process 0: {first}"
