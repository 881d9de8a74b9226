"""A key-value store in memory, for the processes of a run played by threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from reprise.rl.cluster.processes import Processes

T = TypeVar("T")


class MemoryStore:
    """As `rl.cluster.processes.Store`; `broken` makes every call fail, as if it were gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = False
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._check()
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while key not in self.values:
                self._check()
                if not self._changed.wait(until_s - time.monotonic()):
                    raise TimeoutError(key)
            self._check()
            return self.values[key]

    def entries(self, prefix: str) -> Mapping[str, bytes]:
        with self._changed:
            self._check()
            return {k: v for k, v in self.values.items() if k.startswith(prefix)}

    def delete(self, key: str) -> None:
        with self._changed:
            self._check()
            self.values.pop(key, None)

    def _check(self) -> None:
        if self.broken:
            raise ConnectionError("the store is gone")


def play(
    count: int,
    work: Callable[[Processes], T],
    deadline_s: float = 60.0,
    store: MemoryStore | None = None,
) -> list[T | Exception]:
    """Return what `work` returns or raises for each of `count` processes, which are threads."""
    store = store or MemoryStore()

    def one(index: int) -> T | Exception:
        try:
            return work(Processes(index, count, store, deadline_s))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))
