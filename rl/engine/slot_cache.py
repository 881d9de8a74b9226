"""The host's table of rows, the device's cache for them, and what moves both.

The host's table is the truth about every slot; the device holds the cache and a copy of
the table, which is made again when the host has changed it. Sizes come from a pool of
buckets (slots and positions: powers of two), each compiled once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from models import kv_cache
from rl.engine import admission, cache_ops
from rl.engine.model_runner import ModelRunner
from rl.engine.slot_table import SlotTable
from rl.engine.state_delivery import Ended, StateDelivery
from rl.trajectory import PartialRequest, Prompt
from spec import cache_rows
from spec.verify import Slots, settle


class SlotCache:
    """A table of slots and its cache; it lives as long as its engine and keeps its buffers."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.table = SlotTable(0, 0)
        self._cache: kv_cache.KVCache | None = None
        self._pending: kv_cache.Pending | None = None  # what the last round left to be written
        self._waits = False  # that it holds anything
        self._slots: Slots | None = None  # None: the host has changed the table
        self._joining: set[int] = set()  # rows that are to take part from the next round on

    def __len__(self) -> int:
        return len(self.table)

    @property
    def cache(self) -> kv_cache.KVCache:
        """The cache with all that rounds have left to be written."""
        cache, pending = self.for_round()
        if self._waits:
            self._cache, self._pending = settle(cache, pending)
            self._waits = False
        return self._held

    @property
    def _held(self) -> kv_cache.KVCache:
        assert self._cache is not None
        return self._cache

    def for_round(self) -> tuple[kv_cache.KVCache, kv_cache.Pending]:
        """Return the cache, long enough for what waits to be written, and what waits."""
        self.grow(self.table.longest_cached())
        assert self._pending is not None
        return self._held, self._pending

    @property
    def num_positions(self) -> int:
        return self._held.num_positions

    def stepped(
        self,
        cache: kv_cache.KVCache,
        pending: kv_cache.Pending,
        slots: Slots,
        *,
        waits: bool = True,
    ) -> None:
        """Take the arrays that a round returned for those that it consumed.

        `waits` says whether it has left entries to be written.
        """
        self._cache, self._pending, self._slots = cache, pending, slots
        self._waits = waits

    def changed(self) -> None:
        """Note that the host has changed the table."""
        self._slots = None

    def slots(self, key: jax.Array) -> Slots:
        """Return the device's copy of the table.

        Where nothing but rows that join has changed the others are left as they are: the device
        may be rounds ahead of the host.
        """
        if self._slots is None or self._joining:
            columns, processing_B2 = self.table.device_columns(), self.table.device_processing()
            arguments = self._runner.slot_arguments(columns, processing_B2, key)
            if self._slots is None:
                self._slots = cache_ops.make_slots(*arguments)
            else:
                joins_B = np.zeros(len(self.table), bool)
                joins_B[list(self._joining)] = True
                joins_B = self._runner.argument(joins_B)
                self._slots = cache_ops.join_slots(self._slots, *arguments, joins_B)
        self._joining = set()
        return self._slots

    # -- requests enter ----------------------------------------------------------------

    def enter(
        self,
        requests: Sequence[PartialRequest],
        wanted_later: Collection[Prompt] = (),
    ) -> None:
        """Put requests into free rows, and write the keys and values that come with them.

        Where none come, rounds compute them, or another row that holds the prompt is copied.
        """
        table, brought = self.table, [p for p in requests if p.kv is not None]
        if others := [p for p in requests if p.kv is None]:
            self.grow(max(len(p.token_ids) for p in others) + 1)
            prompts = [p.request.prompt_ids for p in others]
            rows = admission.assign(prompts, table.free_rows(), table.prompts, wanted_later)
            for p, prompt, row in zip(others, prompts, rows, strict=True):
                table.enter(row, p, len(prompt) - 1 if table.prompts[row] == prompt else 0)
        if brought:
            entries = []
            for p, row in zip(brought, table.free_rows(), strict=False):
                assert p.kv is not None
                entries.append((p.kv, row))
                table.enter(row, p)
            self.grow(max(kv.num_tokens for kv, _ in entries) + 1)
            self._cache = self._runner.insert_kv(self.cache, entries)

    # -- what rows lack ----------------------------------------------------------------

    def copy_prompts(self) -> None:
        """Copy prompts to rows that lack them from rows that hold them."""
        copies, _ = admission.fills(self.table.lacking(), self.table.prompts)
        if copies:
            self._cache = self._runner.copy_rows(self.cache, copies)
            for _, row in copies:
                self._filled(row, int(self.table.prompt_tokens_B[row]) - 1)

    def next_chunks(self) -> np.ndarray:
        """Return the tokens that the next round is to compute, as a table for `Chunks.of_table`."""
        table, table_TX = self.table, self._runner.no_chunks()
        T, C = len(table_TX), self._runner.config.chunk_tokens
        _, rows = admission.fills(table.lacking(), table.prompts)
        starts = ((row, at) for row in rows for at in self._starts(row, C))
        for i, (row, start) in enumerate(itertools.islice(starts, T)):
            tokens = table.tokens_BL[row, start : min(start + C, table.cached_tokens_B[row])]
            table_TX[i, : 2 + len(tokens)] = row, start, *tokens
        return table_TX

    def _starts(self, row: int, chunk_tokens: int) -> Iterator[int]:
        """Yield where chunks of what the row lacks begin."""
        end = int(self.table.cached_tokens_B[row])
        for start in range(end - int(self.table.lacking_tokens_B[row]), end, chunk_tokens):
            # the whole window lies inside the row: it may begin with what is there
            yield min(start, self.num_positions - chunk_tokens)

    def write_chunks(self, entries: kv_cache.Entries, chunks_TX: np.ndarray) -> int:
        """Write what a round computed for chunks; return how many tokens rows lacked of them."""
        chunks = self._runner.argument(chunks_TX)
        self._cache = cache_ops.write_chunks(self._held, entries, chunks)
        C, found = self._runner.config.chunk_tokens, 0
        for row, start in chunks_TX[chunks_TX[:, 0] >= 0, :2].tolist():
            found += self._filled(row, start + C)
        return found

    def _filled(self, row: int, num_tokens: int) -> int:
        found = self.table.filled(row, num_tokens)
        if self.table.live_B[row]:
            self._joining.add(row)
        return found

    # -- requests leave ----------------------------------------------------------------

    def leave(self, rows: Sequence[int], policy_version: int) -> list[PartialRequest]:
        """Free rows; return their requests, with keys and values of all tokens but the last."""
        lengths = self.table.cached_tokens_B[np.asarray(rows)].tolist()
        kvs = self._runner.read_kv(self.cache, rows, lengths)
        return [
            dataclasses.replace(self.table.leave(row, policy_version), kv=kv)
            for row, kv in zip(rows, kvs, strict=True)
        ]

    def copied(self, row: int, policy_version: int) -> PartialRequest:
        """Return what `leave` does of a row that stays."""
        [kv] = self._runner.read_kv(self.cache, [row], self.table.cached_tokens_B[[row]].tolist())
        return dataclasses.replace(self.table.so_far(row, policy_version), kv=kv)

    def send(self, rows: Sequence[int], delivery: StateDelivery, policy_version: int) -> None:
        """Send responses that have ended, with the hidden states of their rows, if wanted."""
        table = self.table
        for row in rows:
            request_id, num_tokens = int(table.request_ids_B[row]), int(table.total_tokens_B[row])
            if delivery.wants(request_id, num_tokens):
                tokens_T = table.tokens_BL[row, :num_tokens].copy()
                copies = self._runner.copy_states(self.cache, row, num_tokens - 1)
                prompt_tokens = int(table.prompt_tokens_B[row])
                delivery.send(Ended(tokens_T, prompt_tokens, copies, policy_version))

    # -- buckets -----------------------------------------------------------------------

    def reset(self, table: SlotTable) -> None:
        """Start with an empty table and the smallest bucket of positions; keep such a cache."""
        num_slots, self.table = len(table), table
        held, [num_positions, *_] = self._cache, self._runner.position_sizes(num_slots)
        if held is None or (held.num_slots, held.num_positions) != (num_slots, num_positions):
            self._cache = held = None  # free it before there is another
            self._cache = self._runner.empty_cache(num_slots, num_positions)
        self._pending, self._waits = self._runner.empty_pending(num_slots), False
        self._slots = None

    def drop(self) -> None:
        """Forget the cache: a step that failed may have consumed it."""
        self._cache = self._pending = None

    def fit(self, num_requests: int, wanted_later: Collection[Prompt]) -> None:
        """Halve the rows while all requests fit into half of them; double them while they do not.

        Rows grow only where requests come while a rollout runs. They stay while one lacks
        something: fewer sizes of rounds have chunks.
        """
        config, table = self._runner.config, self.table
        while config.slot_bucket(num_requests) < len(table) and not table.lacking():
            half = config.slot_bucket(-(-len(table) // 2))
            order = table.most_useful(wanted_later)[:half]
            self._take_rows(order)
            table.keep(order)
        while config.slot_bucket(num_requests) > len(table):
            more = config.slot_bucket(len(table) + 1)
            rows = [*range(len(table)), *[0] * (more - len(table))]
            self._take_rows(rows)
            table.widen(more)

    def grow(self, num_positions: int) -> None:
        """Take the next bucket of positions until `num_positions` fit."""
        while self.num_positions < num_positions:
            sizes = self._runner.position_sizes(len(self.table))
            larger = next(s for s in sizes if s > self.num_positions)
            self._cache = self._resized(self._held, range(len(self.table)), larger)

    def _take_rows(self, rows: Sequence[int]) -> None:
        [least, *_] = self._runner.position_sizes(len(rows))
        self._cache = self._resized(self.cache, rows, max(self.num_positions, least))
        self._pending = self._runner.empty_pending(len(rows))

    def _resized(
        self, cache: kv_cache.KVCache, rows: Sequence[int], num_positions: int
    ) -> kv_cache.KVCache:
        self._runner.before_positions(num_positions)
        index = self._runner.put(np.asarray(rows, np.int32))
        self._slots = None
        return self._runner.in_turn(cache_rows.resize(cache, index, num_positions))

    def wait_in_turn(self) -> None:
        """Let what moves rows end before programs on other arrays begin, where that is needed."""
        self._runner.in_turn(self._cache)
