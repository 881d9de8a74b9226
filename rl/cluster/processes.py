"""The processes of one run: gathered values, digests and heartbeats in a key-value store.

Only `gather_large` runs a collective of devices, once all processes have announced it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

POLL_S = 0.5  # between two checks of an awaited process
BEATS = 8  # minimum heartbeats within the deadline
BEAT_S = 1.0  # between two heartbeats, in a job of up to BEATING processes
BEATING = 64
LEAVING_S = 4.0  # for the main thread to react to a lost process, before `end` is called
LARGE_BYTES = 2**20  # from this size on, values use the network of the devices
SHOWN = 4  # requests in one message
PULSE = "reprise/pulse/"
GATHER = "reprise/gather/"
FIRST_IS_LOST = "process 0, which holds the run together, is lost"


class ProcessLost(RuntimeError):
    """Another process of the run has exited, or sends no heartbeat."""


class Diverged(RuntimeError):
    """Processes that must run the same program diverged, so their results are invalid."""


class Store(Protocol):
    """A key-value store that all processes reach; every call returns in time or raises."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key. Raises TimeoutError, or ConnectionError if the store is gone."""
        ...

    def entries(self, prefix: str) -> Mapping[str, bytes]: ...

    def delete(self, key: str) -> None: ...


class Processes:
    """The processes of a run, as seen by one process; a context manager during the run.

    All processes call the same methods in the same order, from their main threads; `what` names the
    point of the run, and is compared. With one process, everything is trivial, without a store.

    A thread sends heartbeats and watches the other processes. A process that sends no heartbeat for
    `deadline_s`, or reports a failure, is lost: waits raise ProcessLost, and if the main thread
    does not leave a collective within LEAVING_S, `end` is called with the message.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        store: Store | None = None,
        deadline_s: float = 60.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (store is None) == (count == 1) and 0 <= index < count
        self.index = index
        self.count = count
        self.end: Callable[[str], object] = lambda text: None
        self._given = store
        self._deadline_s = deadline_s
        self._clock = clock
        self._numbers: dict[str, int] = {}  # of the last `gather`, by line
        self._beat_s = min(deadline_s / BEATS, BEAT_S * max(1.0, count / BEATING))
        self._own: dict[str, object] = {"beat": 0, "asked": False, "failed": None, "done": False}
        self._stop_requested = False  # by another process
        self._lost: ProcessLost | None = None
        self._has_store = True
        self._left: set[int] = set()  # processes that have departed
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_first(self) -> bool:
        """True for the process that writes the shared files of the run."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    # -- agreement ----------------------------------------------------------------------

    def gather(
        self,
        what: str,
        value: bytes,
        waiting: Callable[[], object] = lambda: None,
        line: str = "",
    ) -> list[bytes]:
        """Return the values of all processes, in process order.

        `waiting` is called during waits. A thread other than the main thread uses a separate
        `line`. Raises ProcessLost, or Diverged if another process is at another point.
        """
        if self.alone:
            return [value]
        try:
            return self._gather(what, value, waiting, line)
        except ConnectionError as error:
            raise ProcessLost(FIRST_IS_LOST) from error

    def _gather(
        self, what: str, value: bytes, waiting: Callable[[], object], line: str
    ) -> list[bytes]:
        number = self._numbers[line] = self._numbers.get(line, 0) + 1
        name = what.encode()
        self.store.set(f"{GATHER}{line}{number}/{self.index}", name + b"\0" + value)
        result = []
        for index in range(self.count):
            key = f"{GATHER}{line}{number}/{index}"
            other, _, payload = self._awaited(index, key, what, waiting).partition(b"\0")
            if other != name:
                raise Diverged(
                    f"process {index} is at {other.decode(errors='replace')[:200]!r} where process "
                    f"{self.index} is at {what!r}"
                )
            result.append(payload)
        # a process that sets this value has read all values of the previous `gather`
        self.store.delete(f"{GATHER}{line}{number - 1}/{self.index}")
        return result

    def gather_large(
        self, what: str, value: bytes, waiting: Callable[[], object] = lambda: None
    ) -> list[bytes]:
        """Gather values; large values use the network of the devices."""
        sizes = [int(size) for size in self.gather(f"{what}: bytes", b"%d" % len(value), waiting)]
        if self.alone or max(sizes) < LARGE_BYTES:
            return self.gather(what, value, waiting)
        room = 1 << (max(sizes) - 1).bit_length()  # few sizes, few programs
        padded = np.zeros(room, np.uint8)
        padded[: len(value)] = np.frombuffer(value, np.uint8)
        rows = _gathered(padded)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def from_first(self, what: str, value: Callable[[], bytes]) -> bytes:
        """Return the value that process 0 computes; the other processes wait for it."""
        return self.gather(what, value() if self.is_first else b"")[0]

    def any(self, what: str, flag: bool) -> bool:
        """Return whether `flag` is True in any process."""
        return b"1" in self.gather(what, b"1" if flag else b"0")

    def barrier(self, what: str, waiting: Callable[[], object] = lambda: None) -> None:
        """Wait until all processes arrive; call `waiting` during the wait."""
        self.gather(what, b"", waiting)

    def agree(self, what: str, digests: Mapping[str, str]) -> None:
        """Raise Diverged, with the differences, unless all processes agree on names and digests."""
        if self.alone:
            return
        table = json.dumps(list(digests.items())).encode()
        totals = self.gather(f"digest of {what}", hashlib.sha256(table).digest())
        if len(set(totals)) == 1:
            return
        tables = [json.loads(t) for t in self.gather_large(f"digests of {what}", table)]
        raise Diverged(f"{what}: {difference(tables)}")

    # -- heartbeats ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self.alone:
            self._thread = threading.Thread(target=self._watch, name="processes", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.depart()

    def depart(self) -> None:
        """Announce that this process leaves; process 0, which the others need, leaves last."""
        self._over.set()
        if not self.alone:
            self._own["done"] = True
            self._tell_the_end(LEAVING_S if self.is_first else 0.0, "done")

    def request_stop(self) -> None:
        """Announce that this process was requested to stop."""
        self._own["asked"] = True

    @property
    def stop_requested(self) -> bool:
        """True once another process was requested to stop."""
        return self._stop_requested

    def fail(self, text: str) -> None:
        """Announce why this process fails; wait until the others can have read the reason."""
        if self.alone:
            return
        self._over.set()  # the others no longer matter
        self._own["failed"] = text
        self._tell_the_end(2 * self._beat_s, "done", "failed")

    def _tell_the_end(self, limit_s: float, *ends: str) -> None:
        """Send a last heartbeat; wait up to `limit_s` for one of these states in all processes."""
        until_s = self._clock() + limit_s
        with contextlib.suppress(ConnectionError, TimeoutError):
            if self._has_store:
                self._beat()
            while self._has_store and self._clock() < until_s:
                states = self._told().values()
                if sum(any(state.get(end) for end in ends) for state in states) == self.count:
                    return
                time.sleep(0.05)

    def blame(self) -> ProcessLost | None:
        """Return the lost process that explains a failed collective, or None after a timeout."""
        until_s = self._clock() + self._deadline_s + LEAVING_S
        while self._lost is None and self._clock() < until_s and not self.alone:
            time.sleep(min(POLL_S, self._beat_s))
        return self._lost

    def _watch(self) -> None:
        """Send heartbeats and watch the other processes, until the run is over."""
        last: dict[int, tuple[object, float]]
        last = {i: (None, self._clock()) for i in range(self.count) if i != self.index}
        while not self._over.wait(self._beat_s):
            try:
                self._beat()
                states = self._told()
            except (ConnectionError, TimeoutError) as error:
                return self._lose(f"{FIRST_IS_LOST}: {error}")
            now_s = self._clock()
            for index, (beat, since_s) in list(last.items()):
                state = states.get(index, {})
                self._stop_requested |= bool(state.get("asked"))
                if failed := state.get("failed"):
                    return self._lose(f"process {index} failed: {failed}")
                if state.get("done"):
                    self._left.add(index)  # its earlier values can still be read
                if state.get("beat") != beat:
                    last[index] = state.get("beat"), now_s
                elif now_s - since_s > self._deadline_s:
                    silent = f"is lost: no sign of life for {now_s - since_s:.1f} s"
                    why = "has left the run" if index in self._left else silent
                    return self._lose(f"process {index} {why}")

    def lose_first(self) -> None:
        """Record the loss of process 0; calls of the store may not return afterwards."""
        self._has_store = False
        if not self._over.is_set():
            self._lose(f"{FIRST_IS_LOST}: it has ended, hangs, or cannot be reached")

    def _lose(self, text: str) -> None:
        if self._lost is not None:
            return
        self._lost = ProcessLost(text)
        if not self._over.wait(LEAVING_S):
            self.end(text)

    def _beat(self) -> None:
        with self._lock:
            self._own["beat"] = int(str(self._own["beat"])) + 1
            self.store.set(f"{PULSE}{self.index}", json.dumps(self._own).encode())

    def _told(self) -> dict[int, dict[str, object]]:
        """Return the last heartbeat of each process that sent one."""
        entries = self.store.entries(PULSE)
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries.items()}

    @property
    def store(self) -> Store:
        """The store that all processes reach; a single process has no store."""
        assert self._given is not None, "alone there is nobody to tell"
        return self._given

    def _awaited(self, index: int, key: str, what: str, waiting: Callable[[], object]) -> bytes:
        """Wait for the value of a live process; before heartbeats start, for `deadline_s`."""
        since_s = self._clock()
        while True:
            if self._lost is not None:
                raise self._lost
            left = index in self._left  # read before its last value is looked for
            try:
                return self.store.get(key, min(POLL_S, self._deadline_s))
            except TimeoutError:
                if left:
                    text = f"process {index} has left the run, and did not come to {what!r}"
                    raise ProcessLost(text) from None
                waiting()
            late_s = self._clock() - since_s
            if self._thread is None and late_s > self._deadline_s:
                raise ProcessLost(f"process {index} did not come to {what!r} within {late_s:.1f} s")


def _gathered(row: np.ndarray) -> np.ndarray:
    """Return the rows of all processes, by a collective over the first, training device of each."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([first[index] for index in sorted(first)], ("process",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("process",), ()))
    rows = jax.make_array_from_process_local_data(split, row[np.newaxis])
    return np.asarray(_mover(whole)(rows))


@functools.cache
def _mover(whole: Any) -> Any:
    """Return the cached gather program, which is compiled once for each row size."""
    import jax

    return jax.jit(lambda rows: rows, out_shardings=whole)


ALONE = Processes()


def difference(tables: Sequence[Sequence[Sequence[str]]]) -> str:
    """Describe where tables of (name, digest) differ from the table of process 0."""
    first = tables[0]
    result = list[str]()
    for index, table in enumerate(tables):
        pairs = itertools.zip_longest(first, table, fillvalue=("nothing", ""))
        wrong = [(i, a, b) for i, (a, b) in enumerate(pairs) if list(a) != list(b)]
        names = next(((i, a[0], b[0]) for i, a, b in wrong if a[0] != b[0]), None)
        if names is not None:
            i, a, b = names
            result.append(f"process {index} has {b} in place {i} where process 0 has {a}")
        elif wrong:
            shown = "; ".join(
                f"{a[0]}: {b[1][:16]} there, {a[1][:16]} on process 0" for _, a, b in wrong[:SHOWN]
            )
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            result.append(f"process {index} differs in {len(wrong)} of {len(first)}: {shown}{more}")
    return "; ".join(result)
