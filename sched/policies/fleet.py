"""The workers by their free room: who can take the next request."""

from __future__ import annotations

import heapq

from sched.request import Worker


class WorkerHeap:
    """Workers, the one with the most free positions first; ties go by number."""

    def __init__(self, workers: dict[int, Worker]) -> None:
        self._workers = workers  # the ledger's own
        self._heap: list[tuple[int, int]] = []  # (−free tokens, worker): stale ones are dropped

    def changed(self, worker_id: int) -> None:
        """Tell of every worker that joined, or whose room has changed."""
        worker = self._workers.get(worker_id)
        if worker is not None and len(worker.running) < worker.max_requests:
            heapq.heappush(self._heap, (-worker.free_tokens, worker_id))

    def least_loaded(self, tokens: int) -> Worker | None:
        """The worker with the most room, where `tokens` fit there."""
        heap = self._heap
        while heap:
            free, worker_id = heap[0]
            worker = self._workers.get(worker_id)
            current = worker is not None and -free == worker.free_tokens
            if current and len(worker.running) < worker.max_requests:  # type: ignore[union-attr]
                return worker if tokens <= -free else None
            heapq.heappop(heap)
        return None
