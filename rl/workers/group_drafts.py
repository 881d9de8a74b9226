"""Drafts from sibling responses across programs (Seer's draft server), exchanged during rounds.

The drafters of a worker use a server in the same program; a thread exchanges updates with a central
server. If the central server is lost, workers draft from local tokens.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from reprise.spec.retrieval.group import DraftServer, Piece

MAX_ROLLOUTS = 4  # rollouts with kept tokens; two run in a pipeline
EXCHANGE_S = 0.02  # between two exchanges


class GroupDrafts:
    """The central server for all workers, in this process or an actor, with groups by rollout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers = collections.OrderedDict[str, DraftServer]()

    def exchange(
        self,
        rollout: str,
        group_size: int,
        pieces: Sequence[Piece],
        ended: Sequence[tuple[int, int]],
        seen: Mapping[int, Mapping[int, int]],
    ) -> tuple[list[Piece], list[int]]:
        """Add new tokens and ended requests (group, request) of a worker.

        Returns the tokens that the worker has not `seen`, and the groups that are over.
        """
        with self._lock:
            if rollout not in self._servers:
                self._servers[rollout] = DraftServer(group_size)
                if len(self._servers) > MAX_ROLLOUTS:
                    self._servers.popitem(last=False)
            server = self._servers[rollout]
        server.update(pieces)
        server.end([g for g, _ in ended], [r for _, r in ended])
        return server.fetch(seen)


class SharedDrafts(DraftServer):
    """The server of a worker, synchronized by `exchange` with the central server.

    A context manager. `report` is called once if the central server is lost.
    """

    def __init__(
        self,
        rollout: str,
        group_size: int,
        exchange: Callable[..., tuple[list[Piece], list[int]]],
        report: Callable[[str], None],
    ) -> None:
        super().__init__(group_size)
        self.num_drafters = 1  # represents other workers
        self._rollout = rollout
        self._size = group_size
        self._exchange = exchange
        self._report = report
        self._news = threading.Lock()
        self._new = list[Piece]()
        self._gone = list[tuple[int, int]]()
        self._has_left = threading.Event()

    def __enter__(self) -> SharedDrafts:
        threading.Thread(target=self._keep_up, name="group drafts", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left.set()  # a running exchange returns by its deadline

    def update(self, pieces: Iterable[Piece]) -> None:
        pieces = list(pieces)
        super().update(pieces)
        with self._news:
            self._new += pieces

    def end(self, group_ids: Iterable[int], request_ids: Iterable[int]) -> None:
        pairs = list(zip(group_ids, request_ids, strict=True))
        super().end([g for g, _ in pairs], [r for _, r in pairs])
        with self._news:
            self._gone += pairs

    def sync(self) -> None:
        """Exchange updates with the central server once."""
        with self._news:
            new = self._new
            self._new = []
            ended = self._gone
            self._gone = []
        pieces, over = self._exchange(self._rollout, self._size, new, ended, self.seen())
        super().update(pieces)
        self.forget(over)

    def _keep_up(self) -> None:
        while not self._has_left.wait(EXCHANGE_S):
            try:
                self.sync()
            except Exception as error:
                self._report(f"drafts of other workers are missing from now on: {error}")
                return
