"""The device calls of a rollout, by kind of round, and the commit of their results.

A call runs several rounds if the host makes no draft tokens; each call has one fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from reprise.models.attention.entries import Entries
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.engine.speculate import Speculator
from reprise.rl.records.stats import EngineStats
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slot_memory.slot_cache import NextDraws, SlotCache
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.budget.budget import DraftDecision
from reprise.spec.draft_cache.drafting import draft_rounds, unpack_rounds
from reprise.spec.drafter import Drafts, LiveSlots
from reprise.spec.verification.nodes import are_chains, by_slot, pack, unpack_draws
from reprise.spec.verification.verify import (
    chunks_alone,
    chunks_beside_roots,
    decode_beside_chunks,
    decode_rounds,
    verify_round,
)

T = TypeVar("T")
Fetch = tuple[np.ndarray, np.ndarray, np.ndarray]  # as from `spec.verification.nodes.unpack_draws`


class Limits(NamedTuple):
    """The limits of a call of several rounds: finished requests, and tokens of one request."""

    stop_after: int
    tokens: int


class Fetched(NamedTuple):
    """The tokens of a call: the first `count_B` of each slot, from `rounds_B` rounds."""

    tokens_BN: np.ndarray
    count_B: np.ndarray
    rounds_B: np.ndarray


class Rounds:
    """The rounds of one rollout on the rows of its worker."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: SlotCache,
        table: SlotTable,
        spec: RolloutSpec,
        speculator: Speculator,
        stats: EngineStats,
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._table = table
        self._speculator = speculator
        self._stats = stats
        self._stop_E = runner.put(spec.stop_ids)
        self._scheme = spec.sampling.scheme
        self._key = runner.put(spec.key)
        self.params = spec.params
        self.called_s = self.fetched_s = 0.0  # of the last call
        self._busy = False  # whether the device has a call that is not yet fetched
        self.cached_in_chunks = 0  # cached tokens that chunks of the last call decided on

    def run(
        self, live: LiveSlots, drafts: Drafts | None, decision: DraftDecision, limits: Limits
    ) -> Fetched:
        """Run the rounds of a decision, which also compute the missing tokens of rows."""
        self._busy = False
        self.cached_in_chunks = 0
        if decision.taken_A is not None:
            assert drafts is not None
            return self._verify(live, drafts, decision)
        if decision.tree_tokens:
            return self._draft_on_device(live, decision, limits)
        return self._decode(live, decision.num_rounds, limits)

    def _verify(self, live: LiveSlots, drafts: Drafts, decision: DraftDecision) -> Fetched:
        """Run one round with draft tokens, or with tokens that a rule may keep."""
        B = self._table.num_slots
        M = decision.num_nodes
        taken_A = decision.taken_A
        assert taken_A is not None
        options = self._runner.verify_options(self._scheme, B, M)
        nodes_5M = pack(drafts, taken_A, live.rows_A, B, M, options["max_nodes"])
        if self._runner.has_chains(B, M) and are_chains(nodes_5M[2]):
            options = self._runner.verify_options(self._scheme, B, M, chains=True)
        if self._table.cached is not None and self._table.cached.given:
            self._table.cached.give(nodes_5M, self._table.emitted_B)
        result = self._round(nodes_5M, options)
        drafted_B = np.zeros(B, bool)
        drafted_B[live.rows_A] = taken_A > 0
        drawn = self._fetched(live, unpack_draws, result)
        tokens_BN, logprobs_BN, count_B, reused_B = by_slot(*drawn, nodes_5M[1], B)
        count_B = self._commit(tokens_BN, logprobs_BN, count_B, drafted_B, reused_B)
        self._count(M, 1)
        return Fetched(tokens_BN, count_B, np.minimum(count_B, 1))

    def _round(self, nodes_5M: np.ndarray, options: dict[str, Any]) -> jax.Array:
        """Call one round, with prompt chunks if rows lack tokens; return its result."""
        table = self._table
        rows = self._rows
        runner = self._runner
        slots = self._rows.slots(self._key)
        state = rows.for_round()
        ready = rows.ready()
        chunks_TX = rows.next_chunks(ready) if ready else None
        sizes = table.num_slots, nodes_5M.shape[1], rows.num_positions
        if runner.record is not None:
            runner.record.note("a round", sizes, table, nodes_5M, chunks_TX)
        *state, result, entries = verify_round(
            self.params,
            *state,
            slots,
            runner.argument(nodes_5M),
            self._stop_E,
            None if chunks_TX is None else runner.argument(chunks_TX),
            **options,
        )
        rows.stepped(*state)
        self._called()
        if chunks_TX is not None:
            self._write_chunks(entries, chunks_TX)
        return result

    def prompt_round(self) -> jax.Array:
        """Call one round without draft tokens that computes chunks; return its result."""
        table = self._table
        rows = self._rows
        runner = self._runner
        slots = self._rows.slots(self._key)
        state = rows.for_round()
        chunks_TX = rows.next_chunks(rows.ready())
        sizes = (table.num_slots, rows.num_positions)
        if runner.record is not None:
            runner.record.note("a prompt round", sizes, table, chunks_TX)
        *state, result, entries = decode_beside_chunks(
            self.params,
            *state,
            slots,
            self._stop_E,
            runner.argument(chunks_TX),
            **runner.prompt_options(self._scheme),
        )
        rows.stepped(*state, waits=False)
        self._called()
        self._write_chunks(entries, chunks_TX)
        return result

    def _write_chunks(self, entries: Entries | None, chunks_TX: np.ndarray) -> None:
        assert entries is not None
        self._stats.prefilled_tokens += self._rows.write_chunks(entries, chunks_TX)

    def compute_prompts(self, max_rounds: int, *, until_drafts: bool = False) -> list[jax.Array]:
        """Call rounds without draft tokens while rows lack tokens; return results to wait for.

        Rows join once they lack nothing. Calls stop when a row with a cached response joins, since
        its tokens are decided on first; with `until_drafts`, also once few enough prompts are
        missing that drafts may be wanted.
        """
        result = list[jax.Array]()
        live_B = self._table.live_B
        rows = self._rows
        while len(result) < max_rounds and rows.ready() and not self._undecided(live_B):
            if until_drafts and not self._drafts_wait():
                break
            result.append(self.prompt_round())
            rows.copy_prompts()
        return result

    def draw_in_chunks(self, live: LiveSlots, draws: NextDraws) -> Fetched:
        """Decide, in chunks, on cached tokens of rows that do not take part in rounds yet."""
        table = self._table
        self._busy = False
        assert table.cached is not None
        drafted_B = np.zeros(table.num_slots, bool)
        drafted_B[draws.rows] = True
        if draws.is_beside:
            result, chunks_TX = self._chunks_beside(draws.rows)
            tokens, logprobs, kinds = self._fetched(live, unpack_draws, result)
            slots = np.concatenate([np.arange(table.num_slots), _slot_X(chunks_TX)])
            first = table.num_slots
        else:
            results, chunks_TX = self._chunks_alone(draws.rows)
            tokens, logprobs, kinds = self._fetched(live, _in_turn, results)
            slots = _slot_X(chunks_TX)
            first = 0
        kinds = kinds.copy()
        kinds[first:] = table.cached.stand(
            chunks_TX,
            tokens[first:],
            kinds[first:],
            table.prompt_tokens_B,
            table.emitted_B,
            table.limit_B,
        )
        self.cached_in_chunks = int(np.count_nonzero(kinds[first:]))
        tokens_BN, logprobs_BN, count_B, reused_B = by_slot(
            tokens, logprobs, kinds, slots, table.num_slots
        )
        count_B = self._commit(tokens_BN, logprobs_BN, count_B, drafted_B, reused_B)
        self._count(table.num_slots, 1)
        return Fetched(tokens_BN, count_B, np.minimum(count_B, 1))

    def _chunks_alone(self, rows: Sequence[int]) -> tuple[list[jax.Array], np.ndarray]:
        """Call passes of chunks that draw; return their draws and their chunks."""
        table = self._table
        runner = self._runner
        cache = self._rows.cache
        assert table.cached is not None
        slots = self._rows.slots(self._key)
        passes = self._rows.passes_alone(rows)
        options = runner.prompt_options(self._scheme)
        calls = []
        for chunks_TX in passes:
            inputs_2X = table.cached.give_chunks(chunks_TX, table.prompt_tokens_B)
            sizes = table.num_slots, self._rows.num_positions
            if runner.record is not None:
                runner.record.note("chunks alone", sizes, table, chunks_TX, inputs_2X)
            chunks = runner.argument(chunks_TX)
            inputs = runner.argument(inputs_2X)
            call = partial(chunks_alone, self.params, cache, slots, chunks, inputs, **options)
            calls.append(call)
        results = runner.at_once(calls)
        self._called()
        # the cache is written after all calls that read it
        for chunks_TX, (_, entries) in zip(passes, results, strict=True):
            self._write_chunks(entries, chunks_TX)
        return [drawn for drawn, _ in results], np.concatenate(passes)

    def _chunks_beside(self, at: Sequence[int]) -> tuple[jax.Array, np.ndarray]:
        """Call a round of roots with chunks that draw; return its draws and its chunks."""
        table = self._table
        rows = self._rows
        runner = self._runner
        assert table.cached is not None
        slots = self._rows.slots(self._key)
        state = rows.for_round()
        chunks_TX = rows.pass_beside(at)
        inputs_2X = table.cached.give_chunks(chunks_TX, table.prompt_tokens_B)
        sizes = table.num_slots, rows.num_positions
        if runner.record is not None:
            runner.record.note("chunks beside roots", sizes, table, chunks_TX, inputs_2X)
        *state, result, entries = chunks_beside_roots(
            self.params,
            *state,
            slots,
            self._stop_E,
            runner.argument(chunks_TX),
            runner.argument(inputs_2X),
            **runner.prompt_options(self._scheme),
        )
        rows.stepped(*state)
        self._called()
        self._write_chunks(entries, chunks_TX)
        return result, chunks_TX

    def _drafts_wait(self) -> bool:
        """Return whether a drafter waits until most rows have their prompt."""
        drafts = self._speculator.drafter is not None
        return drafts and self._table.num_prompts_missing > int(self._table.live_B.sum())

    def _undecided(self, live_B: np.ndarray) -> bool:
        """Return whether a row outside `live_B` has become live with a cached response."""
        table = self._table
        (joined,) = np.nonzero(table.live_B & ~live_B)
        return table.cached is not None and bool(table.cached.goes_on(joined).any())

    def _decode(self, live: LiveSlots, max_rounds: int, limits: Limits) -> Fetched:
        """Run up to `max_rounds` rounds without draft tokens."""
        table = self._table
        B = table.num_slots
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        waits = self._drafts_wait()
        if waits:
            max_rounds = self._runner.config.rounds_per_fetch
        rounds = min(max_rounds, int(left_B.max()))
        # a slot that finishes early stops writing
        max_B = np.where(table.busy_B, table.cached_tokens_B + np.minimum(left_B, rounds), 0)
        self._rows.check(max_B)
        live_B = table.live_B
        result = self.compute_prompts(rounds, until_drafts=waits)
        beside_prompts = len(result)
        left = rounds - beside_prompts
        if waits:  # drafts may be wanted next
            left = int(not beside_prompts)
        if left and not self._undecided(live_B):
            slots = self._rows.slots(self._key)
            sizes = B, self._rows.num_positions, left, limits.stop_after
            if self._runner.record is not None:
                self._runner.record.note("plain rounds", sizes, table)
            *state, result_3RB = decode_rounds(
                self.params,
                *self._rows.for_round(),
                slots,
                self._stop_E,
                np.int32(left),
                np.int32(limits.stop_after),
                **self._runner.decode_options(self._scheme),
            )
            self._rows.stepped(*state, waits=False)
            self._called()
            result.append(result_3RB)
        drawn = self._fetched(live, _in_turn, result)
        tokens_BN, logprobs_BN, count_B, reused_B = by_slot(*drawn, np.arange(len(drawn[0])) % B, B)
        count_B = self._commit(tokens_BN, logprobs_BN, count_B, np.zeros(B, bool), reused_B)
        self._count(B, max(beside_prompts, int(count_B.max())))
        return Fetched(tokens_BN, count_B, count_B)

    def _draft_on_device(self, live: LiveSlots, decision: DraftDecision, limits: Limits) -> Fetched:
        """Run rounds that draft and verify on the device; return counts, but no token table."""
        table = self._table
        drafter = self._speculator.in_rounds
        assert drafter is not None
        B = table.num_slots
        rows = self._rows
        options = self._runner.draft_options(self._scheme, B, decision)
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        gain_B = np.minimum(left_B, options["shape"].tree_nodes)
        max_B = np.where(table.busy_B, table.cached_tokens_B + gain_B, 0)
        rows.check(max_B)
        inputs = drafter.enter_rounds(live, decision.tree_tokens)
        # the likeliest n draft tokens are at most n deep
        depth = min(inputs.depth, decision.tree_tokens)
        bounds = [decision.num_rounds, *limits, depth]
        scale_B = np.ones(B, np.float32)
        slots = self._rows.slots(self._key)
        if decision.scale_A is not None:
            scale_B[live.rows_A] = decision.scale_A
        limits_4 = np.array(bounds, np.int32)
        sizes = B, decision.num_nodes, rows.num_positions
        if self._runner.record is not None:
            self._runner.record.note("rounds that draft", sizes, table, limits_4, scale_B)
        *state, draft_cache, result = draft_rounds(
            self.params,
            *rows.for_round(),
            slots,
            self._stop_E,
            inputs.cache,
            inputs.constants,
            inputs.table_RX,
            self._runner.argument(limits_4),
            self._runner.argument(scale_B),
            **options,
            drafting=inputs.drafting,
        )
        rows.stepped(*state)
        self._called()
        total_B = np.zeros(B, np.int32)
        rounds_B = np.zeros(B, np.int32)
        acceptance = []
        for r in self._fetched(live, unpack_rounds, result):
            drawn_B = np.where(table.stopped_B, 0, r.count_B)  # the device does not know all stops
            count_B = self._commit(
                r.tokens_BN, r.logprobs_BN, drawn_B, r.drafted_B > 0, np.zeros_like(drawn_B)
            )
            total_B = total_B + count_B
            rounds_B = rounds_B + (count_B > 0)
            acceptance.append(self._speculator.observe_unseen(live, r, count_B))
        drafter.leave_rounds(table.view(live.rows_A), draft_cache, np.concatenate(acceptance))
        self._count(decision.num_nodes, int(rounds_B.max()))
        return Fetched(np.zeros((B, 0), np.int32), total_B, rounds_B)

    def _fetched(self, live: LiveSlots, unpack: Callable[[Any], T], found: Any) -> T:
        """Return the results of a call; update the drafter while the device works."""
        assert self._busy, "fetched before the device was called"
        if len(live):  # empty while all rows compute their prompts
            self._speculator.committed(live)
        drawn = unpack(found)
        self._busy = False
        self.fetched_s = self._runner.clock()
        self._stats.fetches += 1
        return drawn

    def _called(self) -> None:
        """Record the time of the first device call before a fetch."""
        if not self._busy:
            self.called_s = self._runner.clock()
            self._busy = True

    def _commit(
        self,
        tokens_BN: np.ndarray,
        logprobs_BN: np.ndarray,
        drawn_B: np.ndarray,
        drafted_B: np.ndarray,
        reused_B: np.ndarray,
    ) -> np.ndarray:
        """Append the fetched tokens of each slot; return the numbers of tokens added."""
        table = self._table
        waits_B = table.busy_B & (table.missing_tokens_B > 0)
        count_B = table.commit(tokens_BN, logprobs_BN, drawn_B, drafted_B, reused_B)
        if waits_B.any():
            self._rows.joined(np.nonzero(table.live_B & waits_B)[0].tolist())
        has_own_ends = table.endings.unknown_to_device or table.not_finite_B.any()
        if has_own_ends and table.stopped_B[count_B > 0].any():
            self._rows.changed()  # the device would continue these rows
        self._stats.tokens += int(count_B.sum())
        if self._runner.record is not None:
            self._runner.record.note("tokens", tokens_BN.shape, self._table, tokens_BN, logprobs_BN)
        return count_B

    def _count(self, num_nodes: int, num_rounds: int) -> None:
        bucket = self._table.num_slots, num_nodes, self._rows.num_positions
        self._stats.rounds[bucket] += num_rounds


def _slot_X(chunks_TX: np.ndarray) -> np.ndarray:
    """Return the slot of each token of chunks."""
    return np.repeat(chunks_TX[:, 0], chunks_TX.shape[1] - 2)


def _in_turn(found: Sequence[jax.Array]) -> Fetch:
    """Wait for the results of rounds in order; return the results unpacked and joined."""
    packed = [np.asarray(some).reshape(3, -1) for some in found]
    return unpack_draws(np.concatenate(packed, axis=1))
