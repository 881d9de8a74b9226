"""The pages of worker slots; a request holds pages for its tokens only.

Free rows keep the pages of their prompt until other rows need the pages. If pages run out, the
newest requests leave, wait, and are computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from reprise.models.attention import kv_cache
from reprise.models.attention.kv_cache import KVCache
from reprise.rl.records.trajectory import HostKv, PartialRequest
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots import admission
from reprise.rl.slots.slot_table import SlotTable
from reprise.spec.page_table import PageTable


class PageMemory:
    """The pages of a cache and their table."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.cache: KVCache | None = None
        self.pages = PageTable(0, 0, 0, runner.config.page_tokens)
        self._wanted_later: Collection[int] = ()
        self._shared = dict[int, int]()  # numbers of leading shared pages of entering rows
        self._ahead_tokens = 0  # of each row, reserved beyond its tokens

    @property
    def held(self) -> KVCache:
        assert self.cache is not None
        if self.pages.has_changed:
            table_BN = self._runner.argument(self.pages.pages_BN.copy())
            self.cache = dataclasses.replace(self.cache, table_BN=table_BN)
            self.pages.has_changed = False
        return self.cache

    def reset(self, num_slots: int, fetch_tokens: int = 1) -> None:
        """Start with no page in use; keep a cache of the same size.

        A row gains at most `fetch_tokens` between two calls of `make_room`.
        """
        runner = self._runner
        num_pages = runner.num_pages
        T = runner.config.page_tokens
        if self.cache is None or self.cache.values[0].shape[::2] != (num_pages, T):
            self.cache = None  # free the old cache before the allocation
            self.cache = runner.empty_cache(num_slots)
        self.pages = PageTable(num_slots, runner.slot_pages, num_pages, T, runner.batch_ways)
        # for how many more tokens rows reserve pages: for all if every slot can be full; the table
        # then changes once per request, and seldom travels to the device
        self._ahead_tokens = fetch_tokens if runner.config.pages else runner.longest_tokens

    # -- assignment and preemption -----------------------------------------------------

    def assign(
        self,
        waiting: Sequence[PartialRequest],
        table: SlotTable,
        wanted_later: Collection[int],
    ) -> list[int]:
        """Return free rows for the first waiting requests, up to the first request without pages.

        A single request always fits.
        """
        return admission.assign(waiting, table, self.pages, self._ahead_tokens, wanted_later)

    def make_room(self, table: SlotTable, wanted_later: Collection[int]) -> list[int]:
        """Reserve pages for busy rows until the next fetch; return the newest rows that must leave.

        Rows that wait for the prompt of a sibling get their pages with the prompt.
        """
        self._wanted_later = wanted_later
        pages = self.pages
        needed_B = admission.needed_B(table, self._ahead_tokens)
        holds_B = pages.held_B * pages.page_tokens  # tokens
        ended_B = ~table.busy_B & (holds_B >= table.retained_tokens_B + pages.page_tokens)
        for row in np.nonzero(ended_B)[0].tolist():
            pages.release(row, int(table.retained_tokens_B[row]))
        short_B = needed_B > holds_B
        if not short_B.any():  # as in most rounds
            return []
        oldest = table.oldest_first()
        leaving = list[int]()
        older = set[tuple[int, int]]()  # parts and prompts of rows that stay
        for row in oldest:
            if row in leaving:
                continue
            part = pages.part_B[row]
            number = int(table.prompt_B[row])
            waits = False  # for its prompt, from an older row or a row that holds it
            if not pages.held_B[row] and self._lacks_prompt(table, row):
                waits = (part, number) in older or bool(self._holders(table, part, number))
            while short_B[row] and not waits and not pages.reserve(row, int(needed_B[row])):
                if self._forget_prompt(table, part):
                    continue
                newest = next(r for r in reversed(oldest) if self._leaves(r, row, part, leaving))
                self.pages.release(newest)
                table.forget(newest)
                leaving.append(newest)
                if newest == row:
                    break
            if row not in leaving:
                older.add((part, number))
        return leaving

    def _leaves(self, row: int, needing: int, part: int, leaving: Sequence[int]) -> bool:
        holds = self.pages.held_B[row] > 0 or row == needing
        return holds and row not in leaving and self.pages.part_B[row] == part

    @staticmethod
    def _lacks_prompt(table: SlotTable, row: int) -> bool:
        return bool(table.missing_tokens_B[row] > 0) and table.prompts[row] is None

    def _holders(self, table: SlotTable, part: int, number: int) -> list[int]:
        """Return the rows of a part that have pages and hold this prompt in full."""
        rows = [row for row, prompt in enumerate(table.prompts) if prompt == number]
        return [r for r in rows if self.pages.part_B[r] == part and self.pages.held_B[r]]

    def _forget_prompt(
        self, table: SlotTable, part: int, *, source: int = -1, last_resort: bool = False
    ) -> bool:
        """Release the prompt of a free row of this part except `source`; return False without one.

        The only copy of a prompt that rows without pages wait for is released as a last resort.
        """
        pages = self.pages
        missing = table.lacking()
        waited_for = {
            number
            for row, number in missing.items()
            if self._lacks_prompt(table, row) and not pages.held_B[row]
            if pages.part_B[row] == part
        }
        ranked = [
            (is_last, table.prompts[row] in self._wanted_later, row)
            for row in table.free_rows()
            if pages.held_B[row] and pages.part_B[row] == part and row != source
            for number in [table.prompts[row]]
            for is_last in [number in waited_for and len(self._holders(table, part, number)) == 1]
        ]
        is_last, _, row = min(ranked, default=(True, False, -1))
        if row < 0 or (is_last and not last_resort):
            return False
        self.pages.release(row)
        table.forget(row)
        return True

    # -- reserve, share, release -------------------------------------------------------

    def room_for(
        self,
        requests: Sequence[PartialRequest],
        brought: Sequence[tuple[HostKv, int]],
        table: SlotTable,
    ) -> None:
        """Reserve pages for incoming keys and values; `make_room` does so for other requests.

        The full pages of a prompt that another row of the part holds are shared, not written.
        """
        pages = self.pages
        self._shared = {}
        for kv, row in brought:
            part = pages.part_B[row]
            full = (int(table.prompt_tokens_B[row]) - 1) // pages.page_tokens
            holders = self._holders(table, part, int(table.prompt_B[row])) if full > 0 else []
            if holders:
                source = max(holders, key=lambda r: table.busy_B[r])
                pages.share(source, row, full * pages.page_tokens)
                self._shared[row] = full
            while not self.pages.reserve(row, kv.num_tokens):
                has_released = self._forget_prompt(table, part, last_resort=True)
                assert has_released, f"no pages for what row {row} brings: {self.books(table)}"

    def unshared(self, row: int, num_tokens: int) -> int:
        """Return how many leading tokens of a row can stay if later tokens are written.

        A page that also holds tokens of other rows is not written.
        """
        full, rest = divmod(num_tokens, self.pages.page_tokens)
        is_shared = rest and self.pages.users_P[self.pages.pages_BN[row, full]] > 1
        return num_tokens - rest if is_shared else num_tokens

    def books(self, table: SlotTable) -> str:
        """Describe current allocations for error messages."""
        pages = self.pages
        books = list[str]()
        for row in range(table.num_slots):
            state = f"lacks {table.missing_tokens_B[row]}" if table.busy_B[row] else "free"
            has = "has" if table.prompts[row] is not None else "has not"
            books.append(
                f"row {row} ({state}): {pages.held_B[row]} pages for {table.total_tokens_B[row]} "
                f"tokens, {has} prompt {table.prompt_B[row]}"
            )
        free = [pages.num_free(part) for part in range(pages.ways)]
        each = len(pages.users_P) // pages.ways
        return f"{free} of {each} pages of {pages.page_tokens} are free; {'; '.join(books)}"

    def share(self, copies: Sequence[tuple[int, int]], table: SlotTable) -> list[int]:
        """Share prompts, (from row, to row); return the rows that received a prompt."""
        result = list[int]()
        moved = list[tuple[int, int]]()
        oldest = next(iter(table.lacking()))
        for source, row in copies:
            if table.prompts[source] is None:
                continue  # the oldest row took its pages
            copied = self._share(source, row, table, row == oldest)
            if copied is not None:
                moved += copied
                result.append(row)
        cache = self.held
        table_BN = self.held.table_BN
        for places in _parts(moved, cache_ops.PAGES_AT_ONCE):
            source_X, target_X = (self._runner.put(x) for x in places)
            cache = cache_ops.copy_pages(_tableless(cache), source_X, target_X)
        self.cache = dataclasses.replace(cache, table_BN=table_BN)
        return result

    def _share(
        self, source: int, row: int, table: SlotTable, is_oldest: bool
    ) -> list[tuple[int, int]] | None:
        """Share a prompt and reserve pages for a row; return the pages to copy, None if too few."""
        self.pages.release(row)
        part = self.pages.part_B[row]
        needed = int(admission.needed_B(table, self._ahead_tokens)[row])
        while True:
            copied = self.pages.share(source, row, int(table.prompt_tokens_B[row]) - 1)
            if copied is not None and self.pages.reserve(row, needed):
                return copied
            self.pages.release(row)
            if not self._forget_prompt(table, part, source=source, last_resort=is_oldest):
                return None

    # -- transfers from and to the host ------------------------------------------------

    def insert(self, entering: Sequence[tuple[HostKv, int]]) -> None:
        """Write keys and values from the host to the starts of rows, but not to shared pages."""
        runner = self._runner
        table_BN = self.held.table_BN
        cache = _tableless(self.held)
        for kv, row in entering:
            pages = self.pages.pages_of(row, kv.num_tokens).tolist()
            for first in range(self._shared.get(row, 0), len(pages), cache_ops.PAGES_AT_ONCE):
                some = pages[first : first + cache_ops.PAGES_AT_ONCE]
                new = cache_ops.pages_of_host(kv, first, cache)
                new = kv_cache.map_arrays(runner.put_kv, new)
                cache = cache_ops.insert_pages(cache, new, runner.put(_padded(some)))
        self.cache = dataclasses.replace(cache, table_BN=table_BN)

    def read(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[HostKv]:
        """Return keys and values of the first `num_tokens` tokens of rows, on the host."""
        cache = _tableless(self.held)
        result = list[HostKv]()
        for row, tokens in zip(rows, num_tokens, strict=True):
            pages = self.pages.pages_of(row, tokens).tolist()
            parts = []
            for first in range(0, len(pages), cache_ops.PAGES_AT_ONCE):
                some = self._runner.put(_padded(pages[first : first + cache_ops.PAGES_AT_ONCE]))
                read = cache_ops.read_pages(cache, some)
                parts.append(jax.tree.map(self._runner.readable, read))
            result.append(cache_ops.host_of_pages(jax.device_get(parts), tokens))
        return result

    def copy_states(self, row: int, num_tokens: int) -> list[tuple[int, jax.Array]]:
        """Return device copies of the hidden states of the first tokens of a row."""
        [pages_P1TF] = self.held.features
        T = self.pages.page_tokens
        pages = self.pages.pages_of(row, num_tokens).tolist()
        size = max(1, cache_ops.STATE_COPY_TOKENS // T)
        return [
            (first * T, self._runner.readable(cache_ops.states_of_pages(pages_P1TF, some)))
            for first in range(0, len(pages), size)
            for some in [self._runner.put(_padded(pages[first : first + size], size))]
        ]

    # -- the batch ---------------------------------------------------------------------

    def kept_rows(
        self, table: SlotTable, useful: Sequence[int], num_slots: int
    ) -> list[int] | None:
        """Return the rows to keep in a smaller batch, by part; None if the batch cannot shrink."""
        ways = self.pages.ways
        pages = self.pages
        by_part = [[r for r in useful if pages.part_B[r] == part] for part in range(ways)]
        each, more = divmod(num_slots, ways)
        if more or any(table.busy_B[rows[each:]].any() for rows in by_part):
            return None
        return [row for rows in by_part for row in rows[:each]]

    def widened(self, num_rows: int, num_slots: int) -> list[int]:
        """Return the old index of each row of a larger batch; rows from `num_rows` on are new."""
        ways = self.pages.ways
        new = iter(range(num_rows, num_slots))
        each = num_rows // ways
        more = (num_slots - num_rows) // ways
        rows = list[int]()
        for part in range(ways):
            rows += [*range(part * each, (part + 1) * each), *(next(new) for _ in range(more))]
        return rows

    def take_rows(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i; an index past the old rows makes a new row."""
        self.pages.take_rows([r if r < len(self.pages) else -1 for r in rows])


def _tableless(cache: KVCache) -> KVCache:
    """Return the cache without its table, so that programs do not depend on the number of slots."""
    return dataclasses.replace(cache, table_BN=None)


def _padded(pages: Sequence[int], size: int = cache_ops.PAGES_AT_ONCE) -> np.ndarray:
    result = np.full(size, -1, np.int32)
    result[: len(pages)] = pages
    return result


def _parts(moved: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield padded (sources, targets) in batches of `size`."""
    for first in range(0, len(moved), size):
        sources, targets = zip(*moved[first : first + size], strict=True)
        yield _padded(sources, size), _padded(targets, size)
