"""The cache of a drafter, with a row per request that is completed before each draft.

Entries are computed from request tokens (draft model), or from tokens and policy hidden states
(EAGLE), so that no entry moves with a request. Missing entries are computed in chunks.
B = rows of the cache, S = positions of the cache, A = requests that draft, P = chunks of a pass,
C = tokens of a chunk, W = tokens of a draft window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache.drafting import CHUNK_COLUMNS, END_COLUMNS, Drafting, Inputs, catch_up
from reprise.spec.draft_cache.rows import CachedRows, RowPages
from reprise.spec.drafter import Arguments, LiveSlots, Program
from reprise.spec.verification.sampling import noise_names


class Runner(Protocol):
    """The part of `rl.slot_memory.model_runner.ModelRunner` (worker devices) that drafters use."""

    dtype: Any
    model: ModelConfig
    config: Any  # with the slot buckets

    @property
    def num_pages(self) -> int: ...

    @property
    def slot_pages(self) -> int: ...

    @property
    def num_positions(self) -> int: ...

    @property
    def batch_ways(self) -> int: ...

    def cache_of(self, model: ModelConfig, num_slots: int) -> KVCache: ...

    def argument(self, x: np.ndarray) -> Any: ...

    def put(self, x: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class PassSizes:
    """Shapes of the passes that compute missing entries of rows.

    A draft computes the last `window_tokens` tokens of each row. Earlier tokens are computed in
    chunks of one of the `chunk_widths` (ascending), with about `pass_tokens` tokens per pass.
    """

    window_tokens: int
    chunk_widths: tuple[int, ...]
    pass_tokens: int = 512

    def shape(self, missing_tokens: int, num_rows: int, num_positions: int) -> tuple[int, int]:
        """Return (P, C) of a pass if a row lacks at most `missing_tokens` tokens."""
        widths = [min(w, num_positions) for w in self.chunk_widths]
        C = next((w for w in widths if w >= missing_tokens), widths[-1])
        return min(num_rows, max(1, self.pass_tokens // C)), C


class DraftCache:
    """The rows of one drafter on the host (`rows`) and on the device (`arrays`), one row per slot.

    `arrays` is None until the first draft, and after a failed step that consumed the arrays.
    """

    def __init__(
        self,
        model: ModelConfig,
        passes: PassSizes,
        drafting: Drafting,
        runner: Runner,
    ) -> None:
        window_tokens = min(passes.window_tokens, runner.config.page_tokens)
        self.passes = dataclasses.replace(passes, window_tokens=window_tokens)
        self.rows = CachedRows(0, 0)
        self.arrays: KVCache | None = None
        self._pages = RowPages(0, runner)
        self._model = model
        self.drafting = drafting
        self._runner = runner

    def follow(
        self, live: LiveSlots, some: LiveSlots, given: Inputs
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of some requests, complete except for a window, and their acceptance."""
        self._fit(live, self._runner.config.slot_bucket(len(live.tokens_BL)))
        rows_A, acceptance_A2 = self.rows.follow(some)
        self._pages.reserve(self.rows, rows_A, some.total_tokens_A)
        self.arrays = self._pages.on_device(self.arrays, self._runner)
        has_room_A = self.has_room(rows_A)
        if has_room_A.any():
            self._catch_up(some.take(np.nonzero(has_room_A)[0]), rows_A[has_room_A], given)
        return rows_A, acceptance_A2

    def has_room(self, rows_A: np.ndarray) -> np.ndarray:
        """Return which rows have pages for all entries of their requests; bool [A]."""
        return self._pages.has_room_B[rows_A]

    def taken(self) -> KVCache:
        """Return the arrays for a step that consumes them; the step result must replace them."""
        taken = self.arrays
        self.arrays = None
        assert taken is not None
        return taken

    def ends(
        self, live: LiveSlots, rows_A: np.ndarray, max_A: np.ndarray, sampling: SamplingConfig
    ) -> Any:
        """Return a table for `unpack_ends` to draft for these requests; other rows are idle."""
        W = self.passes.window_tokens
        first = self.drafting.first_token
        table_BX = np.zeros((len(self.rows), W + len(END_COLUMNS)), np.int32)
        start_A1 = np.maximum(live.total_tokens_A - W, first)[:, None]
        # if a row is shorter than the window, the columns after its tokens are never read
        columns_AW = np.minimum(start_A1 + np.arange(W), self.rows.tokens_BS.shape[1] - 1)
        table_BX[rows_A, :W] = self.rows.tokens_BS[rows_A[:, None], columns_AW]
        emitted_A = live.total_tokens_A - live.prompt_tokens_A
        names_A = noise_names(live.request_ids_A)
        ints = live.rows_A, live.total_tokens_A, emitted_A, names_A, max_A
        table_BX[rows_A, W:-3] = np.stack(ints, axis=1)
        table_BX[rows_A, -3:] = live.processing(sampling).view(np.int32)
        return self._runner.argument(table_BX)

    def complete(self, live: LiveSlots, missing_tokens: int = 0) -> None:
        """Record that the rows of these requests have all but the last `missing_tokens` entries."""
        rows_A, _ = self.rows.follow(live)
        known_A = np.maximum(live.total_tokens_A - missing_tokens, 0)
        self.rows.known_B[rows_A] = np.where(self.has_room(rows_A), known_A, 0)

    # -- programs ----------------------------------------------------------------------

    def empty(self, num_rows: int) -> KVCache:
        return self._runner.cache_of(self._model, num_rows)

    def empty_ends(self, num_rows: int) -> Any:
        """Return a table of idle rows for `unpack_ends`."""
        shape = num_rows, self.passes.window_tokens + len(END_COLUMNS)
        return self._runner.argument(np.zeros(shape, np.int32))

    def programs(self, num_rows: int, given: Callable[[], Inputs]) -> Iterator[Program]:
        """Yield the passes over chunks."""
        B = num_rows
        S = self._runner.num_positions
        for P, C in sorted({self.passes.shape(n, B, S) for n in self.passes.chunk_widths}):

            def chunks(P: int = P, C: int = C) -> Arguments:
                table_PX = self._runner.argument(_padding(P, C, B))
                return (given(), self.empty(B), table_PX), {"drafting": self.drafting}

            yield catch_up, chunks

    # -- sizes and chunks ----------------------------------------------------------------

    def _fit(self, live: LiveSlots, num_rows: int) -> None:
        """Resize the page table to `num_rows`; the pages stay in place."""
        tokens = self._runner.num_positions + self.drafting.first_token
        if self.arrays is None:
            self.rows = CachedRows(num_rows, tokens)
            self.arrays = self.empty(num_rows)
            self._pages = RowPages(num_rows, self._runner)
        elif len(self.rows) != num_rows:
            before = len(self.rows)
            self.rows, row_B = self.rows.resized(num_rows, tokens, live)
            self._pages.take_rows(self.rows, row_B[: min(before, num_rows)])

    def _catch_up(self, live: LiveSlots, rows_A: np.ndarray, given: Inputs) -> None:
        """Compute entries until no row lacks more than its window, longest gaps first."""
        held = self.rows
        passes = self.passes
        total_A = live.total_tokens_A
        while True:
            missing_A = total_A - held.known_B[rows_A] - passes.window_tokens
            max_missing = int(missing_A.max())
            if max_missing <= 0:
                return
            assert self.arrays is not None
            P, C = passes.shape(max_missing, len(held), self.arrays.num_positions)
            chunks_A = -(-np.maximum(missing_A, 0) // C)
            if not self.drafting.apart:
                chunks_A = np.minimum(chunks_A, 1)
            order_A = np.argsort(-missing_A, kind="stable")
            a_P = np.repeat(order_A, chunks_A[order_A])[:P]
            nth_P = np.concatenate([np.arange(n) for n in chunks_A[order_A]])[:P]
            rows_P = rows_A[a_P]
            total_P = total_A[a_P]
            start_P = np.minimum(held.known_B[rows_P] + C * nth_P, total_P - C)
            start_P = np.maximum(start_P, self.drafting.first_token)
            table_PX = _padding(P, C, len(held))
            columns = rows_P, live.rows_A[a_P], start_P
            tokens_PC = held.tokens_BS[rows_P[:, None], start_P[:, None] + np.arange(C)]
            table_PX[: len(a_P)] = np.concatenate([np.stack(columns, axis=1), tokens_PC], axis=1)
            self.arrays = catch_up(
                given, self.taken(), self._runner.argument(table_PX), drafting=self.drafting
            )
            np.maximum.at(held.known_B, rows_P, np.minimum(start_P + C, total_P))


def _padding(num_chunks: int, width: int, num_rows: int) -> np.ndarray:
    table_PX = np.zeros((num_chunks, len(CHUNK_COLUMNS) + width), np.int32)
    table_PX[:, 0] = num_rows
    return table_PX
