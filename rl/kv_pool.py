"""Keys and values of requests that wait between two chunks, in the host's memory.

One pool serves all workers of a process. A worker promises an entry before it lets others
know of it, so that one who is told to take it waits for it at most as long as a copy takes.
"""

from __future__ import annotations

import dataclasses
import threading

from rl.trajectory import Begun

PATIENCE_S = 60.0  # for a promised entry: a copy takes milliseconds


@dataclasses.dataclass(frozen=True)
class _Promise:
    worker_id: int


class KvPool:
    """Half-done requests by number; `most_bytes` caps what their keys and values take.

    Beyond the cap an entry is kept without keys and values: they are computed anew.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: dict[int, Begun | _Promise] = {}
        self._changed = threading.Condition()
        self.num_bytes = 0
        self.num_dropped = 0  # entries that came without keys and values for want of room

    def __len__(self) -> int:
        return len(self._entries)

    def promise(self, request_id: int, worker_id: int) -> None:
        """An entry is on its way from a worker."""
        with self._changed:
            assert request_id not in self._entries, f"request {request_id} is in the pool already"
            self._entries[request_id] = _Promise(worker_id)

    def withdraw(self, request_id: int) -> None:
        """The entry that was promised will not come."""
        with self._changed:
            assert isinstance(self._entries.pop(request_id), _Promise), "it was promised"
            self._changed.notify_all()

    def withdraw_all(self, worker_id: int) -> None:
        """Nothing that this worker has promised will come."""
        promise = _Promise(worker_id)
        with self._changed:
            self._entries = {r: e for r, e in self._entries.items() if e != promise}
            self._changed.notify_all()

    def put(self, begun: Begun) -> None:
        """The entry that was promised."""
        request_id = begun.request.request_id
        with self._changed:
            assert isinstance(self._entries[request_id], _Promise), "it was promised"
            size = begun.kv.num_bytes if begun.kv is not None else 0
            if self.num_bytes + size > self._most_bytes:
                begun, size = begun.without_kv(), 0
                self.num_dropped += 1
            self.num_bytes += size
            self._entries[request_id] = begun
            self._changed.notify_all()

    def take(self, request_id: int) -> Begun | None:
        """Take an entry out, waiting for one that is promised; None where there is none."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: not isinstance(self._entries.get(request_id), _Promise), PATIENCE_S
            )
            if not arrived:
                raise TimeoutError(f"request {request_id} was promised and did not come")
            begun = self._entries.pop(request_id, None)
            assert not isinstance(begun, _Promise)
            if begun is not None and begun.kv is not None:
                self.num_bytes -= begun.kv.num_bytes
            return begun
