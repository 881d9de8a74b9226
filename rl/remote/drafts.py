"""Siblings' drafts between programs (Seer's draft server): asynchronous, beside the rounds.

A worker's drafters talk to a server in their own program; a thread tells a central one what is new
there, and fetches what the requests of other workers have said in the same groups. It changes
drafts only: where the central server is lost, workers draft from what they know.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable

from rl.remote.messages import CODEC, DraftNews, DraftSync, Piece, pieces_of
from rl.remote.program import MessageProgram
from rl.runtime.waits import ProgramLost
from spec.retrieval import group
from spec.retrieval.group import DraftServer

MOST_JOBS = 4  # rollouts whose tokens are kept: two run in a pipeline
SYNC_S = 0.02  # between two exchanges
Ask = Callable[[bytes], bytes]  # raises RuntimeError where the server is lost


class DraftService(MessageProgram):
    """The central server: the tokens of each rollout's groups, for all workers."""

    def __init__(self) -> None:
        super().__init__(CODEC)
        self._lock = threading.Lock()
        self._servers: collections.OrderedDict[str, DraftServer] = collections.OrderedDict()
        self.answers = {DraftSync: self._sync}

    def _sync(self, asked: DraftSync) -> DraftNews:
        server = self._server(asked.job, asked.group_size)
        server.update(pieces_of(asked.pieces))
        server.end([g for g, _ in asked.ended], [r for _, r in asked.ended])
        pieces, over = server.fetch(asked.seen)
        return DraftNews(_messages(pieces), tuple(over))

    def _server(self, job: str, group_size: int) -> DraftServer:
        with self._lock:
            found = self._servers.get(job)
            if found is None:
                found = self._servers[job] = DraftServer(group_size)
                while len(self._servers) > MOST_JOBS:
                    self._servers.popitem(last=False)
            return found


class SharedDrafts(DraftServer):
    """A worker's own server, kept up with the central one; a context manager."""

    def __init__(self, job: str, group_size: int, ask: Ask, told: Callable[[str], None]) -> None:
        super().__init__(group_size)
        self._job, self._size, self._ask, self._told = job, group_size, ask, told
        self._new: list[group.Piece] = []
        self._gone: list[tuple[int, int]] = []
        self._over_s = threading.Event()
        self._out = threading.Lock()
        self._thread = threading.Thread(target=self._keep_up, name="drafts", daemon=True)

    def __enter__(self) -> SharedDrafts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over_s.set()  # the thread may be in an exchange, whose deadline ends it

    def update(self, pieces: Iterable[group.Piece]) -> None:
        pieces = list(pieces)
        super().update(pieces)
        with self._out:
            self._new += pieces

    def end(self, group_ids: Iterable[int], request_ids: Iterable[int]) -> None:
        pairs = list(zip(group_ids, request_ids, strict=True))
        super().end([g for g, _ in pairs], [r for _, r in pairs])
        with self._out:
            self._gone += pairs

    def sync(self) -> None:
        """Exchange what is new with the central server, once."""
        with self._out:
            new, self._new = self._new, []
            gone, self._gone = self._gone, []
        asked = DraftSync(self._job, self._size, _messages(new), tuple(gone), self.seen())
        news = CODEC.decode(self._ask(CODEC.encode(asked)))
        if not isinstance(news, DraftNews):
            raise ProgramLost(f"the draft server: {getattr(news, 'message', news)}")
        super().update(pieces_of(news.pieces))
        self.forget(news.over)

    def _keep_up(self) -> None:
        while not self._over_s.wait(SYNC_S):
            try:
                self.sync()
            except (RuntimeError, ValueError) as error:
                self._told(f"drafts of other workers are not heard any more: {error}")
                return


def _messages(pieces: Iterable[group.Piece]) -> tuple[Piece, ...]:
    return tuple(Piece(*piece) for piece in pieces)
