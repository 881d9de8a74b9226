"""A drafting worker: a thread that hears commits, drafts on its device, and sends blocks.

    verifying worker ─ tell ─→ inbox ─→ hear … step … ─→ a link's blocks ─ take ─→ verifying worker

It never waits for a verifying worker while there is something to draft, and none of them ever waits
for it. It may raise, hang or be slow: what it has not sent is drafts that are missing.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Hashable, Sequence

from rl.engine.engine import Engine
from rl.engine.worker_record import Span
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.messages import Block, Commit, DraftLink

MOST_ROLLOUTS = 3  # whose requests are kept: that of the present step, and of those beside it
MOST_WORDS = 64  # messages in the inbox
MOST_SPANS = 2**14  # steps of a rollout that the picture of workers knows of
LOOK_S = 0.5  # between two signs of life of a worker that nobody asks


@dataclasses.dataclass(eq=False)
class _Word:
    """A message of a link: of which rollout it is, and how its drafts are made."""

    rollout: Hashable
    make: Callable[[Engine], DraftingAhead]
    link: WorkerLink
    commits: Sequence[Commit]
    closed: Sequence[int]


class DraftingWorker:
    """One drafting worker at a time, on an engine's device; `restart` begins another one.

    What it raises is kept in `error`. `alive_s` is its last sign of life, None while nothing is
    asked of it. One that falls behind `MOST_WORDS` is told no more; once it has heard them it is of
    a new `generation`, and told anew.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.generation, self.restarts, self.steps, self.busy_s = 0, 0, 0, 0.0
        self.engine = engine
        self._spans: collections.deque[Span] = collections.deque(maxlen=MOST_SPANS)
        self._given_up = False
        self._begin()

    def _begin(self) -> None:
        self._behind = False
        self.error: BaseException | None = None
        self.alive_s: float | None = None
        self._inbox: queue.SimpleQueue[_Word | None] = queue.SimpleQueue()
        args = self.engine, self._inbox
        self._thread = threading.Thread(target=self._run, args=args, name="drafting", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Leave a thread that raised or hangs, and its engine, and begin anew: all is forgotten."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self.engine = self.engine.abandoned()
        self.generation, self.restarts = self.generation + 1, self.restarts + 1
        self._begin()

    def give_up(self) -> None:
        """Leave a thread as `restart` does, and begin no other: what is told is dropped."""
        self._given_up = True
        self._inbox.put(None)
        self._inbox = queue.SimpleQueue()
        self.error, self.alive_s = None, None
        self.generation, self.restarts = self.generation + 1, self.restarts + 1

    def close(self, timeout_s: float) -> None:
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def is_busy(self) -> bool:
        """True while something is asked of it that it may answer."""
        return self.alive_s is not None and self.error is None

    def tell(self, word: _Word) -> None:
        if self._given_up:
            return
        if self.alive_s is None:
            self.alive_s = self._clock()
        self._behind = self._behind or self._inbox.qsize() >= MOST_WORDS
        if not self._behind:
            self._inbox.put(word)
        elif word.closed:
            self._inbox.put(dataclasses.replace(word, commits=()))

    def _run(self, engine: Engine, inbox: queue.SimpleQueue[_Word | None]) -> None:
        try:
            with engine.mesh_context():
                _Rollouts(self, engine, inbox).run()
        except BaseException as error:
            if inbox is self._inbox:
                self.error = error

    def worked(self, inbox: object, began_s: float) -> None:
        """Note a step that ends now; one that was left behind says nothing."""
        if inbox is self._inbox:
            ended_s = self._clock()
            self.steps, self.busy_s = self.steps + 1, self.busy_s + ended_s - began_s
            self._spans.append((began_s, ended_s))

    def spans(self) -> list[Span]:
        """Return when its steps were, of those since the last call the latest."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def caught_up(self, inbox: object) -> None:
        """Note that all words were heard; those that were left out are to be told again."""
        if inbox is self._inbox and self._behind:
            self.generation, self._behind = self.generation + 1, False

    def sign(self, inbox: object, waits: bool) -> None:
        if inbox is self._inbox:
            self.alive_s = None if waits else self._clock()

    def now_s(self) -> float:
        return self._clock()


class _Rollouts:
    """The thread's own part: the rollouts that it drafts for."""

    def __init__(
        self, worker: DraftingWorker, engine: Engine, inbox: queue.SimpleQueue[_Word | None]
    ) -> None:
        self._worker, self._engine, self._inbox = worker, engine, inbox
        self._rollouts: collections.OrderedDict[Hashable, DraftingAhead] = collections.OrderedDict()
        self._links: dict[tuple[Hashable, int], WorkerLink] = {}

    def run(self) -> None:
        worker, inbox, drafted = self._worker, self._inbox, False
        while self._hear(wait=not drafted):
            drafted = False
            for rollout, ahead in self._rollouts.items():
                worker.sign(inbox, waits=False)
                began_s = worker.now_s()
                blocks = ahead.step()
                if blocks:
                    worker.worked(inbox, began_s)
                    self._send(rollout, blocks)
                    drafted = True

    def _hear(self, *, wait: bool) -> bool:
        """Take up all that has been said; False once the worker is to end."""
        if wait and self._inbox.empty():
            self._worker.sign(self._inbox, waits=True)
        while True:
            try:
                word = self._inbox.get(timeout=LOOK_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                self._worker.caught_up(self._inbox)
                if not wait:
                    return True
                continue
            if word is None:
                return False
            self._take(word)
            wait = False

    def _take(self, word: _Word) -> None:
        self._worker.sign(self._inbox, waits=False)
        ahead = self._rollouts.get(word.rollout)
        if ahead is None:
            if not word.commits:
                return
            ahead = self._rollouts[word.rollout] = word.make(self._engine)
            while len(self._rollouts) > MOST_ROLLOUTS:
                old, _ = self._rollouts.popitem(last=False)
                for key in [key for key in self._links if key[0] == old]:
                    del self._links[key]  # of requests that were never closed
        for commit in word.commits:
            self._links[word.rollout, commit.request_id] = word.link
        for request_id in word.closed:
            self._links.pop((word.rollout, request_id), None)
        ahead.hear(word.commits, word.closed)

    def _send(self, rollout: Hashable, blocks: Sequence[Block]) -> None:
        by_link = collections.defaultdict[WorkerLink, list[Block]](list)
        for block in blocks:
            link = self._links.get((rollout, block.request_id))
            if link is not None:
                by_link[link].append(block)
        for link, some in by_link.items():
            link.bring(some)


class WorkerLink(DraftLink):
    """A verifying worker's link to a drafting worker of the same program, for one rollout."""

    def __init__(
        self,
        worker: DraftingWorker,
        rollout: Hashable,
        make: Callable[[Engine], DraftingAhead],
        look: Callable[[], object],
    ) -> None:
        self._worker, self._rollout, self._make, self._look = worker, rollout, make, look
        self._blocks: collections.deque[Block] = collections.deque()
        self._came = threading.Event()

    @property
    def generation(self) -> int:  # type: ignore[override]  # read only, and that is all it is for
        return self._worker.generation

    @property
    def is_busy(self) -> bool:
        """True if blocks may come without another word."""
        return self._worker.is_busy

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        self._look()
        self._worker.tell(_Word(self._rollout, self._make, self, commits, closed))

    def take(self) -> Sequence[Block]:
        self._came.clear()
        return [self._blocks.popleft() for _ in range(len(self._blocks))]

    def wait(self, timeout_s: float) -> None:
        self._came.wait(timeout_s)

    def bring(self, blocks: Sequence[Block]) -> None:
        """Called by the drafting worker."""
        self._blocks.extend(blocks)
        self._came.set()
