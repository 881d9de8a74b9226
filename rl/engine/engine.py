"""One worker's rounds: admit → draft → verify → commit → retire.

Shapes come from a pool of buckets (slots, positions, nodes: powers of two), each compiled
once; `rl.engine.slot_cache` holds the cache. There is one fetch per device call, and one device
call is several rounds where no draft is wanted. The engine owns no weights: every phase is handed
its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from models import transformer
from rl.engine import preemption
from rl.engine.model_runner import ModelRunner
from rl.engine.phase import Phase
from rl.engine.prefix_verification import PrefixRuleContext, PrefixVerifier
from rl.engine.request_source import RequestSource
from rl.engine.slot_cache import SlotCache
from rl.engine.slot_table import SlotTable
from rl.engine.speculate import DrafterContext, Speculator
from rl.engine.stats import EngineStats, RoundRecord
from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import Request, Trajectory, longest_tokens
from spec.budget.budget import Budget, FixedBudget
from spec.config import SamplingConfig
from spec.drafter import Drafter, Drafts, LiveSlots, plant
from spec.eagle.batch import HiddenStateSink
from spec.reuse.prefix_rule import PrefixRule
from spec.tree import DraftTree
from spec.verify import Slots, decode_rounds, unpack, verify_round

OnFinish = Callable[[Trajectory], None]
OnRound = Callable[[int, int], None]  # (responses finished, tokens emitted) so far


class Engine(ModelRunner):
    """A replica of the policy on its devices: `run` takes requests to trajectories."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats = EngineStats()
        self._rows = SlotCache(self)
        self._called_s = self._fetched_s = 0.0

    def drafter_context(
        self, params: transformer.Params, sampling: SamplingConfig, key: jax.Array
    ) -> DrafterContext:
        """Where drafters of a phase work; `params` are placed here."""
        return DrafterContext(self, params, sampling, key, lambda: self._rows.cache.features[0])

    # -- the phase ---------------------------------------------------------

    def run(
        self,
        params: transformer.Params,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        *,
        stop_token_ids: Sequence[int],
        policy_version: int = 0,
        drafter: Drafter | None = None,
        budget: Budget | None = None,
        rule: PrefixRule | None = None,
        feed: RequestSource | None = None,
        sink: HiddenStateSink | None = None,
        stats: EngineStats | None = None,
        on_finish: OnFinish | None = None,
        on_round: OnRound | None = None,
    ) -> list[Trajectory]:
        """Generate every request to its end; trajectories in the order of the requests.

        `budget` decides each round how many of the drafter's draft tokens are tried; None
        tries all. `rule` says how much of the requests' cached responses is kept; None
        uses none of them. `feed` brings requests while the phase runs, in chunks; their
        trajectories are told to `on_finish` only. `sink` takes responses with the policy's
        hidden states, where these are kept (`feature_layers`). `stats` are counted on. `on_round`
        is called after every fetch; what it raises ends the phase, and the engine stays usable.

        Raises ValueError, before any device work, for requests that cannot run:
        empty or too long prompts, tokens outside the vocabulary, repeated ids.
        """
        self.check(requests, sampling)
        self.stats = stats or EngineStats()
        done: dict[int, Trajectory] = {}
        stop_ids = np.asarray(sorted(stop_token_ids) or [-1], np.int32)
        speculator = Speculator(self.config, drafter, budget or FixedBudget(), self.stats)
        self._phase = Phase(
            *(sampling, key, stop_ids, self.put(stop_ids), policy_version, speculator),
            kv_tokens=None if feed is None else feed.kv_tokens,
            sink=sink,
        )
        most_tokens = longest_tokens(requests, sampling.max_new_tokens)
        most_requests = len(requests)
        if feed is not None:
            most_tokens = max(most_tokens, feed.longest_tokens)
            most_requests += feed.most_requests
        waiting = WaitingQueue(self._passes(rule, most_tokens))
        waiting.add(requests)

        def finish(ended: Sequence[Trajectory]) -> None:
            for trajectory in ended:
                done[trajectory.request_id] = trajectory
                if on_finish is not None:
                    on_finish(trajectory)

        with self.mesh_context():
            try:
                # rows of an earlier policy hold nothing that is of use
                self._rows.reset(self.config.slot_bucket(most_requests), most_tokens)
                while self._fed(feed, waiting) or len(waiting) or self._table.num_busy:
                    finish(self._beat(params, waiting, feed))
                    if on_round is not None:
                        on_round(len(done), self.stats.tokens)
            except BaseException:
                self._rows.drop()
                raise
        return [done[r.request_id] for r in requests]

    @property
    def _table(self) -> SlotTable:
        return self._rows.table

    def _fed(self, feed: RequestSource | None, waiting: WaitingQueue) -> bool:
        """Take what the feed has; whether it may have more."""
        if feed is None:
            return False
        chunks = feed.take(wait=not (len(waiting) or self._table.num_busy))
        waiting.add_fed(chunks or ())
        return chunks is not None

    def _passes(self, rule: PrefixRule | None, most_tokens: int) -> PrefixVerifier | None:
        """Where cached responses wait, if they are of use."""
        if rule is None:
            return None
        phase = self._phase
        judge = PrefixRuleContext(
            rule, phase.sampling, phase.key, phase.stop_ids, phase.policy_version
        )
        return PrefixVerifier(judge, self, most_tokens, self.stats.verified)

    # -- the beats ---------------------------------------------------------

    def _beat(
        self, params: transformer.Params, waiting: WaitingQueue, feed: RequestSource | None
    ) -> list[Trajectory]:
        """Admit, run one fetch's rounds, retire: the trajectories that ended."""
        began_s = self.clock()
        ended = self._admit(params, waiting)
        most = self._fetch_tokens
        self.stats.preemptions += preemption.make_room(self._rows, waiting, self._phase, most)
        self._rows.fit(self._table.num_busy + len(waiting), waiting.prompts)
        if self._table.num_busy:
            self._round(params, len(waiting), began_s)
            ended += self._retire_ended(feed)
        return ended

    def _round(self, params: transformer.Params, waiting: int, began_s: float) -> None:
        speculator, ready_s = self._phase.speculator, self.clock()
        live = self._table.live()
        room = self._room_for_trees(live) if speculator.drafter is not None else 0
        drafts, decision = speculator.decide(live, len(self._table), self._positions, room)
        drafted_s = self.clock()
        if decision.num_nodes > 1:
            assert drafts is not None
            tokens_BN, count_B = self._verify(params, live, drafts, decision.num_nodes)
            rounds_B = np.minimum(count_B, 1)
        else:
            tokens_BN, count_B = self._decode(params, waiting, decision.num_rounds)
            rounds_B = count_B
        rounds_A, emitted_A = rounds_B[live.rows_A], count_B[live.rows_A]
        if drafts is not None:
            tokens_AN = tokens_BN[live.rows_A]
            speculator.observe(live, drafts, decision.num_nodes, tokens_AN, emitted_A)
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
                num_positions=self._positions,
                request_ids_A=live.request_ids_A,
                cached_tokens_A=live.total_tokens_A - 1,
                rounds_A=rounds_A,
                emitted_A=emitted_A,
            )
        )

    def _admit(self, params: transformer.Params, waiting: WaitingQueue) -> list[Trajectory]:
        """Fill the free rows; the trajectories that ended on the way."""
        rows, limit = self._rows, self._phase.sampling.max_new_tokens
        ended: list[Trajectory] = []
        while len(waiting) and (free := len(self._table.free_rows())):
            if waiting.fed:
                entering = [waiting.fed.popleft() for _ in range(self._num_fitting(waiting, free))]
                if not entering:
                    break
                self.stats.prefilled_tokens += rows.enter_begun(params, entering, limit)
            elif waiting.cached:
                over, entered = waiting.cached.take(params, free)
                ended += over
                if entered:
                    rows.enter_prefixes(waiting.cached.packed, entered, limit)
            else:
                self.stats.prefilled_tokens += rows.enter_prompts(
                    params, waiting.take_afresh(free), limit, waiting.prompts
                )
            rows.changed()
        return ended

    @property
    def _fetch_tokens(self) -> int:
        """The most that a row gains in one fetch."""
        speculator, rounds = self._phase.speculator, self.config.rounds_per_fetch
        if speculator.drafter is None:
            return rounds
        return max(self.config.max_nodes, rounds)  # a budget may decide for plain rounds

    def _num_fitting(self, waiting: WaitingQueue, free_rows: int) -> int:
        """How many of the requests that were fed can have a row now."""
        budget, limit = self._phase.kv_tokens, self._phase.sampling.max_new_tokens
        if budget is None:
            return min(free_rows, len(waiting.fed))
        first = itertools.islice(waiting.fed, free_rows)
        return preemption.num_fitting(first, self._table, self._fetch_tokens, budget, limit)

    def _room_for_trees(self, live: LiveSlots) -> int:
        """Free cache positions of the longest row.

        Where draft tokens pay and none fits any more, the cache grows a little before it has to.
        """
        room = self._positions - self._table.longest_cached()
        timeline, needed_A = self.stats.timeline, live.total_tokens_A + live.remaining_tokens_A
        drafted = bool(timeline) and timeline[-1].num_nodes > 1
        if room < self.config.min_nodes and drafted and needed_A.max() > self._positions + 1:
            room += self._positions
            self._rows.grow(self._positions + 1)
        return room

    def _verify(
        self, params: transformer.Params, live: LiveSlots, drafts: Drafts, num_nodes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One round over trees of `num_nodes`; returns (tokens_BN, count_B) that slots got."""
        B = len(self._table)
        tokens_BN, parents_BN = plant(drafts, live.rows_A, B, num_nodes)
        tree = DraftTree(self.argument(tokens_BN), self.argument(parents_BN))
        cache, slots, packed = verify_round(
            params,
            self._rows.cache,
            self._device_slots(),
            tree,
            self._phase.stop_E,
            **self.verify_options(self._phase.sampling.draw),
        )
        self._rows.stepped(cache, slots)
        drafted_B = np.zeros(B, bool)
        drafted_B[live.rows_A] = drafts.count_A > 0
        self.stats.rounds[(B, num_nodes, self._positions)] += 1
        return self._commit(packed, drafted_B)

    def _decode(
        self, params: transformer.Params, waiting: int, most_rounds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most_rounds` rounds without draft tokens; returns (tokens_BN, count_B)."""
        table = self._table
        B = len(table)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        rounds = min(most_rounds, int(left_B.max()))
        # a slot that ends on the way writes no further
        self._rows.grow(int((table.cached_tokens_B + np.minimum(left_B, rounds)).max()))
        cache, slots, packed = decode_rounds(
            params,
            self._rows.cache,
            self._device_slots(),
            self._phase.stop_E,
            np.int32(rounds),
            np.int32(self._stop_after(waiting)),
            **self.decode_options(self._phase.sampling.draw),
        )
        self._rows.stepped(cache, slots)
        tokens_BN, count_B = self._commit(packed, np.zeros(B, bool))
        self.stats.rounds[(B, 1, self._positions)] += int(count_B.max())
        return tokens_BN, count_B

    def _stop_after(self, waiting: int) -> int:
        """Ended requests after which the host can refill slots, or the batch can shrink."""
        busy = self._table.num_busy
        return max(1, busy // 8) if waiting else max(1, busy - len(self._table) // 2)

    def _commit(self, packed: jax.Array, drafted_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The call's one fetch: append each slot's tokens; returns (tokens_BN, count_B)."""
        self._called_s = self.clock()
        tokens_BN, logprobs_BN, count_B = unpack(packed)
        self._fetched_s = self.clock()
        self._table.commit(tokens_BN, logprobs_BN, count_B, drafted_B)
        self.stats.fetches += 1
        self.stats.tokens += int(count_B.sum())
        return tokens_BN, count_B

    def _retire_ended(self, feed: RequestSource | None) -> list[Trajectory]:
        """Trajectories of the requests that the last round ended; their rows are free."""
        phase, table = self._phase, self._table
        rows = table.ended_rows(phase.stop_ids)
        whole = np.array([table.is_whole(b, phase.stop_ids) for b in rows.tolist()], bool)
        if not whole.all():
            assert feed is not None, "only what is fed comes in chunks"
            self._end_chunks(feed, rows[~whole].tolist())
        whole_rows = rows[whole].tolist()
        phase.speculator.finished(table.view(rows[whole]))
        if phase.sink is not None:
            self._rows.catch(whole_rows, phase.sink, phase.policy_version)
        return [table.retire(b, phase.stop_ids, phase.policy_version) for b in whole_rows]

    def _end_chunks(self, feed: RequestSource, rows: Sequence[int]) -> None:
        """Requests have had what they might: each goes on here, or leaves with what it has."""
        table, leaving = self._table, []
        for row in rows:
            request_id = int(table.request_ids_B[row])
            more = feed.chunk_ended(request_id, int(table.emitted_B[row]))
            if more:
                table.extend(row, more)
            else:
                leaving.append(row)
        if leaving:
            self._phase.speculator.finished(table.view(np.array(leaving)))
        # as many at a time as are read in one call: who waits for one has it the sooner
        P = self.config.prefill_rows
        for first in range(0, len(leaving), P):
            feed.park(self._rows.leave(leaving[first : first + P], self._phase.policy_version))
        self._rows.changed()

    @property
    def _positions(self) -> int:
        return self._rows.num_positions

    def _device_slots(self) -> Slots:
        return self._rows.slots(self._phase.sampling, self._phase.key)
