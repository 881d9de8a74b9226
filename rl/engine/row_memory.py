"""The cache of worker slots as rows of one length, which may grow with the longest request."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import numpy as np

from reprise.models import kv_cache
from reprise.models.kv_cache import resize
from reprise.rl.engine import admission
from reprise.rl.engine.model_runner import ModelRunner
from reprise.rl.engine.slot_table import SlotTable
from reprise.rl.records.trajectory import HostKv, PartialRequest


class RowMemory:
    """Rows in a bucket of (slots, positions); a change of the bucket copies all rows.

    `PageMemory` documents the methods.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.cache: kv_cache.KVCache | None = None

    @property
    def held(self) -> kv_cache.KVCache:
        assert self.cache is not None
        return self.cache

    def reset(self, num_slots: int) -> None:
        """Start in the smallest bucket of positions; keep a cache of that size."""
        [num_positions, *_] = self._runner.round_positions(num_slots)
        held = self.cache
        if held is None or (held.num_slots, held.num_positions) != (num_slots, num_positions):
            self.cache = held = None  # free the old cache before the allocation
            cache = self._runner.empty_cache(num_slots, num_positions)
            assert isinstance(cache, kv_cache.KVCache)
            self.cache = cache

    def assign(
        self,
        waiting: Sequence[PartialRequest],
        table: SlotTable,
        fetch_tokens: int,
        wanted_later: Collection[int],
    ) -> list[int]:
        """Return free rows for the first waiting requests, one row for each that can run."""
        free = table.free_rows()
        waiting = waiting[: len(free)]
        if table.keeps_responses:
            return admission.assign_continued(waiting, table)
        new = [table.known_prompts.of(p.request).number for p in waiting if p.kv is None]
        rows = admission.assign(new, free, table.prompts, wanted_later)
        left, assigned = iter(sorted(set(free).difference(rows))), iter(rows)
        return [next(assigned if p.kv is None else left) for p in waiting]

    def make_room(
        self, table: SlotTable, fetch_tokens: int, wanted_later: Collection[int]
    ) -> list[int]:
        """Return the rows that must leave before the next fetch; always empty, since rows grow."""
        return []

    def room_for(
        self,
        requests: Sequence[PartialRequest],
        brought: Sequence[tuple[HostKv, int]],
        table: SlotTable,
    ) -> None:
        """Make room for requests that have entered, with or without keys and values."""
        lengths = [len(p.request.prompt_ids) + p.num_tokens for p in requests if p.kv is None]
        lengths += [kv.num_tokens for kv, _ in brought]
        lengths += table.known_tokens_B[table.busy_B].tolist()
        self.reserve(np.asarray(lengths) + 1)

    def reserve(self, tokens_B: np.ndarray, least_positions: int = 0) -> None:
        """Grow rows, bucket by bucket, until each has room for `tokens_B` positions."""
        num_slots, high = self.held.num_slots, int(tokens_B.max(initial=least_positions))
        while self.held.num_positions < high:
            sizes = self._runner.round_positions(num_slots)
            larger = next(s for s in sizes if s > self.held.num_positions)
            self._resize(range(num_slots), larger)

    def begin(self, row: int, kept_tokens: int) -> None:
        """Record that a request enters a row; its first `kept_tokens` positions stay."""

    def unshared(self, row: int, num_tokens: int) -> int:
        """Return how many leading tokens of a row can stay if later tokens are written."""
        return num_tokens

    def parts(self, num_rows: int) -> Sequence[int]:
        """Return the part of the mesh of each row; 0, since copies between parts cost no more."""
        return [0] * num_rows

    def has_room(self, row: int) -> bool:
        """Return whether a row can compute its missing tokens now."""
        return True

    def books(self, table: SlotTable) -> str:
        """Describe the row length and the missing tokens for error messages."""
        return f"rows of {self.held.num_positions} positions, lacking {table.lacking()}"

    def chunk_start(self, row: int, start: int, chunk_tokens: int) -> int:
        """Return the first position of a chunk, `start` or less so that it fits into the row."""
        return min(start, self.held.num_positions - chunk_tokens)

    def share(self, copies: Sequence[tuple[int, int]], table: SlotTable) -> list[int]:
        """Copy prompts, (from row, to row); return the rows that received a prompt."""
        rows = [row for _, row in copies]
        num_tokens = int(table.prompt_tokens_B[rows].max())
        self.cache = self._runner.copy_rows(self.held, copies, num_tokens)
        return rows

    def insert(self, entering: Sequence[tuple[HostKv, int]]) -> None:
        """Write keys and values from the host to the starts of rows, which have room."""
        self.cache = self._runner.insert_kv(self.held, entering)

    def read(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[HostKv]:
        """Return keys and values of the first `num_tokens` tokens of rows, on the host."""
        return self._runner.read_kv(self.held, rows, num_tokens)

    def copy_states(self, row: int, num_tokens: int) -> list[tuple[int, jax.Array]]:
        """Return device copies of the hidden states of the first tokens of a row."""
        return self._runner.copy_states(self.held, row, num_tokens)

    def kept_rows(
        self, table: SlotTable, useful: Sequence[int], num_slots: int
    ) -> list[int] | None:
        """Return the rows to keep in a smaller batch; None if the batch cannot shrink yet."""
        return list(useful[:num_slots])

    def widened(self, num_rows: int, num_slots: int) -> list[int]:
        """Return the old index of each row of a larger batch; rows from `num_rows` on are new."""
        return list(range(num_slots))

    def take_rows(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i; an index past the old rows makes a new row."""
        [low, *_] = self._runner.round_positions(len(rows))
        before = self.held.num_slots
        self._resize([r if r < before else 0 for r in rows], max(self.held.num_positions, low))

    def _resize(self, rows: Sequence[int], num_positions: int) -> None:
        self._runner.before_positions(num_positions)
        index = self._runner.put(np.asarray(rows, np.int32))
        self.cache = self._runner.in_turn(resize(self.held, index, num_positions))
