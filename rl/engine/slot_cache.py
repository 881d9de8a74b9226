"""The rows of a phase: the host's table of them, the device's cache, and what moves both.

The host's table is the truth about every slot; the device holds the cache and a copy of
the table, made anew when the host has changed it. Sizes come from a pool of buckets
(slots and positions: powers of two), each compiled once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import numpy as np

from models import kv_cache, transformer
from rl.engine import admission, cache_ops
from rl.engine.model_runner import ModelRunner
from rl.engine.prefix_verification import VerifiedRequest
from rl.engine.slot_table import SlotTable
from rl.trajectory import PartialRequest, Request, RequestChunk
from spec import cache_rows
from spec.config import SamplingConfig
from spec.eagle.batch import HiddenStates, HiddenStateSink
from spec.verify import Slots


class SlotCache:
    """A table and its cache; one of them lives as long as its engine and keeps its buffers."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.table = SlotTable(0, 0)
        self._cache: kv_cache.KVCache | None = None
        self._slots: Slots | None = None  # None: the host has changed the table
        self._position_sizes: list[int] = []

    def __len__(self) -> int:
        return len(self.table)

    @property
    def cache(self) -> kv_cache.KVCache:
        assert self._cache is not None
        return self._cache

    @property
    def allocated(self) -> bool:
        return self._cache is not None

    @property
    def num_positions(self) -> int:
        return self.cache.num_positions

    def stepped(self, cache: kv_cache.KVCache, slots: Slots) -> None:
        """A step consumed cache and slots, and gave these for them."""
        self._cache, self._slots = cache, slots

    def changed(self) -> None:
        """The host has changed the table."""
        self._slots = None

    def slots(self, sampling: SamplingConfig, key: jax.Array) -> Slots:
        """The device's copy of the table."""
        if self._slots is None:
            columns = self.table.device_columns(sampling.top_k)
            arguments = self._runner.slot_arguments(columns, sampling, key, self.table.tokens_BL)
            self._slots = cache_ops.make_slots(*arguments)
        return self._slots

    # -- who enters ----------------------------------------------------------------

    def enter_prompts(
        self,
        params: transformer.Params,
        requests: Sequence[Request],
        default_limit: int,
        wanted_later: Collection[admission.Prompt],
    ) -> int:
        """Requests take free rows: prompts are computed, or copied; returns the tokens computed."""
        prompts = [r.prompt_ids for r in requests]
        rows, prefilled = self._fill(params, prompts, wanted_later)
        for request, row in zip(requests, rows, strict=True):
            self.table.enter(row, request, default_limit)
        return prefilled

    def enter_prefixes(
        self, packed: kv_cache.KVCache, entering: Sequence[VerifiedRequest], default_limit: int
    ) -> None:
        """Requests with a prefix take free rows: keys and values are gathered from its pass."""
        table = self.table
        self.grow(max(len(e.positions) + 1 for e in entering))
        index_BS = np.zeros((len(table), self.num_positions), np.int32)
        target_B = np.zeros(len(table), np.int32)
        for i, (e, row) in enumerate(zip(entering, table.free_rows(), strict=False)):
            index_BS[i, : len(e.positions)], target_B[i] = e.positions, row
            table.enter(row, e.request, default_limit, e.prefix, e.max_tokens)
        count = np.int32(len(entering))
        self._cache = cache_ops.gather_rows(self.cache, packed, index_BS, target_B, count)

    def enter_begun(
        self, params: transformer.Params, chunks: Sequence[RequestChunk], default_limit: int
    ) -> int:
        """Requests that may have begun elsewhere take free rows; returns the tokens computed anew.

        Where their keys and values came along they are written, else they are computed.
        """
        anew = [c for c in chunks if c.begun.kv is None]
        prefilled, entering = 0, []
        if anew:
            rows, prefilled = self._fill(params, [c.begun.token_ids for c in anew], ())
            for c, row in zip(anew, rows, strict=True):
                self._enter(row, c, default_limit)
        free = self.table.free_rows()
        for c in chunks:
            if c.begun.kv is not None:
                row = free.pop(0)
                entering.append((c.begun.kv, row))
                self._enter(row, c, default_limit)
        if entering:
            self.grow(max(kv.num_tokens for kv, _ in entering) + 1)
            self._cache = self._runner.insert_kv(self.cache, entering)
        return prefilled

    def _enter(self, row: int, chunk: RequestChunk, default_limit: int) -> None:
        begun = chunk.begun
        self.table.enter(row, begun.request, default_limit, begun.prefix, chunk.max_tokens)

    def _fill(
        self,
        params: transformer.Params,
        prompts: Sequence[admission.Prompt],
        wanted_later: Collection[admission.Prompt],
    ) -> tuple[tuple[int, ...], int]:
        self.grow(max(len(p) for p in prompts) + 1)
        plan = admission.plan(prompts, self.table.free_rows(), self.table.prompts, wanted_later)
        self._cache, prefilled = self._runner.fill_rows(params, self.cache, plan)
        return plan.rows, prefilled

    # -- who leaves ------------------------------------------------------------------

    def leave(self, rows: Sequence[int], policy_version: int) -> list[PartialRequest]:
        """Requests leave with the keys and values of their tokens but the last, on the host."""
        lengths = self.table.cached_tokens_B[np.asarray(rows)].tolist()
        kvs = self._runner.read_kv(self.cache, rows, lengths)
        return [
            PartialRequest(*self.table.leave(row, policy_version), kv)
            for row, kv in zip(rows, kvs, strict=True)
        ]

    def catch(self, rows: Sequence[int], sink: HiddenStateSink, policy_version: int) -> None:
        """Give responses that have ended to the catcher, with the hidden states of their rows."""
        table = self.table
        rows = [row for row in rows if sink.wants(int(table.total_tokens_B[row]))]
        lengths = table.cached_tokens_B[np.asarray(rows, np.int64)].tolist()
        found = self._runner.read_features(self.cache, rows, lengths)
        for row, hidden_TW in zip(rows, found, strict=True):
            tokens_T = table.tokens_BL[row, : len(hidden_TW) + 1].copy()
            prompt_tokens = int(table.prompt_tokens_B[row])
            sink.add(HiddenStates(tokens_T, prompt_tokens, hidden_TW, policy_version))

    # -- buckets -----------------------------------------------------------------------

    def reset(self, num_slots: int, longest_tokens: int) -> None:
        """An empty table for prompts and responses of so many tokens, over the first positions.

        The present cache is kept where it fits.
        """
        held, self._position_sizes = self._cache, self._runner.position_sizes(longest_tokens)
        num_positions = self._position_sizes[0]
        if held is None or (held.num_slots, held.num_positions) != (num_slots, num_positions):
            self._cache = held = None  # free it before there is another
            self._cache = self._runner.empty_cache(num_slots, num_positions)
        self.table = SlotTable(num_slots, longest_tokens + 1)  # a fetch may write one beyond
        self._slots = None

    def drop(self) -> None:
        """A step that failed may have consumed the cache."""
        self._cache = None

    def fit(self, num_requests: int, wanted_later: Collection[admission.Prompt]) -> None:
        """Halve the rows while what is left fits into half of them; double them while it does not.

        Rows grow only where requests come while a phase runs.
        """
        config, table = self._runner.config, self.table
        while config.slot_bucket(num_requests) < len(table):
            half = config.slot_bucket(-(-len(table) // 2))
            order = table.most_useful(wanted_later)[:half]
            self._resize(order, self.num_positions)
            table.keep(order)
        while config.slot_bucket(num_requests) > len(table):
            more = config.slot_bucket(len(table) + 1)
            rows = [*range(len(table)), *[0] * (more - len(table))]
            self._resize(rows, self.num_positions)
            table.widen(more)

    def grow(self, num_positions: int) -> None:
        """Take the next bucket of positions until `num_positions` fit."""
        while self.num_positions < num_positions:
            larger = next(s for s in self._position_sizes if s > self.num_positions)
            self._resize(range(len(self.table)), larger)

    def _resize(self, rows: Sequence[int], num_positions: int) -> None:
        index = jax.device_put(np.asarray(rows, np.int32))
        self._cache = cache_rows.resize(self.cache, index, num_positions)
        self._slots = None
