"""The rounds of one worker: admit → draft → verify → commit → retire.

    with engine.rollout(spec, max_requests=64, max_tokens=2048):
        engine.add(requests)
        while engine.has_work:
            for event in engine.step():
                ...                     # a Trajectory, or a ChunkEnd: `extend` or `take` it

Shapes come from a pool of buckets (slots, positions, nodes: powers of two), each compiled once;
`rl.slot_memory.slot_cache` holds the cache. Each device call has one fetch, and runs several rounds
when no draft is wanted. The engine owns no weights; every rollout supplies its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from reprise.models.decoder.transformer import Params
from reprise.rl.engine.rollout_spec import CachedStates, DrafterContext, RolloutSpec
from reprise.rl.engine.rounds import Limits, Rounds
from reprise.rl.engine.speculate import Speculator
from reprise.rl.records.stats import EngineStats, RoundRecord
from reprise.rl.records.trajectory import (
    PartialRequest,
    Request,
    Trajectory,
    check_finite,
    longest_tokens,
)
from reprise.rl.runtime import compilations
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slot_memory.slot_cache import SlotCache
from reprise.rl.slot_memory.state_delivery import StateDelivery
from reprise.rl.slots import admission
from reprise.rl.slots.admission import WaitingQueue
from reprise.rl.slots.cached_prefixes import CachedPrefixes
from reprise.rl.slots.slot_table import SlotTable
from reprise.sched.request import copy_of
from reprise.spec.budget.budget import plain
from reprise.spec.reuse.chunk_price import ChunkPrice

T = TypeVar("T")
UNLIMITED = 2**62  # cache positions
OnFinish = Callable[[Trajectory], None]
OnRound = Callable[[int, int], None]  # (responses finished, tokens emitted) so far


class ChunkEnd(NamedTuple):
    """A request has gained its `max_tokens`; it holds its row until `extend` or `take`."""

    request_id: int
    response_tokens: int


Event = Trajectory | ChunkEnd


class Engine(ModelRunner):
    """A model runner that turns requests into trajectories, one rollout at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats = EngineStats()
        self._rows = SlotCache(self)
        self._table = self._rows.table  # of the current rollout

    @property
    def engines(self) -> Sequence[Engine]:
        return (self,)

    @property
    def rows(self) -> SlotCache:
        """Return the rows of the current rollout."""
        return self._rows

    @property
    def where(self) -> str:
        """Return a name for the devices of this engine."""
        devices = [self.device] if self.mesh is None else list(self.mesh.devices.flat)
        first = devices[0] or jax.local_devices()[0]
        more = len(devices) - 1
        return f"{first.platform}:{first.id}" + (f" and {more} more" if more else "")

    def abandoned(self) -> Engine:
        """Return a new engine to replace this engine after its thread hung."""
        return dataclasses.replace(self)

    def do(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread of rollouts, here the current thread; return its result."""
        return work()

    def drafter_context(self, spec: RolloutSpec) -> DrafterContext:
        """Return the context that the drafters of a rollout are made for."""
        return DrafterContext(self, spec, CachedStates(self, lambda: self._rows.cache))

    def free(self) -> None:
        """Free the memory of the cache; the next rollout allocates a new cache."""
        self._rows.drop()

    # -- the rollout -------------------------------------------------------

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        stats: EngineStats | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate all responses to their end; return trajectories in the order of the requests.

        `on_round` is called after every fetch and may raise, which stops the rollout. All processes
        of a mesh make the same call. Raises ValueError, before any device work, for requests that
        cannot run: empty or too long prompts, tokens outside the vocabulary, repeated ids. Raises
        NonFiniteLogits if a response ended at logits that are not finite.
        """
        self.check(requests, spec.sampling)
        spec.endings(requests)
        max_tokens = longest_tokens(requests, spec.sampling)
        done = dict[int, Trajectory]()
        with self.rollout(spec, max_requests=len(requests), max_tokens=max_tokens, stats=stats):
            self._waiting.add([PartialRequest(r) for r in requests], is_new=True)
            if self._table.cached is not None:
                self._table.cached.play(requests, self._table.num_slots, self._rows.num_positions)
            while self.has_work:
                for trajectory in self.step():
                    assert isinstance(trajectory, Trajectory), "whole requests have no chunks"
                    check_finite(trajectory)
                    done[trajectory.request_id] = trajectory
                    if on_finish is not None:
                        on_finish(trajectory)
                if on_round is not None:
                    on_round(len(done), self.stats.tokens)
        return [done[r.request_id] for r in requests]

    @contextlib.contextmanager
    def rollout(
        self,
        spec: RolloutSpec,
        *,
        max_requests: int,
        max_tokens: int,
        kv_tokens: int | None = None,
        stats: EngineStats | None = None,
    ) -> Iterator[None]:
        """Open a rollout: within the context, `add`, `step` and `remove` work on its requests.

        At most `max_requests` run concurrently, each with at most `max_tokens` of prompt and
        response together; all hold at most `kv_tokens` cache positions, if set.
        """
        self.stats = stats or EngineStats()
        self._spec = spec
        self._kv_tokens = UNLIMITED if kv_tokens is None else kv_tokens
        drafting = spec.drafts(self.drafter_context(spec))
        self._speculator = Speculator(self.config, drafting, self.stats)
        num_slots = self.slots_for(max_requests)
        cached = None
        self.expect(max_requests, max_tokens)
        endings = spec.endings()
        if spec.rule is not None or spec.begun:
            cached = CachedPrefixes(
                spec.rule,
                endings,
                self.stats.cached,
                num_slots,
                max_tokens,
                in_chunks=self._verifies_in_chunks(spec, num_slots),
                price=self._chunk_price(spec),
                begun_counts=self.stats.begun,
                early_miss_rate=spec.early_miss_rate,
            )
        # the most tokens that a row gains in one fetch; a budget may choose plain rounds
        self._fetch_tokens = self.config.rounds_per_fetch
        if self._speculator.drafter is not None or cached is not None:
            self._fetch_tokens = max(self.config.max_nodes, self._fetch_tokens)
        # a fetch may write one token past the end
        lora = self.model.lora
        table = SlotTable(
            num_slots,
            max_tokens + 1,
            endings,
            cached,
            keeps_responses=spec.keeps_responses,
            num_adapters=1 if lora is None else lora.places,
        )
        self._table = table
        self._rounds = Rounds(self, self._rows, table, spec, self._speculator, self.stats)
        self._waiting = WaitingQueue(table.known_prompts)
        self._delivery = None
        if spec.sink is not None:
            self._delivery = StateDelivery(spec.sink, in_turn=self.spans_processes)
        with self.mesh_context(), self._delivery or contextlib.nullcontext():
            try:
                # rows of an earlier policy hold nothing useful
                self._rows.reset(table, self._fetch_tokens)
                yield
            except BaseException:
                self._rows.drop()
                raise

    def add(self, requests: Sequence[PartialRequest]) -> None:
        """Queue requests, each for at most `max_tokens` further tokens."""
        self._waiting.add(requests)

    def use(self, params: Params) -> None:
        """Replace the weights, which must stay equal for running requests."""
        self._spec = dataclasses.replace(self._spec, params=params)
        self._rounds.params = params

    @property
    def has_work(self) -> bool:
        """Return whether a request is queued or has a row."""
        return bool(self._table.busy_B.any()) or len(self._waiting) > 0

    def step(self) -> list[Event]:
        """Admit, run the rounds of one fetch, retire; return finished requests and chunks."""
        start_s = self.clock()
        num_programs = compilations.num_programs()
        assert not self._table.chunk_ended_rows(), "each is extended or taken before the next step"
        self._admit()
        self.make_room()
        table = self._table
        num_busy = table.num_busy
        num_waiting = len(self._waiting)
        self._rows.fit(num_busy + num_waiting, self._waiting.prompts)
        if table.missing_tokens_B.any():
            self._rows.copy_prompts()
            while self._rows.prompts_first():
                self._rounds.prompt_round()
                self._rows.copy_prompts()
        if not num_busy:
            return []
        if self.spans_processes:
            self._rows.wait_in_turn()
        self._round(start_s, num_programs, num_busy, num_waiting)
        chunk_ends = list[ChunkEnd]()
        for b in table.chunk_ended_rows():
            emitted = int(table.total_tokens_B[b] - table.prompt_tokens_B[b])
            chunk_ends.append(ChunkEnd(int(table.request_ids_B[b]), emitted))
        return [*chunk_ends, *self._retire_ended()]

    def extend(self, request_id: int, max_tokens: int) -> None:
        """Continue a request in its row after a chunk, for `max_tokens` more tokens."""
        [row] = self._rows_of([request_id]).tolist()
        self._table.extend(row, max_tokens)
        self._rows.changed()

    def take(self, request_ids: Sequence[int]) -> Iterator[list[PartialRequest]]:
        """Yield requests after the end of their chunks, in batches of one read; free their rows."""
        if not request_ids:
            return  # as after most rounds; the device keeps its copy of the table
        rows = self._rows_of(request_ids)
        P = self.config.prefill_rows
        self._speculator.left(self._table.view(rows))
        self._rows.changed()
        for first in range(0, len(rows), P):
            some = rows[first : first + P].tolist()
            yield self._rows.leave(some, self._spec.policy_version)

    def copy(self, request_id: int) -> PartialRequest | None:
        """Return the current state of a request, with keys and values; None without a live row."""
        rows = self._rows_of([request_id])
        rows = rows[self._table.live_B[rows]]
        if not len(rows):
            return None
        return self._rows.copied(int(rows[0]), self._spec.policy_version)

    def remove(self, request_ids: Sequence[int]) -> None:
        """Drop these requests, queued or running, without a response; ignore unknown ids."""
        if not request_ids:
            return  # as after most rounds
        self._waiting.drop(request_ids)
        self._leave_rows(self._rows_of(request_ids), self._table.leave)

    def expire(self, request_ids: Sequence[int]) -> None:
        """Note that no prompt continues these finished requests, so that their rows go first."""
        self._table.expire(request_ids)

    def release(self) -> list[PartialRequest]:
        """Remove and return all requests with their tokens so far, without keys and values."""
        (rows,) = np.nonzero(self._table.busy_B)
        leaving = self._leave_rows(rows, self._table.leave)
        leaving += [p.without_kv() for p in self._waiting.take_partial()]
        return [p if p.num_tokens else PartialRequest(p.request) for p in leaving]

    def _leave_rows(
        self, rows: np.ndarray, leave: Callable[[int, int], PartialRequest]
    ) -> list[PartialRequest]:
        """Free rows by `SlotTable.leave` or `SlotTable.preempt`; return their requests."""
        if not len(rows):
            return []
        has_drafted_B = self._table.live_B | (self._table.emitted_B > 0)  # some rows verify again
        self._speculator.left(self._table.view(rows[has_drafted_B[rows]]))
        self._rows.changed()
        return [leave(row, self._spec.policy_version) for row in rows.tolist()]

    def _verifies_in_chunks(self, spec: RolloutSpec, num_slots: int) -> bool:
        """Return whether a rollout verifies cached responses in chunks rather than as nodes."""
        chunk_tokens = self.drawing_chunks(num_slots)[-1] * self.drawing_tokens
        if spec.times is None:
            return True
        return spec.times.chunks_pay(num_slots, self.num_positions, chunk_tokens)

    def _chunk_price(self, spec: RolloutSpec) -> ChunkPrice | None:
        """Return the price of passes; None if a rule has to decide, or without measured times."""
        decides = spec.rule is not None and not spec.rule.mode.couples_noise
        if decides or spec.times is None:
            return None
        return ChunkPrice(spec.times, self.drawing_tokens)

    # -- admission ---------------------------------------------------------

    def _admit(self) -> None:
        """Fill free rows while the cache has room."""
        rows = self._rows
        waiting = self._waiting
        while len(waiting) and (free := len(self._table.free_rows())):
            first = waiting.first(free)
            if waiting.partial:
                first = first[
                    : admission.num_fitting(first, self._table, self._fetch_tokens, self._kv_tokens)
                ]
            places = rows.memory.assign(first, self._table, waiting.prompts)
            if not places:
                break
            rows.enter(waiting.take(len(places)), places)
            if self._table.verifies_in_chunks:
                rows.decode_cheap(places)
            rows.changed()

    def make_room(self) -> None:
        """Free rows that no longer fit; their requests wait to be recomputed."""
        rows = list[int]()
        if self._kv_tokens < UNLIMITED:
            rows = admission.rows_to_preempt(self._table, self._fetch_tokens, self._kv_tokens)
            self._leave(rows)
        short = self._rows.memory.make_room(self._table, self._waiting.prompts)
        if short:  # in few rounds
            self._leave(short)
        self.stats.preemptions += len(rows) + len(short)

    def _leave(self, rows: Sequence[int]) -> None:
        """Return the requests of rows to the front of the queue, the newest last."""
        if not rows:
            return
        leaving = self._leave_rows(np.array(rows, int), self._table.preempt)
        self._waiting.partial.extendleft(leaving)

    # -- rounds ------------------------------------------------------------

    def _round(self, began_s: float, num_programs: int, num_busy: int, num_waiting: int) -> None:
        ready_s = self.clock()
        table = self._table
        B = table.num_slots
        cached = table.cached
        draws = None
        pricing_s = 0.0
        if table.verifies_in_chunks:
            has_room = self._kv_tokens >= UNLIMITED
            draws = self._rows.draws_next(waits=num_waiting > 0, may_return=has_room)
            pricing_s = self.clock() - ready_s
        live = table.live()
        drafts = None
        if draws is not None:
            decision = plain(B)
        else:
            missing = table.num_prompts_missing
            drafts, decision = self._speculator.decide(
                live, B, self._rows.num_positions, cached, missing
            )
        drafted_s = self.clock()
        prompt_tokens = self.stats.prefilled_tokens
        plain_rounds = 0.0
        if draws is not None:
            tokens_BN, count_B, rounds_B = self._rounds.draw_in_chunks(live, draws)
            plain_rounds = float(count_B.sum()) / num_busy
        else:
            # requests that must finish before slots are refilled or the batch shrinks
            stop_after = max(1, num_busy // 8 if num_waiting else num_busy - B // 2)
            limits = Limits(stop_after, self._fetch_tokens)
            tokens_BN, count_B, rounds_B = self._rounds.run(live, drafts, decision, limits)
            if cached is not None and cached.price is not None and len(live):
                bucket = B, decision.num_nodes, self._rows.num_positions
                mean_tokens = float(count_B[live.rows_A].mean())
                cached.price.observe(mean_tokens, int(rounds_B[live.rows_A].max()), bucket)
        if drafts is not None:
            self._speculator.observe(
                live, drafts, decision.taken_A, tokens_BN[live.rows_A], count_B[live.rows_A]
            )
        num_cached = self._speculator.num_cached(drafts, decision) if cached else 0
        (rows_A,) = np.nonzero(table.live_B)  # includes rows that lacked tokens before
        self.stats.timeline.append(
            RoundRecord(
                began_s=began_s,
                ready_s=ready_s,
                drafted_s=drafted_s,
                called_s=self._rounds.called_s,
                fetched_s=self._rounds.fetched_s,
                ended_s=self.clock(),
                num_slots=B,
                num_nodes=decision.num_nodes,
                cached_nodes=num_cached,
                prompt_tokens=self.stats.prefilled_tokens - prompt_tokens,
                cached_in_chunks=self._rounds.cached_in_chunks,
                plain_rounds=plain_rounds,
                pricing_seconds=pricing_s,
                num_compiled=compilations.num_programs() - num_programs,
                num_positions=self._rows.num_positions,
                request_ids_A=table.request_ids_B[rows_A],
                cached_tokens_A=table.total_tokens_B[rows_A] - 1 - count_B[rows_A],
                rounds_A=rounds_B[rows_A],
                emitted_A=count_B[rows_A],
            )
        )

    # -- retirement --------------------------------------------------------

    def _retire_ended(self) -> list[Trajectory]:
        """Free the rows of requests that the last rounds finished; return the trajectories."""
        spec = self._spec
        table = self._table
        rows = np.array(table.ended_rows(), int)
        if not len(rows):
            return []
        self._speculator.finished(table.view(rows))
        if self._delivery is not None:
            # a copy has the states of its request, which the worker of the original may send
            ids_B = table.request_ids_B
            originals = [b for b in rows.tolist() if not copy_of(int(ids_B[b]))[1]]
            self._rows.send(originals, self._delivery, spec.policy_version)
        return [table.retire(b, spec.policy_version) for b in rows.tolist()]

    def _rows_of(self, request_ids: Sequence[int]) -> np.ndarray:
        """Return the rows of these requests in row order, without requests that have no row."""
        table = self._table
        return np.nonzero(table.busy_B & np.isin(table.request_ids_B, request_ids))[0]


class ThreadedEngine(Engine):
    """An engine on devices of a trainer mesh, run in separate threads without that mesh."""

    def do(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread without a mesh; return its result."""
        return in_thread(work)

    def run(self, *given: Any, **options: Any) -> list[Trajectory]:
        """See `Engine.run`; callbacks run in the thread of the rollout."""
        return in_thread(partial(super().run, *given, **options))


def in_thread(work: Callable[[], T]) -> T:
    """Call `work` in a new thread; return its result or raise its error."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


class RolloutEngine(Protocol):
    """A source of responses; either one engine, or several under a scheduler (`rl.workers`)."""

    stats: EngineStats  # of the last rollout

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def engines(self) -> Sequence[Engine]:
        """Return the engine of each worker."""
        ...

    def do(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread that compiles and places as rollouts do; return its result."""
        ...

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate all responses to their end; return trajectories in the order of the requests.

        `on_finish` is called as responses finish, `on_round` occasionally; an exception raised by
        either stops the rollout.
        """
        ...
