"""Which waiting requests enter which free rows of a cache in pages, by what they would need.

Pure host logic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rl.engine import preemption
from rl.engine.slot_table import SlotTable
from rl.trajectory import PartialRequest
from spec.page_table import PageTable


def assign(
    waiting: Sequence[PartialRequest],
    table: SlotTable,
    pages: PageTable,
    fetch_tokens: int,
    wanted_later: Collection[int],
) -> list[int]:
    """Return a free row for each of the first waiting requests, for as many as have pages.

    It is one that holds the prompt, if there is one. Rows that hold one of `wanted_later` (numbers
    of prompts still to come) are given to others last.
    """
    rows, busy = list[int](), np.nonzero(table.busy_B)[0].tolist()
    room, common = _room(table, pages, fetch_tokens, busy), _Common(pages, table, busy)
    free = sorted(table.free_rows(), key=lambda r: (table.prompts[r] in wanted_later, r))
    for p in waiting[: len(free)]:
        number = table.numbers.of(p.request.prompt_ids)
        needed = pages.pages_for(preemption.needed_by(p, table, fetch_tokens))
        holders = [r for r in free if table.prompts[r] == number and p.kv is None]
        first = {pages.part_of(r): r for r in reversed(free) if r not in holders}  # by part
        left = {
            row: room[pages.part_of(row)] - needed + common.num_pages(p, number, row)
            for row in (*first.values(), *holders)
        }
        row = max(left, key=lambda r: (left[r] >= 0, r in holders, left[r], -free.index(r)))
        if left[row] < 0 and (rows or table.num_busy):
            break
        room[pages.part_of(row)] = left[row]
        common.add(p, number, row)
        free.remove(row)
        rows.append(row)
    return rows


def _room(table: SlotTable, pages: PageTable, fetch_tokens: int, busy: Sequence[int]) -> list[int]:
    """Return the pages of each part that busy rows will not need before the next fetch."""
    needed_B, used_P = preemption.needed_B(table, fetch_tokens), pages.used_by(busy)
    room = [len(some) - int(some.sum()) for some in np.split(used_P, pages.ways)]
    for row in busy:
        more = pages.pages_for(int(needed_B[row])) - int(pages.held_B[row])
        room[pages.part_of(row)] -= max(0, more)
    return room


class _Common:
    """The pages that a waiting request would have in common with those that have a row."""

    def __init__(self, pages: PageTable, table: SlotTable, busy: Sequence[int]) -> None:
        self._pages, self._table, self._used_P = pages, table, pages.used_by(busy)
        key = {row: (pages.part_of(row), int(table.prompt_B[row])) for row in busy}
        self._asked = set(key.values())  # also by rows that lack it as yet
        self._held = {key[row] for row in busy if table.prompts[row] is not None}

    def num_pages(self, p: PartialRequest, number: int, row: int) -> int:
        """Return how many of its pages in this row others have too, with this prompt."""
        key, prompt_tokens = (self._pages.part_of(row), number), len(p.request.prompt_ids) - 1
        full = prompt_tokens // self._pages.page_tokens
        if p.kv is not None:
            return full if key in self._held else 0
        if self._table.prompts[row] == number:  # it keeps those that the row has
            return int(self._used_P[self._pages.pages_of(row, prompt_tokens)].sum())
        return full if key in self._asked else 0

    def add(self, p: PartialRequest, number: int, row: int) -> None:
        """Note that it gets this row."""
        key = self._pages.part_of(row), number
        keeps = p.kv is None and self._table.prompts[row] == number
        self._asked.add(key)
        if p.kv is not None or keeps:
            self._held.add(key)
        if keeps:
            kept = self._pages.pages_of(row, len(p.request.prompt_ids) - 1)
            self._used_P[kept] = True
