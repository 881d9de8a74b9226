"""A rollout's calls of the device, by kind of round, and the commit of what they bring.

A call is several rounds where the host makes no draft tokens; each brings one fetch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.slot_cache import SlotCache
from rl.engine.slot_table import SlotTable
from rl.engine.speculate import Speculator
from rl.engine.stats import EngineStats
from spec.budget.budget import DraftDecision
from spec.draft_cache.rounds import Asked, draft_rounds, unpack_rounds
from spec.drafter import Drafts, LiveSlots, no_drafts
from spec.nodes import pack
from spec.verify import Slots, by_slot, chunk_round, decode_rounds, unpack, verify_round

T = TypeVar("T")


class Limits(NamedTuple):
    """When a call of several rounds ends early: ended requests, and tokens of one of them."""

    stop_after: int
    tokens: int


class Fetched(NamedTuple):
    """The tokens of a call: the first `count_B` of each slot's, of `rounds_B` rounds."""

    tokens_BN: np.ndarray
    count_B: np.ndarray
    rounds_B: np.ndarray


class Rounds:
    """The rounds of one rollout on the rows of its worker."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: SlotCache,
        spec: RolloutSpec,
        speculator: Speculator,
        stats: EngineStats,
    ) -> None:
        self._runner, self._rows, self._spec = runner, rows, spec
        self._speculator, self._stats = speculator, stats
        self._stop_E, self._scheme = runner.put(spec.stop_ids), spec.sampling.draw
        self.called_s = self.fetched_s = 0.0  # of the last call

    @property
    def _table(self) -> SlotTable:
        return self._rows.table

    def run(
        self, live: LiveSlots, drafts: Drafts | None, decision: DraftDecision, limits: Limits
    ) -> Fetched:
        """Run the rounds that were decided for; where rows lack tokens, one that computes them."""
        if self._table.lacking():
            return self._decode_beside_chunks(live)
        if decision.taken_A is not None:
            assert drafts is not None
            return self._verify(live, drafts, decision)
        if decision.tree_tokens:
            return self._draft_on_device(live, decision, limits)
        return self._decode(live, decision.num_rounds, limits)

    def _verify(self, live: LiveSlots, drafts: Drafts, decision: DraftDecision) -> Fetched:
        """One round with draft tokens."""
        B, M, taken_A = len(self._table), decision.num_nodes, decision.taken_A
        assert taken_A is not None
        nodes_5M = self._nodes(drafts, taken_A, live.rows_A, M)
        slots = self._device_slots()
        *state, found = verify_round(
            self._spec.params,
            *self._rows.for_round(),
            slots,
            self._runner.argument(nodes_5M),
            self._stop_E,
            **self._runner.verify_options(self._scheme, B, M),
        )
        drafted_B = np.zeros(B, bool)
        drafted_B[live.rows_A] = taken_A > 0
        self._rows.stepped(*state)
        return self._one_round(live, found, nodes_5M, drafted_B)

    def _one_round(
        self, live: LiveSlots, found: jax.Array, nodes_5M: np.ndarray, drafted_B: np.ndarray
    ) -> Fetched:
        """Fetch and commit what one round found at its nodes."""
        B, M = len(self._table), nodes_5M.shape[1]
        drawn = self._fetched(live, unpack, found)
        tokens_BN, logprobs_BN, count_B, kept_B = by_slot(*drawn, nodes_5M[1], B)
        count_B = self._commit(tokens_BN, logprobs_BN, count_B, drafted_B, kept_B)
        self._count(M, 1)
        return Fetched(tokens_BN, count_B, np.minimum(count_B, 1))

    def _nodes(
        self, drafts: Drafts, taken_A: np.ndarray, rows_A: np.ndarray, num_nodes: int
    ) -> np.ndarray:
        """Return the nodes of a round, and what a rule may keep behind them, as `pack` does."""
        nodes_5M = pack(drafts, taken_A, rows_A, len(self._table), num_nodes)
        cached = self._table.cached
        if cached is not None and cached.given:
            cached.give(nodes_5M, self._table.emitted_B)
        return nodes_5M

    def compute_chunks(self) -> None:
        """One round in which nothing but prompts is computed, and no token is fetched."""
        self._chunks(self._table.live())

    def _chunks(self, live: LiveSlots) -> tuple[jax.Array, np.ndarray]:
        """One round without draft tokens, in which prompts are computed: its result and nodes."""
        rows, none = self._rows, no_drafts(len(live), 1)
        nodes_5B = self._nodes(none, none.count_A, live.rows_A, len(self._table))
        slots, state = self._device_slots(), rows.for_round()
        chunks_TX = rows.next_chunks()
        *state, found, entries = chunk_round(
            self._spec.params,
            *state,
            slots,
            self._runner.argument(nodes_5B),
            self._runner.argument(chunks_TX),
            self._stop_E,
            **self._runner.chunk_options(self._scheme),
        )
        rows.stepped(*state)
        self._stats.prefilled_tokens += rows.write_chunks(entries, chunks_TX)
        return found, nodes_5B

    def _decode_beside_chunks(self, live: LiveSlots) -> Fetched:
        """One round without draft tokens, in which prompts are computed."""
        found, nodes_5B = self._chunks(live)
        return self._one_round(live, found, nodes_5B, np.zeros(len(self._table), bool))

    def _decode(self, live: LiveSlots, most_rounds: int, limits: Limits) -> Fetched:
        """Up to `most_rounds` rounds without draft tokens."""
        table = self._table
        B = len(table)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        rounds = min(most_rounds, int(left_B.max()))
        # a slot that ends on the way writes no further
        self._rows.grow(int((table.cached_tokens_B + np.minimum(left_B, rounds)).max()))
        slots = self._device_slots()
        *state, found = decode_rounds(
            self._spec.params,
            *self._rows.for_round(),
            slots,
            self._stop_E,
            np.int32(rounds),
            np.int32(limits.stop_after),
            **self._runner.decode_options(self._scheme),
        )
        self._rows.stepped(*state, waits=False)
        tokens_BR, logprobs_BR, kind_BR = self._fetched(live, unpack, found)
        count_B, none_B = (kind_BR > 0).sum(axis=1, dtype=np.int32), np.zeros(B, np.int32)
        count_B = self._commit(tokens_BR, logprobs_BR, count_B, none_B > 0, none_B)
        self._count(B, int(count_B.max()))
        return Fetched(tokens_BR, count_B, count_B)

    def _draft_on_device(self, live: LiveSlots, decision: DraftDecision, limits: Limits) -> Fetched:
        """Rounds that draft and verify on the device; their tokens are not returned in a table."""
        table, drafter = self._table, self._speculator.in_rounds
        assert drafter is not None
        B, rows = len(table), self._rows
        options = self._runner.draft_options(self._scheme, B, decision)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        most_B = table.cached_tokens_B + np.minimum(left_B, options["shape"].tree_nodes)
        rows.grow(max(int(most_B.max()), drafter.num_positions))
        given = drafter.enter_rounds(live, decision.tree_tokens, rows.num_positions)
        # the likeliest n draft tokens are n deep at most
        depth = min(given.depth, decision.tree_tokens)
        limits_4 = [decision.num_rounds, *limits, depth]
        scale_B, slots = np.ones(B, np.float32), self._device_slots()
        if decision.scale_A is not None:
            scale_B[live.rows_A] = decision.scale_A
        made = np.array(limits_4, np.int32), scale_B
        *state, draft_cache, found = draft_rounds(
            self._spec.params,
            *rows.for_round(),
            slots,
            self._stop_E,
            given.cache,
            Asked(given.constants, given.table_RX, *map(self._runner.argument, made)),
            **options,
            drafting=given.drafting,
        )
        rows.stepped(*state)
        total_B, rounds_B = np.zeros(B, np.int32), np.zeros(B, np.int32)
        acceptance = []
        for r in self._fetched(live, unpack_rounds, found):
            drawn_B = np.where(table.stopped_B, 0, r.count_B)  # the device does not know all ends
            count_B = self._commit(
                r.tokens_BN, r.logprobs_BN, drawn_B, r.drafted_B > 0, np.zeros_like(drawn_B)
            )
            total_B, rounds_B = total_B + count_B, rounds_B + (count_B > 0)
            acceptance.append(self._speculator.observe_unseen(live, r, count_B))
        drafter.leave_rounds(table.view(live.rows_A), draft_cache, np.concatenate(acceptance))
        self._count(decision.num_nodes, int(rounds_B.max()))
        return Fetched(np.zeros((B, 0), np.int32), total_B, rounds_B)

    def _fetched(self, live: LiveSlots, unpack: Callable[[Any], T], found: Any) -> T:
        """Return what a call found, once the device has it; the drafter is told meanwhile."""
        self.called_s = self._runner.clock()
        self._speculator.committed(live)
        drawn = unpack(found)
        self.fetched_s = self._runner.clock()
        self._stats.fetches += 1
        return drawn

    def _commit(
        self,
        tokens_BN: np.ndarray,
        logprobs_BN: np.ndarray,
        drawn_B: np.ndarray,
        drafted_B: np.ndarray,
        kept_B: np.ndarray,
    ) -> np.ndarray:
        """Append the tokens that a fetch brought each slot; returns how many it got."""
        count_B = self._table.commit(tokens_BN, logprobs_BN, drawn_B, drafted_B, kept_B)
        if self._table.endings.unknown_to_device and self._table.stopped_B[count_B > 0].any():
            self._rows.changed()  # the device goes on there
        self._stats.tokens += int(count_B.sum())
        return count_B

    def _count(self, num_nodes: int, num_rounds: int) -> None:
        self._stats.rounds[(len(self._table), num_nodes, self._rows.num_positions)] += num_rounds

    def _device_slots(self) -> Slots:
        return self._rows.slots(self._spec.key)
