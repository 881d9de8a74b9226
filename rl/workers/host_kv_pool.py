"""Keys and values of requests that wait between two chunks, in the host's memory.

One pool serves all workers of a process. A worker promises an entry before it announces it;
a worker that is told to take it waits for as long as the one that promised it is alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rl.runtime.waits import POLL_S
from rl.trajectory import PartialRequest


class KvPool:
    """Unfinished requests by id, whose keys and values take at most `most_bytes`.

    Beyond the cap an entry is kept without keys and values, which are then recomputed. Every
    method but `withdraw_all`, O(the worker's promises), takes O(1).
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # by request; of one that is only promised, the worker that is to put it
        self._entries: dict[int, PartialRequest | int] = {}
        self._promised: dict[int, set[int]] = {}  # worker → requests
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._awaited: set[int] = set()  # requests whose entries somebody waits for
        self.num_bytes = 0
        self.num_dropped = 0  # entries that came without keys and values for want of room

    def __len__(self) -> int:
        return len(self._entries)

    def promise(self, request_id: int, worker_id: int) -> None:
        """Announce an entry that a worker will put."""
        with self._lock:
            assert request_id not in self._entries, f"request {request_id} is in the pool already"
            self._entries[request_id] = worker_id
            self._promised.setdefault(worker_id, set()).add(request_id)

    def withdraw(self, request_id: int, worker_id: int) -> None:
        """Take back this worker's promise of an entry."""
        with self._lock:
            assert self._entries.pop(request_id) == worker_id, "it was promised"
            self._kept(request_id, worker_id)

    def give_up(self, request_id: int, worker_id: int) -> None:
        """Take back a promise that somebody else may have discarded."""
        with self._lock:
            if self._entries.get(request_id) == worker_id:
                del self._entries[request_id]
                self._kept(request_id, worker_id)

    def discard(self, request_id: int) -> None:
        """Remove an entry that nobody will take, or the promise of it."""
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if isinstance(entry, int):
                self._kept(request_id, entry)
            elif entry is not None and entry.kv is not None:
                self.num_bytes -= entry.kv.num_bytes

    def withdraw_all(self, worker_id: int) -> None:
        """Take back all of this worker's promises."""
        with self._lock:
            for request_id in self._promised.pop(worker_id, ()):
                del self._entries[request_id]
            self._changed.notify_all()

    def put(self, partial: PartialRequest, worker_id: int) -> None:
        """Put the entry that was promised; it is dropped if the promise was withdrawn meanwhile."""
        request_id = partial.request.request_id
        with self._lock:
            if self._entries.get(request_id) != worker_id:
                return
            size = partial.kv.num_bytes if partial.kv is not None else 0
            if self.num_bytes + size > self._most_bytes:
                partial, size = partial.without_kv(), 0
                self.num_dropped += 1
            self.num_bytes += size
            self._entries[request_id] = partial
            self._kept(request_id, worker_id)

    def take(self, request_id: int, waits_for: Callable[[int], bool]) -> PartialRequest | None:
        """Remove and return an entry; None if there is none, or its promise is withdrawn.

        While it is only promised, `waits_for` is called with the worker that promised it, again
        and again: the wait ends with None if it returns False, and with what it raises.
        """
        while True:
            with self._lock:
                entry = self._entries.get(request_id)
                if entry is None:
                    return None
                if not isinstance(entry, int):
                    del self._entries[request_id]
                    if entry.kv is not None:
                        self.num_bytes -= entry.kv.num_bytes
                    return entry
                self._awaited.add(request_id)
                self._changed.wait(POLL_S)
                self._awaited.discard(request_id)
            if not waits_for(entry):
                return None

    def _kept(self, request_id: int, worker_id: int) -> None:
        """Forget a promise, which was kept or taken back."""
        self._promised[worker_id].discard(request_id)
        if request_id in self._awaited:
            self._changed.notify_all()
