"""The slot table on the host, the memory of the slots on the device, and operations on both.

The host table is authoritative; the device has the cache (`rl.slot_memory.page_memory`) and a copy
of the table, made again when the host has changed the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from reprise.models.attention.entries import Entries, Pending
from reprise.models.attention.kv_cache import KVCache
from reprise.rl.records.trajectory import PartialRequest
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slot_memory.page_memory import PageMemory
from reprise.rl.slot_memory.state_delivery import Ended, StateDelivery
from reprise.rl.slots import admission
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.reuse.chunk_price import Bucket
from reprise.spec.verification.verify import Slots, settle


class NextDraws(NamedTuple):
    """A pass with one chunk for each row, separate or with a plain round of the live rows."""

    rows: list[int]
    is_beside: bool


class SlotCache:
    """A slot table and its cache, with buffers that are kept for the lifetime of an engine."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._slot_bucket = functools.cache(runner.config.slot_bucket)
        self.table = SlotTable(0, 0)
        self.memory = PageMemory(runner)
        self.num_positions = 0  # of a row, at most
        self._pending: Pending | None = None  # entries that the last round left to write
        self._waits = False  # whether entries are pending
        self._slots: Slots | None = None  # None: the host has changed the table
        self._joining: set[int] = set()  # rows that take part from the next round on

    @property
    def cache(self) -> KVCache:
        """The cache with all pending entries written."""
        return self._settled().held

    def _settled(self) -> PageMemory:
        """Return the memory with all pending entries written; the rows of a round had pages."""
        if self._waits:
            assert self._pending is not None
            self.memory.cache, self._pending = settle(self.memory.held, self._pending)
            self._waits = False
        return self.memory

    def for_round(self) -> tuple[KVCache, Pending]:
        """Return the cache, with room for the pending entries, and the pending entries."""
        table = self.table
        self.check(np.where(table.busy_B, table.known_tokens_B, 0))
        assert self._pending is not None
        return self.memory.held, self._pending

    def check(self, tokens_B: np.ndarray) -> None:
        """Assert that each row has room for `tokens_B` positions."""
        has_pages_B = self.memory.pages.held_B > 0  # rows without pages may wait
        is_short_B = tokens_B > self.memory.pages.held_B * self.memory.pages.page_tokens
        assert not (is_short_B & has_pages_B).any(), "a row outgrew its pages"

    def stepped(
        self,
        cache: KVCache,
        pending: Pending,
        slots: Slots,
        *,
        waits: bool = True,
    ) -> None:
        """Replace the arrays that a round consumed; `waits` if its entries are still to write."""
        self.memory.cache = cache
        self._pending = pending
        self._slots = slots
        self._waits = waits

    def changed(self) -> None:
        """Record that the host has changed the table."""
        self._slots = None

    def slots(self, key: jax.Array) -> Slots:
        """Return the device copy of the table; rows that join do not change other rows.

        The state of other rows on the device may be rounds ahead of the host.
        """
        if self._slots is None or self._joining:
            columns = self.table.device_columns()
            processing_B2 = self.table.device_processing()
            arguments = self._runner.slot_arguments(columns, processing_B2, key)
            if self._slots is None:
                self._slots = cache_ops.make_slots(*arguments)
            else:
                joins_B = np.zeros(self.table.num_slots, bool)
                joins_B[list(self._joining)] = True
                joins_B = self._runner.argument(joins_B)
                self._slots = cache_ops.join_slots(self._slots, *arguments, joins_B)
        self._joining = set()
        return self._slots

    # -- requests enter ----------------------------------------------------------------

    def enter(self, requests: Sequence[PartialRequest], rows: Sequence[int]) -> None:
        """Put requests into free rows, and write the keys and values that requests bring."""
        table = self.table
        memory = self.memory
        brought = [(p.kv, row) for p, row in zip(requests, rows, strict=True) if p.kv is not None]
        if brought or table.keeps_responses:
            self._settled()  # pending entries must not go to pages that become shared
        for p, row in zip(requests, rows, strict=True):
            held_tokens = 0
            if p.kv is None:
                [held_tokens] = table.reusable_tokens(p.request, [row]).tolist()
                held_tokens = memory.unshared(row, held_tokens)
            memory.pages.release(row, held_tokens)
            table.enter(row, p, held_tokens if p.kv is None else None)
        memory.room_for(requests, brought, table)
        if brought:
            memory.insert(brought)

    # -- missing tokens ----------------------------------------------------------------

    def copy_prompts(self) -> None:
        """Copy prompts from rows that hold a prompt to rows that lack it."""
        copies, _ = self._fills()
        if copies:
            for row in self._settled().share(copies, self.table):
                self._filled(row, int(self.table.prompt_tokens_B[row]) - 1)

    def ready(self) -> list[int]:
        """Return the rows with prompt tokens that the next chunks can compute."""
        _, rows = self._fills()
        if not rows:
            return []
        verifies_B = self.table.verifies_B
        held_B = self.memory.pages.held_B  # 0: a row that waits for pages
        return [r for r in rows if not verifies_B[r] and held_B[r]]

    def prompts_first(self) -> bool:
        """Return whether to compute prompts in rounds without nodes, since no row is live."""
        table = self.table
        if table.live_B.any() or not table.busy_B.any():
            return False
        return not table.verifies_in_chunks or bool(self.ready())

    def draws_next(self, *, waits: bool, may_return: bool = True) -> NextDraws | None:
        """Return the next pass of chunks that draw, or None if a round is next.

        The table verifies in chunks.
        If passes are priced, rows decode until a pass of enough rows pays; with `may_return`,
        decoding rows can join a pass. Without prices, a pass runs immediately until more than half
        of the busy rows are live; from then on rows wait for a full pass, or until no request
        `waits` for a slot.
        """
        table = self.table
        (verifying,) = np.nonzero(table.verifies_B)
        rows = [row for row in verifying.tolist() if self.memory.pages.held_B[row]]
        assert table.cached is not None
        decoding = np.nonzero(table.live_B & table.cached.watched_B & (table.cached.end_B > 0))[0]
        price = table.cached.price
        may_return = may_return and price is not None and price.has_passes(table.num_slots)
        if price is not None and table.num_prompts_missing > int(table.live_B.sum()):
            if self.ready():
                return None  # rounds compute prompts too, passes do not
        if len(decoding) and may_return:
            return self._priced([*rows, *decoding.tolist()], rows)
        if not rows:
            ready = table.live_B.any() or self.ready() or not table.num_busy
            assert ready, self._stuck()
            return None
        if table.cached.price is None:
            num_live = int(table.live_B.sum())
            is_full = len(rows) >= self._runner.drawing_chunks(table.num_slots)[-1]
            if waits and not is_full and 2 * num_live > table.num_busy:
                return None
            return NextDraws(rows, 0 < num_live and len(rows) <= self._runner.beside_chunks[-1])
        return self._priced(rows, rows)

    def _priced(self, rows: Sequence[int], verifying: Sequence[int]) -> NextDraws | None:
        """Return the best pass of these rows if it pays, or None; rows left out decode."""
        table = self.table
        runner = self._runner
        assert table.cached is not None and table.cached.price is not None
        expected_R = table.cached.expected_tokens(rows, table.emitted_B, table.limit_B)
        order = np.argsort(-expected_R, kind="stable")
        chosen = table.cached.price.best_pass(
            expected_R[order],
            self._bucket,
            alone=runner.drawing_chunks(table.num_slots),
            beside=runner.beside_chunks,
        )
        count = 0 if chosen is None else chosen.num_chunks
        taken = [rows[i] for i in order[:count].tolist()]
        self.decode_instead([row for row in verifying if row not in taken])
        for row in set(taken).difference(verifying):
            if self.memory.pages.reserve(row, table.tokens_if_verified(row)):
                table.verify_again(row)
                self.changed()
            else:
                taken.remove(row)
        if chosen is None or not taken:
            return None
        return NextDraws(taken, chosen.is_beside)

    def decode_cheap(self, rows: Sequence[int]) -> None:
        """Have entering rows, which verify in chunks, decode if even a full pass would not pay."""
        table = self.table
        cached = self.table.cached
        if cached is None or cached.price is None:
            return
        price = cached.price
        at = self._bucket
        sizes = self._runner.drawing_chunks(table.num_slots)
        expected_R = cached.expected_tokens(rows, table.emitted_B, table.limit_B)
        cheap_R = (expected_R > 0) & ~price.may_pay(expected_R, at, sizes)
        self.decode_instead(np.asarray(rows)[cheap_R].tolist())

    @property
    def _bucket(self) -> Bucket:
        table = self.table
        return Bucket(table.num_slots, self.num_positions, table.num_busy, int(table.live_B.sum()))

    def decode_instead(self, rows: Sequence[int]) -> None:
        """Have rows decode instead of verifying their cached tokens in chunks."""
        for row in rows:
            self.table.decode_instead(row)
            if not self.table.missing_tokens_B[row]:
                self.joined([row])

    def next_chunks(self, rows: Sequence[int]) -> np.ndarray:
        """Return the chunks of `ready` rows that a round computes, for `Chunks.of_table`."""
        table = self.table
        T = self._runner.config.prefill_rows
        assert rows or table.live_B.any(), self._stuck()
        size = T, self._runner.chunk_tokens
        return self._chunks(rows, size, table.cached_tokens_B, most_of_row=T)

    def pass_beside(self, rows: Sequence[int]) -> np.ndarray:
        """Return a table with one chunk per row, for a pass that draws together with a round."""
        T = next(n for n in self._runner.beside_chunks if n >= len(rows))
        return self._drawing(rows, T)

    def passes_alone(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Return tables with one chunk per row, for independent passes that draw.

        With enough rows there are at least `num_at_once` passes.
        """
        parts = self._runner.pass_parts(len(rows), self.table.num_slots)
        ends = np.cumsum(parts).tolist()
        starts = [0, *ends[:-1]]
        pairs = zip(starts, ends, parts, strict=True)
        return [self._drawing(rows[first:end], T) for first, end, T in pairs]

    def _drawing(self, rows: Sequence[int], num_chunks: int) -> np.ndarray:
        size = num_chunks, self._runner.drawing_tokens
        return self._chunks(rows, size, self.table.known_tokens_B, most_of_row=1)

    def _chunks(
        self, rows: Sequence[int], size: tuple[int, int], end_B: np.ndarray, most_of_row: int
    ) -> np.ndarray:
        """Return a table of (chunks, tokens) with missing tokens of rows, up to `end_B` per row."""
        num_chunks, C = size
        table_TX = self._runner.no_chunks(num_chunks, C)
        held_B = self.table.known_tokens_B - self.table.missing_tokens_B
        i = 0
        for row in rows:
            for start in range(held_B[row], end_B[row], C)[:most_of_row]:
                if i == num_chunks:
                    return table_TX
                tokens = self.table.tokens_BL[row, start : min(start + C, end_B[row])]
                table_TX[i, :2] = row, start
                table_TX[i, 2 : 2 + len(tokens)] = tokens
                i += 1
        return table_TX

    def _stuck(self) -> str:
        return f"a round that would do nothing: {self.memory.books(self.table)}"

    def _fills(self) -> tuple[list[tuple[int, int]], list[int]]:
        table = self.table
        if not (missing := table.lacking()):  # as in most rounds
            return [], []
        return admission.fills(missing, table.prompts, self.memory.pages.part_B, table.busy_B)

    def write_chunks(self, entries: Entries, chunks_TX: np.ndarray) -> int:
        """Write the chunk entries of a round; return how many of their tokens rows lacked."""
        chunks = self._runner.argument(chunks_TX)
        self.memory.cache = cache_ops.write_chunks(self.memory.held, entries, chunks)
        C = chunks_TX.shape[1] - 2
        result = 0
        for row, start in chunks_TX[chunks_TX[:, 0] >= 0, :2].tolist():
            result += self._filled(row, start + C)
        return result

    def _filled(self, row: int, num_tokens: int) -> int:
        count = self.table.filled(row, num_tokens)
        if self.table.busy_B[row] and not self.table.missing_tokens_B[row]:
            self.joined([row])
        return count

    def hold(self, row: int, num_tokens: int) -> None:
        """Treat the first `num_tokens` tokens of a row as computed, to time rounds."""
        self._filled(row, num_tokens)

    def joined(self, rows: Iterable[int]) -> None:
        """Record that rows have no missing tokens left."""
        self._joining.update(rows)

    # -- requests leave ----------------------------------------------------------------

    def leave(self, rows: Sequence[int], policy_version: int) -> list[PartialRequest]:
        """Free rows; return their requests, with keys and values of all tokens but the last."""
        lengths = self.table.cached_tokens_B[np.asarray(rows)].tolist()
        kvs = self._settled().read(rows, lengths)
        return [
            dataclasses.replace(self.table.leave(row, policy_version), kv=kv)
            for row, kv in zip(rows, kvs, strict=True)
        ]

    def copied(self, row: int, policy_version: int) -> PartialRequest:
        """Return the same as `leave` for one row, without freeing it."""
        [kv] = self._settled().read([row], self.table.cached_tokens_B[[row]].tolist())
        return dataclasses.replace(self.table.so_far(row, policy_version), kv=kv)

    def send(self, rows: Sequence[int], delivery: StateDelivery, policy_version: int) -> None:
        """Send finished responses, with the hidden states of their rows, if wanted."""
        table = self.table
        for row in rows:
            request_id = int(table.request_ids_B[row])
            num_tokens = int(table.total_tokens_B[row])
            if delivery.wants(request_id, num_tokens):
                tokens_T = table.tokens_BL[row, :num_tokens].copy()
                copies = self._settled().copy_states(row, num_tokens - 1)
                prompt_tokens = int(table.prompt_tokens_B[row])
                delivery.send(Ended(tokens_T, prompt_tokens, copies, policy_version))

    # -- the batch ---------------------------------------------------------------------

    def reset(self, table: SlotTable, fetch_tokens: int) -> None:
        """Start with an empty table and an empty cache; keep cache buffers that fit."""
        self.table = table
        self.memory.reset(table.num_slots, fetch_tokens)
        self.num_positions = self._runner.num_positions
        self._pending = self._runner.empty_pending(table.num_slots)
        self._waits = False
        self._slots = None

    def drop(self) -> None:
        """Drop the cache, after a failed step that may have consumed it or to free its memory."""
        self.memory.cache = self._pending = self._slots = None

    def fit(self, num_requests: int, wanted_later: Collection[int]) -> None:
        """Halve the rows while all requests fit into half of the rows; double while they do not.

        The batch does not shrink while a row lacks tokens, so that fewer sizes of rounds have
        chunks.
        """
        table = self.table
        wanted = self._slot_bucket(num_requests)
        shrinks = not table.keeps_responses  # a dialogue continues free rows
        while shrinks and wanted < table.num_slots and not table.lacking():
            half = self._slot_bucket(-(-table.num_slots // 2))
            rows = self.memory.kept_rows(table, table.most_useful(wanted_later), half)
            if rows is None:
                break
            self._take_rows(rows)
        while wanted > (before := table.num_slots):
            self._settled()
            table.widen(more := self._slot_bucket(before + 1))
            self._take_rows(self.memory.widened(before, more))

    def _take_rows(self, rows: Sequence[int]) -> None:
        memory = self._settled() if self._waits else self.memory
        memory.take_rows(rows)
        self.table.keep(rows)
        self._pending = self._runner.empty_pending(len(rows))
        self._slots = None

    def wait_in_turn(self) -> None:
        """Wait for moves of rows before other programs start: processes share arrays."""
        self._runner.in_turn(self.memory.cache)
