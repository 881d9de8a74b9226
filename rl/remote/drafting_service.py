"""A drafting program: drafting workers on its devices, which draft for workers of other programs.

    Exchange → a talk's links → inboxes of the threads (rl.drafting.worker) → blocks → Brought

Threads that raise or hang are replaced here; the loss of the program costs drafts. Messages are
those of `rl.remote.drafting_messages`.
"""

from __future__ import annotations

import collections
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import jax
import numpy as np

from rl.cluster.join import DRAFT_MODEL
from rl.drafting.ahead_maker import DraftedRollout, ModelAhead, draft_seconds, drafting_engines
from rl.drafting.threads import DraftingThreads
from rl.drafting.worker import WorkerLink
from rl.engine.engine import Engine
from rl.remote.drafting_messages import (
    CODEC,
    Brought,
    Exchange,
    Look,
    Meet,
    Prepare,
    Prepared,
    Seen,
    commits_of,
    of_blocks,
)
from rl.remote.service import Met, ServiceProgram, service_identity
from rl.remote.wire import WireError
from rl.remote.worker_drafters import folder_here
from rl.speculation.draft_model import DraftModel
from rl.warm_up import compile_buckets
from spec.config import SamplingConfig
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.messages import Block, Commit
from spec.sampling import KEY_IMPL, step_key

MOST_TALKS = 2**10  # with links of verifying workers, of which each has one in a rollout
MOST_WAIT_S = 60.0  # of a question
LOOK_S = 1e-3  # between two looks for blocks


class DraftingProgram(ServiceProgram):
    """Answers messages; `config_text` is the configuration of the run that it was started for."""

    def __init__(
        self,
        config_text: str,
        leave: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(CODEC, config_text, leave, clock)
        self._name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._drafting: _Drafting | None = None
        self._prepared: Future[Prepared] | None = None
        self._talks: collections.OrderedDict[Hashable, _Talk] = collections.OrderedDict()
        self._remarks = list[str]()
        self.answers = {
            Meet: self._meet,
            Prepare: self._prepare,
            Look: self._look,
            Exchange: self._exchange,
        }

    def close(self) -> None:
        """End the threads."""
        if self._drafting is not None:
            self._drafting.threads.close()

    def _meet(self, asked: Meet) -> Met:
        if self._drafting is not None:
            raise WireError("expected Meet once")
        mine = service_identity(self._config, folder_here(asked.model))
        met = self.meet(asked.identity, asked.silence_s, {DRAFT_MODEL: mine[DRAFT_MODEL]})
        drafting = _Drafting(asked, self._clock, self._remarks.append)
        with self._lock:
            self._drafting = drafting
        return met

    def _prepare(self, asked: Prepare) -> Prepared:
        drafting = self._told()
        with self._lock:
            if self._prepared is None:
                self._prepared = Future()
                given = drafting, self._prepared
                work = threading.Thread(target=_prepare, args=given, name="prepare", daemon=True)
                work.start()
        wait([self._prepared], min(max(asked.wait_s, 0.0), MOST_WAIT_S))
        return self._prepared.result() if self._prepared.done() else Prepared(False)

    def _look(self, _: Look) -> Seen:
        threads = self._told().threads
        threads.look()
        remarks = tuple(self._remarks)
        del self._remarks[: len(remarks)]
        steps = sum(worker.steps for worker in threads.workers)
        return Seen(steps, sum(worker.busy_s for worker in threads.workers), remarks)

    def _exchange(self, asked: Exchange) -> Brought:
        drafting = self._told()
        if self._prepared is None or not self._prepared.done():
            raise WireError("expected an Exchange once it is prepared")
        commits = commits_of(asked.commits)
        drafting.check(commits)
        talk = self._talk(drafting, asked)
        talk.tell(commits, asked.closed)
        wait_s = min(max(asked.wait_s, 0.0), MOST_WAIT_S)
        blocks = talk.take(wait_s, self._clock)
        return Brought(self._name, drafting.generation, of_blocks(blocks), drafting.is_busy)

    def _told(self) -> _Drafting:
        if self._drafting is None:
            raise WireError("expected Meet first")
        return self._drafting

    def _talk(self, drafting: _Drafting, asked: Exchange) -> _Talk:
        rollout = asked.key.tobytes(), asked.sampling
        with self._lock:
            found = self._talks.get((rollout, asked.link))
            if found is None:
                links = drafting.links(rollout, asked.key, asked.sampling)
                found = self._talks[rollout, asked.link] = _Talk(links)
                while len(self._talks) > MOST_TALKS:
                    self._talks.popitem(last=False)
            self._talks.move_to_end((rollout, asked.link))
            return found


class _Drafting:
    """The drafting workers of the program's devices, with a draft model read from its folder."""

    def __init__(
        self, asked: Meet, clock: Callable[[], float], told: Callable[[str], None]
    ) -> None:
        devices = jax.local_devices()
        if asked.devices > len(devices):
            raise ValueError(
                f"expected {asked.devices} devices for Sched.devices_per_worker, got "
                f"{len(devices)} on this host"
            )
        self._asked, self._clock = asked, clock
        model = DraftModel.load(asked.model)
        self._maker = ModelAhead(model, asked.drafting, asked.most_window)
        places = devices[: asked.devices] if asked.devices > 1 else (None,)
        make = partial(Engine, asked.policy, asked.engine, dtype=asked.dtype)
        engines = [make(device=device) for device in places]
        sizes = asked.rows, asked.longest_tokens, asked.most_window
        self._engines = drafting_engines(engines, *sizes)
        options = {"clock": clock, "told": told, "hang_limit_s": asked.hang_limit_s}
        self.threads = DraftingThreads(self._engines, **options)  # type: ignore[arg-type]

    @property
    def generation(self) -> int:
        """A number that grows where one of the threads is replaced."""
        return sum(worker.generation for worker in self.threads.workers)

    @property
    def is_busy(self) -> bool:
        """True if blocks may come without another word."""
        return any(worker.is_busy for worker in self.threads.workers)

    def prepare(self) -> Prepared:
        """Compile and run once what drafts, and time it."""
        rollout = DraftedRollout(step_key(0, 0), self._asked.sampling)
        for engine in self._engines:
            compile_buckets.prepare(engine, self._maker.programs(engine, rollout))
        given = self._engines[0], rollout, self._asked.most_window, self._clock
        draft_s = draft_seconds(self._maker, *given)
        return Prepared(True, draft_s)

    def check(self, commits: Sequence[Commit]) -> None:
        """Raise WireError for commits that the tables of requests have no room for."""
        asked = self._asked
        for commit in commits:
            if commit.total_tokens + commit.remaining_tokens > asked.longest_tokens:
                raise WireError(
                    f"request {commit.request_id}: expected at most {asked.longest_tokens} tokens, "
                    f"got {commit.total_tokens} and {commit.remaining_tokens} more"
                )
            most = max(commit.tokens.max(), commit.chain.max(initial=0))
            if most >= asked.policy.vocab_size or commit.plan.window > asked.most_window:
                raise WireError(
                    f"request {commit.request_id}: expected tokens below {asked.policy.vocab_size} "
                    f"and a window of at most {asked.most_window}, got {most} and "
                    f"{commit.plan.window}"
                )

    def links(
        self, rollout: Hashable, key: np.ndarray, sampling: SamplingConfig
    ) -> list[WorkerLink]:
        """Return a link to each thread, for one link of a verifying worker in a rollout."""
        shape = jax.random.key_data(jax.random.key(0, impl=KEY_IMPL)).shape
        if key.shape != shape:
            raise WireError(f"expected a key of {shape}, got {key.shape}")

        def make(engine: Engine) -> DraftingAhead:
            noise = jax.random.wrap_key_data(key, impl=KEY_IMPL)
            return self._maker.ahead(engine, DraftedRollout(noise, sampling))

        look, workers = self.threads.look, self.threads.workers
        return [WorkerLink(worker, rollout, make, look) for worker in workers]


class _Talk:
    """The talk with one link of a verifying worker, whose requests the threads share."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self._links, self._lock = links, threading.Lock()
        self._of: dict[int, int] = {}  # the thread of each request

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        news: list[tuple[list[Commit], list[int]]] = [([], []) for _ in self._links]
        with self._lock:
            for request_id in closed:
                if (k := self._of.pop(request_id, None)) is not None:
                    news[k][1].append(request_id)
            for commit in commits:
                news[self._thread(commit.request_id)][0].append(commit)
        for link, (some, gone) in zip(self._links, news, strict=True):
            if gone:  # before a request that comes back
                link.tell((), gone)
            if some:
                link.tell(some, ())

    def _thread(self, request_id: int) -> int:
        """Return the thread of a request; of a new one, that with the fewest."""
        if request_id not in self._of:
            counts = collections.Counter(self._of.values())
            self._of[request_id] = min(range(len(self._links)), key=lambda k: counts[k])
        return self._of[request_id]

    def take(self, wait_s: float, clock: Callable[[], float]) -> list[Block]:
        """Return the blocks that have come; where there are none, wait while some are made."""
        until_s = clock() + wait_s
        blocks = self._taken()
        while not blocks and clock() < until_s:
            for link in self._links:
                link.wait(LOOK_S / len(self._links))
            blocks = self._taken()
            if not any(link.is_busy for link in self._links):
                return blocks + self._taken()
        return blocks

    def _taken(self) -> list[Block]:
        return [block for link in self._links for block in link.take()]


def _prepare(drafting: _Drafting, prepared: Future[Prepared]) -> None:
    try:
        prepared.set_result(drafting.prepare())
    except BaseException as error:
        prepared.set_exception(error)
