"""A drafting worker, and the link that verifying workers use to call it.

    DecoupledDrafter ─ send: commits → DraftingLink ─ a thread → DraftingWorker.draft
    DecoupledDrafter ← take: blocks ── DraftingLink ←── Answer ──┘

The same class runs in a thread or a Ray actor (rl.drafting.workers). Links make calls during the
rounds of their verifying workers; while a call fails or hangs, rounds have no drafts.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from reprise.rl.cluster.actors import ActorDied
from reprise.rl.drafting.config import DraftingConfig, methods_of
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.worker_record import Span
from reprise.rl.runtime.parallel_compile import OnCompiled, unwatched
from reprise.rl.runtime.waits import HANG_LIMIT_S
from reprise.rl.speculation.device_drafters import DraftModel
from reprise.rl.warm_up import compile_buckets
from reprise.spec.config import SamplingConfig
from reprise.spec.decoupled.ahead import DraftingAhead, Enumerating, FreeRunning
from reprise.spec.decoupled.messages import Block, Commit, DraftLink, DraftPlan
from reprise.spec.draft_model.enumeration import AheadDraftModel, EnumeratingDraftModel
from reprise.spec.drafter import Program
from reprise.spec.verification.sampling import KEY_IMPL, step_key

FAN_OUT = 3  # guesses of each next token, with `enumeration`
MAX_ROLLOUTS = 3  # rollouts with kept requests: of the present step and its neighbours
MAX_SPANS = 2**14  # steps of a rollout in the picture of workers
MAX_RESTARTS = 3  # consecutive, without a block
LEAVING_S = 5.0  # for a step to finish
LATE_S = 1.0  # a round does not wait for a call that takes longer
REPEATS = 3  # of a timed step
MIN_SECONDS = 1e-7


class Rollout(NamedTuple):
    """The part of a rollout that its drafts depend on: draft model, noise and sampling."""

    method: str
    key_data: tuple[int, ...]
    sampling: SamplingConfig

    @classmethod
    def of(cls, method: str, key: jax.Array, sampling: SamplingConfig) -> Rollout:
        return cls(method, tuple(np.asarray(jax.random.key_data(key)).tolist()), sampling)

    @property
    def key(self) -> jax.Array:
        return jax.random.wrap_key_data(np.array(self.key_data, np.uint32), impl=KEY_IMPL)


class Answer(NamedTuple):
    """Blocks for requests of a link; `start` changes if the worker has forgotten all requests.

    With `has_more`, another call without updates may return more blocks.
    """

    start: str
    blocks: Sequence[Block]
    has_more: bool


Draft = Callable[[Rollout, str, Sequence[Commit], Sequence[int]], Answer]  # DraftingWorker.draft
# A call of a link with its start time, and the commits and closed requests that it sends.
Sent = tuple[tuple[Draft, float], list[Commit], list[int]]


@dataclasses.dataclass(eq=False)
class _Call:
    rollout: Rollout
    link: str
    commits: Sequence[Commit]
    closed: Sequence[int]
    is_served: bool = False


@dataclasses.dataclass(eq=False)
class _Drafted:
    """The drafter of a rollout, the link of each request, and blocks that are not fetched yet."""

    ahead: DraftingAhead
    links: dict[int, str] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[Block]] = dataclasses.field(default_factory=dict)

    def update(self, call: _Call) -> None:
        """Apply commits; close requests that ended or that come from another link than before."""
        sent = {commit.request_id: call.link for commit in call.commits}
        closed = [r for r in call.closed if self.links.get(r) == call.link]
        closed += [r for r in sent if self.links.get(r, call.link) != call.link]
        for request_id in closed:
            del self.links[request_id]
        self.links |= sent
        self.ahead.update(call.commits, closed)


class DraftingWorker:
    """Drafts ahead of verifying workers on the device of `engine`; thread-safe.

    A step drafts for all requests of a rollout. Calls that wait for a step share the next step.
    """

    def __init__(
        self,
        engine: Engine,
        models: Sequence[DraftModel],
        config: DraftingConfig,
        max_window: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self._config = config
        self._max_window = max_window
        self._models = dict(zip(methods_of(len(models)), models, strict=True))
        self._clock = clock
        self.num_steps = 0
        self.busy_s = 0.0
        self._spans = collections.deque[Span](maxlen=MAX_SPANS)
        self._calls = collections.deque[_Call]()
        self._stepping = threading.Lock()
        self._is_closed = False
        self._forget()

    def draft(
        self, rollout: Rollout, link: str, commits: Sequence[Commit], closed: Sequence[int]
    ) -> Answer:
        """Update requests, draft once, and return the blocks for requests of this link.

        If drafting fails, all requests are forgotten.
        """
        call = _Call(rollout, link, commits, closed)
        self._calls.append(call)
        with self._stepping, self.engine.mesh_context():
            if not call.is_served and not self._is_closed:
                try:
                    self._serve()
                except BaseException:
                    self._forget()
                    raise
            drafted = self._rollouts.get(rollout)
            blocks = drafted.blocks.pop(link, []) if drafted else []
        return Answer(self._start, blocks, bool(blocks) and self._config.ahead == "free_running")

    def prepare(self, sampling: SamplingConfig, report: OnCompiled = unwatched) -> None:
        """Compile all programs of a rollout with this sampling, and run them once."""
        for method in self._models:
            rollout = Rollout.of(method, step_key(0, 0), sampling)
            compile_buckets.prepare(self.engine, self._programs(rollout), report)

    def draft_seconds(self, sampling: SamplingConfig) -> dict[str, float]:
        """Measure the seconds of a draft token for all requests of this worker, by method.

        Times a step of the longest window, which takes as long for fewer requests.
        """
        result = dict[str, float]()
        window = self._max_window
        prompt = np.zeros(1, np.int32)
        none = np.zeros(0, np.int32)
        plan = DraftPlan(window)
        for method in self._models:
            with self.engine.mesh_context():
                ahead = self.make_ahead(Rollout.of(method, step_key(0, 0), sampling))
                tries = list[float]()
                for n in range(REPEATS + 1):
                    rows = range(self.engine.config.max_slots)
                    ahead.update(
                        [
                            Commit(r, 1 + n, n, prompt, 1, 2 * window, none, plan, (1.0, 0.0, 1.0))
                            for r in rows
                        ],
                        (),
                    )
                    start_s = self._clock()
                    ahead.step()
                    tries.append(self._clock() - start_s)
            result[method] = max(float(np.median(tries[1:])), MIN_SECONDS) / window
        return result

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans of the steps since the last call, or of the latest MAX_SPANS."""
        return tuple(self._spans.popleft() for _ in range(len(self._spans)))

    def close(self) -> None:
        """Stop drafting; wait for the running step, unless it hangs."""
        self._is_closed = True
        if self._stepping.acquire(timeout=LEAVING_S):
            self._stepping.release()

    def make_ahead(self, rollout: Rollout) -> DraftingAhead:
        """Return the drafter of one rollout."""
        num_rows = self.engine.config.max_slots
        max_tokens = self.engine.longest_tokens
        drafter = self._drafter(rollout)
        if isinstance(drafter, EnumeratingDraftModel):
            return Enumerating(
                drafter,
                num_rows,
                max_tokens,
                max_window=self._max_window,
                fan_out=FAN_OUT,
            )
        return FreeRunning(drafter, num_rows, max_tokens)

    def _drafter(self, rollout: Rollout) -> AheadDraftModel:
        enumerates = self._config.ahead == "enumeration"
        spec = RolloutSpec((), rollout.sampling, rollout.key)  # type: ignore[arg-type]
        context = self.engine.drafter_context(spec)  # the drafter reads no policy weights
        kind = EnumeratingDraftModel if enumerates else AheadDraftModel
        return self._models[rollout.method].make_drafter(kind, context, self._max_window)

    def _programs(self, rollout: Rollout) -> list[Program]:
        rows = self.engine.config.max_slots
        with self.engine.mesh_context():
            drafter = self._drafter(rollout)
            if isinstance(drafter, EnumeratingDraftModel):
                return [*drafter.enumerating(rows, self._max_window, FAN_OUT)]
            return [*drafter.programs(rows)]

    def _forget(self) -> None:
        self._start = secrets.token_hex(8)
        self._rollouts = collections.OrderedDict[Rollout, _Drafted]()

    def _serve(self) -> None:
        """Apply all waiting calls, then draft once for each of their rollouts."""
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        for call in calls:
            call.is_served = True
            drafted = self._rollouts.get(call.rollout)
            if drafted is None and call.commits:
                drafted = _Drafted(self.make_ahead(call.rollout))
                self._rollouts[call.rollout] = drafted
                if len(self._rollouts) > MAX_ROLLOUTS:
                    self._rollouts.popitem(last=False)
            if drafted is not None:
                drafted.update(call)
        for rollout in dict.fromkeys(call.rollout for call in calls):
            if rollout in self._rollouts:
                self._step(self._rollouts[rollout])

    def _step(self, drafted: _Drafted) -> None:
        start_s = self._clock()
        blocks = drafted.ahead.step()
        if not blocks:
            return
        ended_s = self._clock()
        self.num_steps = self.num_steps + 1
        self.busy_s = self.busy_s + ended_s - start_s
        self._spans.append((start_s, ended_s))
        for block in blocks:
            if (link := drafted.links.get(block.request_id)) is not None:
                drafted.blocks.setdefault(link, []).append(block)


class Peer:
    """The `draft` method of a drafting worker for the links of this process.

    `draft` is None once the worker is given up. `report` is called with a line about each failure.
    `replace` replaces a hung worker and returns the new method.
    """

    def __init__(
        self,
        name: str,
        draft: Draft | None,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        hang_limit_s: float = HANG_LIMIT_S,
        replace: Callable[[], Draft] | None = None,
    ) -> None:
        self.draft = draft
        self.clock = clock
        self.hang_limit_s = hang_limit_s
        self.failures = 0  # consecutive, without a block
        self._name = name
        self._report = report
        self._replace = replace
        self._lock = threading.Lock()

    def fail(self, draft: Draft, error: BaseException) -> None:
        """Count a failure of this method; give the worker up after too many failures."""
        with self._lock:
            if draft is not self.draft:
                return  # another link has reported the failure
            self.failures += 1
            has_failed = self.failures > MAX_RESTARTS or isinstance(error, ActorDied)
            if has_failed:
                self.draft = None
            elif isinstance(error, TimeoutError) and self._replace is not None:
                self.draft = self._replace()
            line = str(error).strip().partition("\n")[0][:300]
            end = "verifying workers go on without it" if has_failed else "it starts again"
            self._report(f"warning: {self._name} failed: {type(error).__name__}: {line}; {end}")


class DraftingLink(DraftLink):
    """The link of a verifying worker to one drafting worker, for one rollout.

    A thread makes one call at a time, until there is nothing to send or to fetch. After a failed
    call, `generation` grows, so that all requests are sent again from their first token.
    """

    def __init__(self, peer: Peer, rollout: Rollout) -> None:
        self.generation = 0
        self._peer = peer
        self._rollout = rollout
        self._name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._commits = dict[int, Commit]()
        self._closed = list[int]()  # not sent yet
        self._blocks = collections.deque[Block]()
        self._arrived = threading.Event()
        self._call: tuple[Draft, float] | None = None  # running, with its start time
        self._start: str | None = None

    def send(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        with self._lock:
            self._check_hang()
            if self._peer.draft is None:
                return
            for request_id in closed:
                self._commits.pop(request_id, None)
            self._closed += closed
            for commit in commits:
                before = self._commits.get(commit.request_id)
                self._commits[commit.request_id] = _merged(before, commit)
            if self._call is None and (sent := self._next_call(has_more=False)) is not None:
                run = partial(self._run, sent)
                threading.Thread(target=run, name="drafting", daemon=True).start()

    def take(self) -> Sequence[Block]:
        self._arrived.clear()
        return [self._blocks.popleft() for _ in range(len(self._blocks))]

    def wait(self, timeout_s: float) -> None:
        call = self._call
        if call is not None and self._peer.clock() - call[1] <= LATE_S:
            self._arrived.wait(timeout_s)

    def _check_hang(self) -> None:
        """Give up a call that hangs."""
        if self._call is None:
            return
        draft, since_s = self._call
        if (waited_s := self._peer.clock() - since_s) > self._peer.hang_limit_s:
            self._fail(draft, TimeoutError(f"no answer for {waited_s:.1f} s"))

    def _next_call(self, *, has_more: bool) -> Sent | None:
        """Return the next call with its commits and closed requests; None if not needed."""
        draft = self._peer.draft
        if draft is None or not (has_more or self._commits or self._closed):
            return None
        self._call = call = draft, self._peer.clock()
        commits = list(self._commits.values())
        closed = self._closed
        self._commits = {}
        self._closed = []
        return call, commits, closed

    def _run(self, sent: Sent | None) -> None:
        """Make calls until no call is needed."""
        while sent is not None:
            call, commits, closed = sent
            answer: Answer | BaseException
            try:
                answer = call[0](self._rollout, self._name, commits, closed)
            except BaseException as error:
                answer = error
            with self._lock:
                if self._call is not call:
                    return  # the call hung, and was given up
                self._call = None
                if isinstance(answer, BaseException):
                    return self._fail(call[0], answer)
                self.generation += self._start not in (None, answer.start)
                self._start = answer.start
                if answer.blocks:
                    self._peer.failures = 0
                    self._blocks.extend(answer.blocks)
                    self._arrived.set()
                sent = self._next_call(has_more=answer.has_more)

    def _fail(self, draft: Draft, error: BaseException) -> None:
        self._call = None
        self._start = None
        self._commits = {}
        self._closed = []
        self.generation += 1
        self._peer.fail(draft, error)


def _merged(before: Commit | None, commit: Commit) -> Commit:
    """Merge two commits of a request into one, so that a slow worker has no backlog."""
    if before is None or commit.first != before.total_tokens:
        return commit
    tokens = np.concatenate([before.tokens, commit.tokens])
    return commit._replace(first=before.first, tokens=tokens)
