"""One worker's rounds: admit → draft → verify → commit → retire.

Shapes come from a pool of buckets (slots, positions, nodes: powers of two), each compiled
once; `rl.engine.slot_cache` holds the cache. There is one fetch per device call, and one device
call is several rounds where no draft is wanted. The engine owns no weights: every rollout brings
its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from rl.engine import preemption
from rl.engine.cached_prefixes import CachedPrefixes
from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext, RequestSource, RolloutSpec
from rl.engine.slot_cache import SlotCache
from rl.engine.slot_table import SlotTable
from rl.engine.speculate import Speculator
from rl.engine.state_delivery import StateDelivery
from rl.engine.stats import EngineStats, RoundRecord
from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import Request, Trajectory, longest_tokens
from spec.budget.budget import DraftDecision, plain
from spec.draft_cache.rounds import Asked, draft_rounds, unpack_rounds
from spec.drafter import Drafts, LiveSlots, no_drafts
from spec.nodes import pack
from spec.verify import Slots, by_slot, chunk_round, decode_rounds, unpack, verify_round

T = TypeVar("T")
OnFinish = Callable[[Trajectory], None]
OnRound = Callable[[int, int], None]  # (responses finished, tokens emitted) so far


class Engine(ModelRunner):
    """A policy's runner that takes requests to trajectories, one rollout at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats = EngineStats()
        self._rows = SlotCache(self)
        self._called_s = self._fetched_s = 0.0

    @property
    def engines(self) -> Sequence[Engine]:
        return (self,)

    def do(self, work: Callable[[], object]) -> None:
        """Call `work` where rollouts run: in this thread."""
        work()

    def drafter_context(self, spec: RolloutSpec) -> DrafterContext:
        """Return what drafters of a rollout on this engine are made from."""
        return DrafterContext(self, spec, lambda: self._rows.cache.features[0])

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
        it raises ends the rollout, and the engine stays usable.

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
        self._spec, self._source, self._stop_E = spec, source, self.put(spec.stop_ids)
        drafting = spec.drafts(self.drafter_context(spec))
        self._speculator = Speculator(self.config, drafting, self.stats)
        self._waiting = WaitingQueue()
        self._waiting.add(requests)
        num_slots, cached = self.slots_for(most_requests), None
        if spec.rule is not None:
            rows = num_slots, most_tokens
            cached = CachedPrefixes(spec.rule, endings, self.stats.cached, *rows)
        # a fetch may write one beyond
        table = SlotTable(num_slots, most_tokens + 1, endings, cached)
        done: dict[int, Trajectory] = {}
        with self.mesh_context(), StateDelivery(spec.sink) as self._delivery:
            try:
                # rows of an earlier policy hold nothing that is of use
                self._rows.reset(table, most_tokens)
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

    @property
    def _table(self) -> SlotTable:
        return self._rows.table

    def _receive(self) -> bool:
        """Queue what the source brings; return True if it may bring more."""
        if self._source is None:
            return False
        requests = self._source.take(wait=not (len(self._waiting) or self._table.num_busy))
        self._waiting.add_sourced(requests or ())
        return requests is not None

    def _advance(self) -> list[Trajectory]:
        """Admit, run one fetch's rounds, retire; return the trajectories that ended."""
        began_s = self.clock()
        self._admit()
        self._preempt()
        self._rows.fit(self._table.num_busy + len(self._waiting), self._waiting.prompts)
        self._rows.copy_prompts()
        while self._table.num_busy and not self._table.live_B.any():
            self._compute_chunks(self._table.live())  # nobody waits for a token: none is fetched
            self._rows.copy_prompts()
        if not self._table.num_busy:
            return []
        self._round(began_s)
        return self._retire_ended()

    # -- admission ---------------------------------------------------------

    def _admit(self) -> None:
        """Fill the free rows."""
        rows, waiting = self._rows, self._waiting
        while len(waiting) and (free := len(self._table.free_rows())):
            if waiting.sourced:
                entering = [waiting.sourced.popleft() for _ in range(self._num_fitting(free))]
                if not entering:
                    break
                rows.enter(entering)
            else:
                entering = waiting.take_new(free)
                rows.enter(entering, waiting.prompts)
            rows.changed()

    def _num_fitting(self, free_rows: int) -> int:
        """Return how many of the source's requests can have a row now."""
        assert self._source is not None
        first = itertools.islice(self._waiting.sourced, free_rows)
        budget = self._source.kv_tokens
        return preemption.num_fitting(first, self._table, self._fetch_tokens, budget)

    def _preempt(self) -> None:
        """Free rows that do not fit any more; their requests wait to be recomputed."""
        if self._source is None:
            return
        table = self._table
        rows = preemption.rows_to_preempt(table, self._fetch_tokens, self._source.kv_tokens)
        if rows:
            self._speculator.left(table.view(np.array(rows)[table.live_B[rows]]))
            for row in rows:
                self._waiting.sourced.appendleft(table.preempt(row, self._spec.policy_version))
            self._rows.changed()
        self.stats.preemptions += len(rows)

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
        table, drafts, decision = self._table, None, plain(len(self._table), 1)
        if not (lacking := table.lacking()):
            drafts, decision = self._speculator.decide(
                live, len(table), self._positions, table.cached
            )
        drafted_s = self.clock()
        if lacking:
            tokens_BN, count_B = self._decode_beside_chunks(live)
            rounds_B = count_B
        elif decision.taken_A is not None:
            assert drafts is not None
            tokens_BN, count_B = self._verify(live, drafts, decision)
            rounds_B = np.minimum(count_B, 1)
        elif decision.tree_tokens:
            count_B, rounds_B = self._draft_on_device(live, decision)
        else:
            tokens_BN, count_B = self._decode(live, decision.num_rounds)
            rounds_B = count_B
        emitted_A = count_B[live.rows_A]
        if drafts is not None:
            tokens_AN = tokens_BN[live.rows_A]
            self._speculator.observe(live, drafts, decision.taken_A, tokens_AN, emitted_A)
        num_cached = self._speculator.num_cached(drafts, decision) if table.cached else 0
        self.stats.timeline.append(
            RoundRecord(
                began_s=began_s,
                ready_s=ready_s,
                drafted_s=drafted_s,
                called_s=self._called_s,
                fetched_s=self._fetched_s,
                ended_s=self.clock(),
                num_slots=len(self._table),
                num_nodes=decision.num_nodes,
                cached_nodes=num_cached,
                num_positions=self._positions,
                request_ids_A=live.request_ids_A,
                cached_tokens_A=live.total_tokens_A - 1,
                rounds_A=rounds_B[live.rows_A],
                emitted_A=emitted_A,
            )
        )

    def _verify(
        self, live: LiveSlots, drafts: Drafts, decision: DraftDecision
    ) -> tuple[np.ndarray, np.ndarray]:
        """One round with draft tokens; returns (tokens_BN, count_B) that slots got."""
        B, M, spec, taken_A = len(self._table), decision.num_nodes, self._spec, decision.taken_A
        assert taken_A is not None
        nodes_5M = self._nodes(drafts, taken_A, live.rows_A, M)
        slots = self._device_slots()
        *state, found = verify_round(
            spec.params,
            *self._rows.for_round(),
            slots,
            self.argument(nodes_5M),
            self._stop_E,
            **self.verify_options(spec.sampling.draw, B, M),
        )
        drafted_B = np.zeros(B, bool)
        drafted_B[live.rows_A] = taken_A > 0
        self.stats.rounds[(B, M, self._positions)] += 1
        self._rows.stepped(*state)
        drawn = self._fetched(live, unpack, found)
        tokens_BN, logprobs_BN, count_B, kept_B = by_slot(*drawn, nodes_5M[1], B)
        return self._commit(tokens_BN, logprobs_BN, count_B, drafted_B, kept_B)

    def _nodes(
        self, drafts: Drafts, taken_A: np.ndarray, rows_A: np.ndarray, num_nodes: int
    ) -> np.ndarray:
        """Return the nodes of a round, and what a rule may keep behind them, as `pack` does."""
        nodes_5M = pack(drafts, taken_A, rows_A, len(self._table), num_nodes)
        cached = self._table.cached
        if cached is not None and cached.given:
            cached.give(nodes_5M, self._table.emitted_B)
        return nodes_5M

    def _compute_chunks(self, live: LiveSlots) -> jax.Array:
        """One round without draft tokens, in which prompts are computed; returns what it found."""
        spec, rows, none = self._spec, self._rows, no_drafts(len(live), 1)
        nodes_5B = self._nodes(none, none.count_A, live.rows_A, len(self._table))
        slots, state = self._device_slots(), rows.for_round()
        chunks_TX = rows.next_chunks()
        *state, found, entries = chunk_round(
            spec.params,
            *state,
            slots,
            self.argument(nodes_5B),
            self.argument(chunks_TX),
            self._stop_E,
            **self.chunk_options(spec.sampling.draw),
        )
        rows.stepped(*state)
        self.stats.prefilled_tokens += rows.write_chunks(entries, chunks_TX)
        return found

    def _decode_beside_chunks(self, live: LiveSlots) -> tuple[np.ndarray, np.ndarray]:
        """One round without draft tokens beside chunks; returns (tokens_BN, count_B)."""
        B, found = len(self._table), self._compute_chunks(live)
        self.stats.rounds[(B, B, self._positions)] += 1
        drawn = self._fetched(live, unpack, found)
        tokens_BN, logprobs_BN, count_B, kept_B = by_slot(*drawn, np.arange(B), B)
        return self._commit(tokens_BN, logprobs_BN, count_B, np.zeros(B, bool), kept_B)

    def _decode(self, live: LiveSlots, most_rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most_rounds` rounds without draft tokens; returns (tokens_BN, count_B)."""
        table, spec = self._table, self._spec
        B = len(table)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        rounds = min(most_rounds, int(left_B.max()))
        # a slot that ends on the way writes no further
        self._rows.grow(int((table.cached_tokens_B + np.minimum(left_B, rounds)).max()))
        slots = self._device_slots()
        *state, found = decode_rounds(
            spec.params,
            *self._rows.for_round(),
            slots,
            self._stop_E,
            np.int32(rounds),
            np.int32(self._stop_after()),
            **self.decode_options(spec.sampling.draw),
        )
        self._rows.stepped(*state)
        tokens_BR, logprobs_BR, kind_BR = self._fetched(live, unpack, found)
        count_B, none_B = (kind_BR > 0).sum(axis=1, dtype=np.int32), np.zeros(B, np.int32)
        tokens_BN, count_B = self._commit(tokens_BR, logprobs_BR, count_B, none_B > 0, none_B)
        self.stats.rounds[(B, B, self._positions)] += int(count_B.max())
        return tokens_BN, count_B

    def _draft_on_device(
        self, live: LiveSlots, decision: DraftDecision
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rounds that draft and verify on the device; returns the slots' tokens and rounds."""
        table, spec, drafter = self._table, self._spec, self._speculator.in_rounds
        assert drafter is not None
        B, rows = len(table), self._rows
        options = self.draft_options(spec.sampling.draw, B, decision)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        most_B = table.cached_tokens_B + np.minimum(left_B, options["shape"].tree_nodes)
        rows.grow(max(int(most_B.max()), drafter.num_positions))
        given = drafter.enter_rounds(live, decision.tree_tokens, self._positions)
        # the likeliest n draft tokens are n deep at most
        depth = min(given.depth, decision.tree_tokens)
        limits_4 = [decision.num_rounds, self._stop_after(), self._fetch_tokens, depth]
        scale_B, slots = np.ones(B, np.float32), self._device_slots()
        if decision.scale_A is not None:
            scale_B[live.rows_A] = decision.scale_A
        made = np.array(limits_4, np.int32), scale_B
        *state, draft_cache, found = draft_rounds(
            spec.params,
            *rows.for_round(),
            slots,
            self._stop_E,
            given.cache,
            Asked(given.constants, given.table_RX, *map(self.argument, made)),
            **options,
            drafting=given.drafting,
        )
        rows.stepped(*state)
        total_B, rounds_B = np.zeros(B, np.int32), np.zeros(B, np.int32)
        acceptance = []
        for r in self._fetched(live, unpack_rounds, found):
            drawn_B = np.where(table.stopped_B, 0, r.count_B)  # the device does not know all ends
            _, count_B = self._commit(
                r.tokens_BN, r.logprobs_BN, drawn_B, r.drafted_B > 0, np.zeros_like(drawn_B)
            )
            total_B, rounds_B = total_B + count_B, rounds_B + (count_B > 0)
            acceptance.append(self._speculator.observe_unseen(live, r, count_B))
        drafter.leave_rounds(table.view(live.rows_A), draft_cache, np.concatenate(acceptance))
        self.stats.rounds[(B, decision.num_nodes, self._positions)] += int(rounds_B.max())
        return total_B, rounds_B

    def _stop_after(self) -> int:
        """Ended requests after which the host can refill slots, or the batch can shrink."""
        busy = self._table.num_busy
        return max(1, busy // 8 if len(self._waiting) else busy - len(self._table) // 2)

    def _fetched(self, live: LiveSlots, unpack: Callable[[Any], T], found: Any) -> T:
        """Return what a call found, once the device has it; the drafter is told meanwhile."""
        self._called_s = self.clock()
        self._speculator.committed(live)
        drawn = unpack(found)
        self._fetched_s = self.clock()
        self.stats.fetches += 1
        return drawn

    def _commit(
        self,
        tokens_BN: np.ndarray,
        logprobs_BN: np.ndarray,
        drawn_B: np.ndarray,
        drafted_B: np.ndarray,
        kept_B: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens that a fetch brought each slot; returns (tokens_BN, count_B)."""
        count_B = self._table.commit(tokens_BN, logprobs_BN, drawn_B, drafted_B, kept_B)
        if self._table.endings.unknown_to_device and self._table.stopped_B[count_B > 0].any():
            self._rows.changed()  # the device goes on there
        self.stats.tokens += int(count_B.sum())
        return tokens_BN, count_B

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
        self._rows.send(whole_rows, self._delivery, spec.policy_version)
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

    @property
    def _positions(self) -> int:
        return self._rows.num_positions

    def _device_slots(self) -> Slots:
        return self._rows.slots(self._spec.key)


class RolloutEngine(Protocol):
    """Answers requests: one engine, or several under a scheduler (`rl.workers`)."""

    stats: EngineStats  # of the last rollout

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def engines(self) -> Sequence[Engine]:
        """Return the engine of each worker."""
        ...

    def do(self, work: Callable[[], object]) -> None:
        """Call `work` as a rollout would: in a thread that compiles and places as it does."""
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
