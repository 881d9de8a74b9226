"""A verifying worker's links to drafting programs, kept up beside its rounds.

    tell → queue ─┐ thread: Exchange → drafting program → Brought ┌─ checked → take
                  └───────────────────────────────────────────────┘

No round waits for a program. Where one is lost, late or tells nonsense its link is silent: drafts
are missing until it, or the one that takes its place, answers again.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rl.drafting.elsewhere import Address, Apart
from rl.drafting.plans import Planner
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.remote.drafting_messages import (
    CODEC,
    MOST_BLOCKS,
    MOST_COMMITS,
    Brought,
    Exchange,
    blocks_of,
    of_commits,
)
from rl.remote.wire import WireError
from rl.runtime.waits import ProgramLost
from rl.speculation.device_drafters import DrafterSource
from spec.decoupled.drafter import DecoupledDrafter, OnePlan
from spec.decoupled.messages import Block, Commit, DraftLink, DraftPlan
from spec.round_times import RoundTimes

# Asks the program of an address, and waits; raises ProgramLost where there is no answer in time.
AskAt = Callable[[str, bytes], bytes]
WAIT_S = 0.01  # that an answer waits for blocks, and the next commits with it
RETRY_S = 0.5  # between two questions to a program that is lost or late
LATE_S = 1.0  # of an answer: no round waits for its blocks any more
MOST_SKIPPED = 3  # starts of a program that came to nothing, before the one that is there


class RemoteLink(DraftLink):
    """The link to one drafting program, for one rollout. A context manager, whose thread asks.

    `ask` asks the program of a name. `told` hears once that drafts are missing, and why.
    """

    def __init__(
        self,
        address: Address,
        ask: AskAt | None,
        spec: RolloutSpec,
        vocab_size: int,
        told: Callable[[str], None],
    ) -> None:
        self.generation, self._address, self._later = 0, address, 0
        self._ask, self._told, self._vocab_size = ask, told, vocab_size
        self._link = secrets.token_hex(8)
        self._key = np.asarray(jax.random.key_data(spec.key))
        self._sampling = spec.sampling
        self._changed = threading.Condition()
        self._commits = list[Commit]()
        self._closed = list[int]()
        # round and tokens of each request, the most that it was told of
        self._known: dict[int, tuple[int, int]] = {}
        self._blocks: collections.deque[Block] = collections.deque(maxlen=MOST_BLOCKS)
        self._came = threading.Event()
        self._over = self._silent = self._more = self._has_said = False
        self._asked_s: float | None = None  # when a question was sent that has no answer yet
        self._here: tuple[str, int] | None = None  # the program, and its generation
        self._thread = threading.Thread(target=self._keep_up, name="drafts from afar", daemon=True)

    def __enter__(self) -> RemoteLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:  # the thread may be in an exchange, whose deadline ends it
            self._over = True
            self._changed.notify_all()

    # -- called by the engine's thread ---------------------------------------------------

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        with self._changed:
            self._closed += closed
            if self._silent:
                return  # all is told anew once the program is there
            for commit in commits:
                before = self._known.get(commit.request_id, (0, 0))
                now = commit.round, commit.total_tokens
                self._known[commit.request_id] = max(before[0], now[0]), max(before[1], now[1])
            self._commits += commits
            if len(self._commits) > MOST_COMMITS:
                self._fall_silent()
            self._changed.notify_all()

    def take(self) -> Sequence[Block]:
        self._came.clear()
        return [self._blocks.popleft() for _ in range(len(self._blocks))]

    def wait(self, timeout_s: float) -> None:
        asked_s = self._asked_s
        late = asked_s is not None and time.monotonic() - asked_s > LATE_S
        if not self._silent and not late:
            self._came.wait(timeout_s)

    # -- the thread ----------------------------------------------------------------------

    def _keep_up(self) -> None:
        while self._wait_for_news():
            try:
                self._exchange()
            except (RuntimeError, ValueError) as error:
                self._lose(str(error))

    def _wait_for_news(self) -> bool:
        """Return True once there is something to say or to ask, False at the end."""
        with self._changed:
            if self._silent:
                self._changed.wait_for(lambda: self._over, RETRY_S)
            else:
                self._changed.wait_for(
                    lambda: self._over or self._commits or self._closed or self._more
                )
            return not self._over

    def _exchange(self) -> None:
        with self._changed:
            commits, self._commits = self._commits, []
            closed = tuple(self._closed)
        rollout = self._link, self._key, self._sampling
        asked = Exchange(*rollout, of_commits(commits), closed, WAIT_S)
        self._asked_s = time.monotonic()
        answer = CODEC.decode(self._answer(CODEC.encode(asked)))
        self._asked_s = None
        if not isinstance(answer, Brought):
            raise WireError(str(getattr(answer, "message", answer)))
        blocks, here = blocks_of(answer.blocks), (answer.program, answer.generation)
        with self._changed:
            self._check(blocks)
            if self._silent or self._here not in (None, here):
                self.generation += 1
            self._silent, self._here, self._more = False, here, answer.more
            self._blocks.extend(blocks)
            del self._closed[: len(closed)]  # until it is heard they are said again
        if blocks:
            self._came.set()

    def _answer(self, message: bytes) -> bytes:
        if self._ask is None:
            raise ProgramLost("this worker reaches no drafting programs")
        return self._ask(self._address.name(self._later), message)

    def _check(self, blocks: Sequence[Block]) -> None:
        """Raise WireError for blocks of requests that the program does not know, or other words."""
        for block in blocks:
            number, tokens = self._known.get(block.request_id, (0, 0))
            if block.round > number or block.base_tokens > tokens:
                raise WireError(
                    f"expected blocks of what was told, got one of request {block.request_id} "
                    f"behind {block.base_tokens} tokens"
                )
            if block.tokens_N.max() >= self._vocab_size:
                raise WireError(f"expected tokens below {self._vocab_size}, got others")

    def _lose(self, why: str) -> None:
        with self._changed:
            self._asked_s, name = None, self._address.name(self._later)
            self._fall_silent()
            # another program may have taken its place, or come to nothing before that
            self._later = (self._later + 1) % (MOST_SKIPPED + 1)
            if self._over or self._has_said:
                return
            self._has_said = True
        self._told(f"drafts of {name} are missing: {why[:300]}")

    def _fall_silent(self) -> None:
        """The lock is held."""
        self._silent, self._more = True, False
        self._commits.clear()


class SilentLink(DraftLink):
    """A link to nobody."""

    generation = 0

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        return

    def take(self) -> Sequence[Block]:
        return ()

    def wait(self, timeout_s: float) -> None:
        return


class SilentDrafts(DrafterSource):
    """Drafters that get no drafts, to compile what they do on the host."""

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        return DecoupledDrafter([SilentLink()], OnePlan(DraftPlan(1)), context.spec.sampling)


class DraftsApart(DrafterSource):
    """The drafters of one rollout, whose drafts come from programs; a context manager."""

    def __init__(
        self, apart: Apart, planner: Planner, ask: AskAt | None, told: Callable[[str], None]
    ) -> None:
        self._apart, self._planner, self._ask, self._told = apart, planner, ask, told
        self._links = contextlib.ExitStack()

    def __enter__(self) -> DraftsApart:
        return self

    def __exit__(self, *_: object) -> None:
        self._links.close()

    def drafter_for(self, context: DrafterContext) -> DecoupledDrafter:
        given = self._ask, context.spec, context.runner.model.vocab_size, self._told
        links = [RemoteLink(address, *given) for address in self._apart.addresses]
        for link in links:
            self._links.enter_context(link)
        return DecoupledDrafter(links, self._planner.plans(), context.spec.sampling)


class WorkerDrafting:
    """A rollout worker's part in drafting apart: its planner, which learns from all its rollouts.

    `ask` asks the program of a name, and raises ProgramLost where there is no answer in time.
    """

    def __init__(self, ask: AskAt | None, told: Callable[[str], None]) -> None:
        self._ask, self._told = ask, told
        self._planner: Planner | None = None

    def drafts(self, apart: Apart, times: RoundTimes | None) -> DraftsApart:
        """Return the drafters of a rollout; `times` are the seconds of this worker's rounds."""
        if self._planner is None or self._planner.config != apart.config:
            self._planner = apart.planner()
        self._planner.seconds = apart.seconds(times)
        return DraftsApart(apart, self._planner, self._ask, self._told)
