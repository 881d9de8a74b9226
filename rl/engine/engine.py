"""One worker's rounds: admit → draft → verify → commit → retire.

Shapes come from a pool of buckets (slots, positions, nodes: powers of two), each compiled
once; `rl.engine.slot_cache` holds the cache. There is one fetch per device call, and one device
call is several rounds where no draft is wanted. The engine owns no weights: every rollout brings
its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from rl.engine import preemption
from rl.engine.cached_prefixes import CachedPrefixes
from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import CachedStates, DrafterContext, RequestSource, RolloutSpec
from rl.engine.rounds import Limits, Rounds
from rl.engine.slot_cache import SlotCache
from rl.engine.slot_table import SlotTable
from rl.engine.speculate import Speculator
from rl.engine.state_delivery import StateDelivery
from rl.engine.stats import EngineStats, RoundRecord
from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import PartialRequest, Request, Trajectory, longest_tokens
from sched.request import copy_of
from spec.budget.budget import plain

T = TypeVar("T")
OnFinish = Callable[[Trajectory], None]
OnRound = Callable[[int, int], None]  # (responses finished, tokens emitted) so far


class Engine(ModelRunner):
    """A policy's runner that takes requests to trajectories, one rollout at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats = EngineStats()
        self._rows = SlotCache(self)

    @property
    def engines(self) -> Sequence[Engine]:
        return (self,)

    @property
    def where(self) -> str:
        """Return the name of its devices."""
        devices = [self.device] if self.mesh is None else self.mesh.devices.flat
        places = [jax.local_devices()[0] if d is None else d for d in devices]
        first, more = places[0], len(places) - 1
        return f"{first.platform}:{first.id}" + (f" and {more} more" if more else "")

    @property
    def is_ready(self) -> bool:
        """Return whether a worker can join with it now: of one in another program it may die."""
        return True

    @property
    def may_return(self) -> bool:
        """Return whether it is outside of this program: lost, it may come back by itself."""
        return False

    def abandoned(self) -> Engine:
        """Return what stands in for this engine, whose thread hangs: another one like it."""
        return dataclasses.replace(self)

    def do(self, work: Callable[[], T]) -> T:
        """Return what `work` does where rollouts run: in this thread."""
        return work()

    def drafter_context(self, spec: RolloutSpec) -> DrafterContext:
        """Return what drafters of a rollout on this engine are made from."""
        return DrafterContext(self, spec, CachedStates(self, lambda: self._rows.cache))

    # -- the rollout -------------------------------------------------------

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        source: RequestSource | None = None,
        stats: EngineStats | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate every request to its end; trajectories in the order of the requests.

        `source` brings more requests while the rollout runs; their trajectories are passed to
        `on_finish` only. Counts are added to `stats`. `on_round` is called after every fetch; what
        it raises ends the rollout, and the engine stays usable. On a mesh of several processes all
        call this with the same requests, bring the same ones, and raise after the same fetch.

        Raises ValueError, before any device work, for requests that cannot run:
        empty or too long prompts, tokens outside the vocabulary, repeated ids.
        """
        self.check(requests, spec.sampling)
        self.stats = stats or EngineStats()
        most_requests = len(requests)
        most_tokens = longest_tokens(requests, spec.sampling)
        endings = spec.endings(requests)
        if source is not None:
            most_requests += source.most_requests
            most_tokens = max(most_tokens, source.longest_tokens)
        self._spec, self._source = spec, source
        drafting = spec.drafts(self.drafter_context(spec))
        self._speculator = Speculator(self.config, drafting, self.stats)
        self._rounds = Rounds(self, self._rows, spec, self._speculator, self.stats)
        num_slots, cached = self.slots_for(most_requests), None
        self.expect(most_requests, most_tokens)
        if spec.rule is not None or spec.begun:
            rows, in_chunks = (num_slots, most_tokens), self._verifies_in_chunks(spec, num_slots)
            cached = CachedPrefixes(
                spec.rule, endings, self.stats.cached, *rows, in_chunks=in_chunks
            )
        # a fetch may write one beyond
        table = SlotTable(num_slots, most_tokens + 1, endings, cached)
        self._waiting = WaitingQueue(table.numbers)
        self._waiting.add(requests)
        done: dict[int, Trajectory] = {}
        delivery = StateDelivery(spec.sink, in_turn=self.spans_processes)
        with self.mesh_context(), delivery as self._delivery:
            try:
                # rows of an earlier policy hold nothing that is of use
                self._rows.reset(table)
                while self._receive() or len(self._waiting) or self._table.num_busy:
                    for trajectory in self._advance():
                        done[trajectory.request_id] = trajectory
                        if on_finish is not None:
                            on_finish(trajectory)
                    if on_round is not None:
                        on_round(len(done), self.stats.tokens)
            except BaseException:
                self._rows.drop()
                raise
        return [done[r.request_id] for r in requests]

    def _verifies_in_chunks(self, spec: RolloutSpec, num_slots: int) -> bool:
        """Return whether a rollout verifies cached responses in chunks rather than as nodes."""
        chunk_tokens = self.drawing_chunks(num_slots)[-1] * self.chunk_tokens
        bucket = num_slots, self.round_positions(num_slots)[0]
        return spec.times is None or spec.times.chunks_pay(*bucket, chunk_tokens)

    @property
    def _table(self) -> SlotTable:
        return self._rows.table

    def _receive(self) -> bool:
        """Queue what the source brings; return True if it may bring more."""
        if self._source is None:
            return False
        requests = self._source.take(wait=not (len(self._waiting) or self._table.num_busy))
        self._drop(self._source.dropped())  # first: one of their numbers may be given again
        self._waiting.add_sourced(requests or ())
        for request_id, number in self._source.copies():
            self._source.copied(number, self._copy(request_id))
        if self._source.lets_go:
            self._let_go(self._source)
        return requests is not None

    def _drop(self, request_ids: Sequence[int]) -> None:
        """End these requests, as far as they are here: another worker has answered them."""
        if not request_ids:
            return
        table, gone = self._table, set(request_ids)
        self._waiting.drop(gone)
        (rows,) = np.nonzero(table.busy_B & np.isin(table.request_ids_B, list(gone)))
        if len(rows):
            self._speculator.left(table.view(rows[table.live_B[rows]]))
            for row in rows.tolist():
                table.leave(row, self._spec.policy_version)
            self._rows.changed()

    def _copy(self, request_id: int) -> PartialRequest | None:
        """Return a request that runs here as it is now, with its keys and values."""
        table = self._table
        (rows,) = np.nonzero(table.live_B & (table.request_ids_B == request_id))
        if not len(rows):
            return None
        return self._rows.copied(int(rows[0]), self._spec.policy_version)

    def _let_go(self, source: RequestSource) -> None:
        """Have all requests leave with the tokens that they have, without keys and values."""
        table, version = self._table, self._spec.policy_version
        (rows,) = np.nonzero(table.busy_B)
        self._speculator.left(table.view(rows[table.live_B[rows]]))
        leaving = [table.leave(row, version) for row in rows.tolist()]
        leaving += [p.without_kv() for p in self._waiting.take_sourced()]
        leaving = [p if p.num_tokens else PartialRequest(p.request) for p in leaving]
        for left in leaving:
            more = source.chunk_ended(left.request.request_id, left.num_tokens)
            assert not more, "nothing goes on where all has to leave"
        source.park(leaving)
        self._rows.changed()

    def _advance(self) -> list[Trajectory]:
        """Admit, run one fetch's rounds, retire; return the trajectories that ended."""
        began_s = self.clock()
        self._admit()
        self._preempt()
        self._rows.fit(self._table.num_busy + len(self._waiting), self._waiting.prompts)
        self._rows.copy_prompts()
        table = self._table
        while self._rows.prompts_first():
            self._rounds.prompt_round()
            self._rows.copy_prompts()
        if not table.num_busy:
            return []
        self._rows.wait_in_turn()
        self._round(began_s)
        return self._retire_ended()

    # -- admission ---------------------------------------------------------

    def _admit(self) -> None:
        """Fill the free rows, as far as the cache has room."""
        rows, waiting = self._rows, self._waiting
        while len(waiting) and (free := len(self._table.free_rows())):
            first = waiting.first(self._num_fitting(free) if waiting.sourced else free)
            places = rows.places(first, self._fetch_tokens, waiting.prompts)
            if not places:
                break
            rows.enter(waiting.take(len(places)), places)
            rows.changed()

    def _num_fitting(self, free_rows: int) -> int:
        """Return how many of the queued requests can have a row by the source's budget."""
        if self._source is None:
            return free_rows
        first = itertools.islice(self._waiting.sourced, free_rows)
        budget = self._source.kv_tokens
        return preemption.num_fitting(first, self._table, self._fetch_tokens, budget)

    def _preempt(self) -> None:
        """Free rows that do not fit any more; their requests wait to be recomputed."""
        table, rows = self._table, list[int]()
        if self._source is not None:
            budget = self._source.kv_tokens
            rows = preemption.rows_to_preempt(table, self._fetch_tokens, budget)
            self._leave(rows)
        short = self._rows.make_room(self._fetch_tokens, self._waiting.prompts)
        self._leave(short)
        self.stats.preemptions += len(rows) + len(short)

    def _leave(self, rows: Sequence[int]) -> None:
        """Let the requests of rows wait again, the newest behind the others."""
        if not rows:
            return
        table = self._table
        self._speculator.left(table.view(np.array(rows)[table.live_B[rows]]))
        for row in rows:
            self._waiting.sourced.appendleft(table.preempt(row, self._spec.policy_version))
        self._rows.changed()

    @property
    def _fetch_tokens(self) -> int:
        """The most tokens that a row gains in one fetch."""
        rounds = self.config.rounds_per_fetch
        # a budget may decide for plain rounds
        drafts = self._speculator.drafter is not None or self._table.cached is not None
        return max(self.config.max_nodes, rounds) if drafts else rounds

    # -- rounds ------------------------------------------------------------

    def _round(self, began_s: float) -> None:
        ready_s, live = self.clock(), self._table.live()
        table = self._table
        drafts, decision = None, plain(len(table))
        draws = self._rows.draws_next(waits=len(self._waiting) > 0)
        if not draws:
            prompts_B = table.busy_B & (table.lacking_tokens_B > 0) & ~table.verifies_B
            drafts, decision = self._speculator.decide(
                live, len(table), self._rows.num_positions, table.cached, int(prompts_B.sum())
            )
        drafted_s = self.clock()
        limits = Limits(self._stop_after(), self._fetch_tokens)
        prompt_tokens = self.stats.prefilled_tokens
        if draws:
            tokens_BN, count_B, rounds_B = self._rounds.draw_in_chunks(live)
        else:
            tokens_BN, count_B, rounds_B = self._rounds.run(live, drafts, decision, limits)
        if drafts is not None:
            emitted = tokens_BN[live.rows_A], count_B[live.rows_A]
            self._speculator.observe(live, drafts, decision.taken_A, *emitted)
        num_cached = self._speculator.num_cached(drafts, decision) if table.cached else 0
        (rows_A,) = np.nonzero(table.live_B)  # some may have joined that lacked tokens
        self.stats.timeline.append(
            RoundRecord(
                began_s=began_s,
                ready_s=ready_s,
                drafted_s=drafted_s,
                called_s=self._rounds.called_s,
                fetched_s=self._rounds.fetched_s,
                ended_s=self.clock(),
                num_slots=len(self._table),
                num_nodes=decision.num_nodes,
                cached_nodes=num_cached,
                prompt_tokens=self.stats.prefilled_tokens - prompt_tokens,
                cached_in_chunks=self._rounds.cached_in_chunks,
                num_positions=self._rows.num_positions,
                request_ids_A=table.request_ids_B[rows_A],
                cached_tokens_A=table.cached_tokens_B[rows_A] - count_B[rows_A],
                rounds_A=rounds_B[rows_A],
                emitted_A=count_B[rows_A],
            )
        )

    def _stop_after(self) -> int:
        """Ended requests after which the host can refill slots, or the batch can shrink."""
        busy = self._table.num_busy
        return max(1, busy // 8 if len(self._waiting) else busy - len(self._table) // 2)

    # -- retirement --------------------------------------------------------

    def _retire_ended(self) -> list[Trajectory]:
        """Free the rows of requests that the last round ended; return their trajectories."""
        spec, table = self._spec, self._table
        rows = table.ended_rows()
        if not len(rows):
            return []
        whole = np.array([table.is_whole(b) for b in rows.tolist()], bool)
        if not whole.all():
            assert self._source is not None, "only a source brings requests in chunks"
            self._end_chunks(self._source, rows[~whole].tolist())
        whole_rows = rows[whole].tolist()
        self._speculator.finished(table.view(rows[whole]))
        # what a copy has seen is the request's own, which may be sent by its worker
        originals = [b for b in whole_rows if not copy_of(int(table.request_ids_B[b]))[1]]
        self._rows.send(originals, self._delivery, spec.policy_version)
        return [table.retire(b, spec.policy_version) for b in whole_rows]

    def _end_chunks(self, source: RequestSource, rows: Sequence[int]) -> None:
        """Let each of these requests resume here, or leave with the tokens that it has."""
        table, leaving = self._table, []
        for row in rows:
            request_id = int(table.request_ids_B[row])
            more = source.chunk_ended(request_id, int(table.emitted_B[row]))
            if more:
                table.extend(row, more)
            else:
                leaving.append(row)
        if leaving:
            self._speculator.left(table.view(np.array(leaving)))
        # as many at a time as are read in one call: a worker that waits for one has it sooner
        P = self.config.prefill_rows
        for first in range(0, len(leaving), P):
            source.park(self._rows.leave(leaving[first : first + P], self._spec.policy_version))
        self._rows.changed()


class ThreadedEngine(Engine):
    """An engine that runs in threads of its own, which know nothing of a trainer's mesh.

    So it may have some of the devices of that mesh: those of its process.
    """

    def do(self, work: Callable[[], T]) -> T:
        """Return what `work` does where rollouts run: in a thread without a mesh."""
        return in_thread(work)

    def run(self, *given: Any, **options: Any) -> list[Trajectory]:
        """See `Engine.run`; what is called back is called in the rollout's thread."""
        return in_thread(partial(super().run, *given, **options))


def in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


class RolloutEngine(Protocol):
    """Answers requests: one engine, or several under a scheduler (`rl.workers`)."""

    stats: EngineStats  # of the last rollout

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def engines(self) -> Sequence[Engine]:
        """Return the engine of each worker."""
        ...

    def do(self, work: Callable[[], T]) -> T:
        """Return what `work` does as a rollout: in a thread that compiles and places as it does."""
        ...

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate every request to its end; trajectories in the order of the requests.

        `on_finish` is called in the caller's thread as responses end; so is `on_round`, now and
        then: what it raises ends the rollout.
        """
        ...
