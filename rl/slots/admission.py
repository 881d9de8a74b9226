"""Admission: which requests enter which rows, how rows are filled, and which rows leave.

Pure host logic. A row keeps the keys and values of its prompt after its request has finished, until
another prompt overwrites them, so later siblings can copy the prompt from any row that holds it.
A group prompt is thus computed once if the requests of the group are admitted in order.

With a budget of positions, a row needs its tokens plus the most that the next fetch can add, up to
the limit of its request, and all tokens of a cached response that it verifies in chunks:

    needed = min(tokens + most that a fetch adds, most tokens of the request)

Schedulers that reserve whole chunks keep the sum within the budget. Without such a scheduler,
requests wait until they fit, and the newest rows are preempted once older rows have grown.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from reprise.rl.records.trajectory import PartialRequest
from reprise.rl.slots.slot_table import Prompts, SlotTable
from reprise.spec.page_table import PageTable

Held = Sequence[int | None]  # by row, busy or free: the prompt that its cache holds in full


class WaitingQueue:
    """Requests without a row. `partial`, served before `new`, has chunks and preempted requests."""

    def __init__(self, prompts: Prompts) -> None:
        self._known = prompts
        self.new: collections.deque[PartialRequest] = collections.deque()
        self.partial: collections.deque[PartialRequest] = collections.deque()
        self._prompts: collections.Counter[int] = collections.Counter()  # of `new`, by number
        # prompt numbers of `new`; rows that hold these prompts are overwritten last
        self.prompts: Collection[int] = self._prompts.keys()

    def __len__(self) -> int:
        return len(self.new) + len(self.partial)

    def add(self, requests: Sequence[PartialRequest], *, is_new: bool = False) -> None:
        """Queue requests for one chunk of tokens each, or new requests for whole responses."""
        queue = self.new if is_new else self.partial
        for p in requests:
            number, prompt, _ = self._known.of(p.request)
            if prompt is not p.request.prompt_ids:  # equal prompts are one object: hashed once
                request = dataclasses.replace(p.request, prompt_ids=prompt)
                p = dataclasses.replace(p, request=request)
            queue.append(p)
            if is_new:
                self._prompts[number] += 1

    def take_partial(self) -> list[PartialRequest]:
        """Remove and return all partial requests."""
        taken = list(self.partial)
        self.partial.clear()
        return taken

    def drop(self, request_ids: Collection[int]) -> None:
        """Remove the partial requests with these ids."""
        left = [p for p in self.partial if p.request.request_id not in request_ids]
        self.partial = collections.deque(left)

    def first(self, best: int) -> list[PartialRequest]:
        """Return the next requests, at most `best`."""
        return list(itertools.islice(self.partial or self.new, best))

    def take(self, count: int) -> list[PartialRequest]:
        """Remove and return the first `count` requests that `first` returns."""
        queue = self.partial or self.new
        taken = [queue.popleft() for _ in range(count)]
        for p in taken if queue is self.new else ():
            number, *_ = self._known.of(p.request)
            self._prompts[number] -= 1
            if not self._prompts[number]:
                del self._prompts[number]
        return taken


# --- rows -------------------------------------------------------------------------------


def fills(
    lacking: Mapping[int, int], held: Held, parts: Sequence[int], is_busy: np.ndarray
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the copies to make, (from row, to row), and the rows to compute tokens of.

    `lacking` maps rows that lack tokens to their prompts, in order of admission; `parts` are the
    parts of the mesh that rows are in. A row copies its prompt from a row that holds it, preferably
    a busy row of the same part, or waits if an earlier row computes the prompt. No row is both read
    and written.
    """
    holders = dict[tuple[int, int | None], int]()  # by part and prompt; −1: any part
    for row in np.argsort(is_busy, kind="stable").tolist():
        holders[-1, held[row]] = holders[parts[row], held[row]] = row
    copies = []
    computed = []
    started = set[int]()
    for row, prompt in lacking.items():
        source = holders.get((parts[row], prompt), holders.get((-1, prompt)))
        if held[row] is not None:
            computed.append(row)  # lacks tokens after the prompt
        elif source is not None:
            copies.append((source, row))
        elif prompt not in started:
            started.add(prompt)
            computed.append(row)
    return copies, computed


# --- positions --------------------------------------------------------------------------


def needed_B(table: SlotTable, fetch_tokens: int) -> np.ndarray:
    """Return the positions that each row needs until the next fetch; 0 for free rows."""
    final_B = table.prompt_tokens_B + table.limit_B
    needed_B = np.minimum(table.total_tokens_B + fetch_tokens, final_B)
    if table.verifies_in_chunks:
        needed_B = np.maximum(needed_B, table.known_tokens_B + 1)
    return np.where(table.busy_B, needed_B, 0)


def needed_by(waiting: PartialRequest, table: SlotTable, fetch_tokens: int) -> int:
    """Return the positions that a waiting request would need until the next fetch."""
    left = waiting.request.limit(table.endings.sampling) - waiting.num_tokens
    if waiting.max_tokens is not None:
        left = min(left, waiting.max_tokens)
    gained = fetch_tokens
    if table.cached is not None:
        gained = max(gained, table.cached.most_gained(waiting))
    return len(waiting.request.prompt_ids) + waiting.num_tokens + min(gained, left)


def num_fitting(
    waiting: Iterable[PartialRequest], table: SlotTable, fetch_tokens: int, budget: int
) -> int:
    """Return how many waiting requests, in order, fit; at least one if no row is busy."""
    held = int(needed_B(table, fetch_tokens).sum())
    count = 0
    for p in waiting:
        held += needed_by(p, table, fetch_tokens)
        if held > budget and (count or table.num_busy):
            break
        count += 1
    return count


def rows_to_preempt(table: SlotTable, fetch_tokens: int, budget: int) -> list[int]:
    """Return the newest rows that must leave so that the rest fit; the oldest row always stays."""
    needed = needed_B(table, fetch_tokens)
    excess = int(needed.sum()) - budget
    rows = list[int]()
    newest_first = reversed(table.oldest_first()[1:]) if excess > 0 else ()
    for row in newest_first:
        if excess > 0:
            rows.append(row)
            excess -= int(needed[row])
    return rows


# --- pages ------------------------------------------------------------------------------


def assign(
    waiting: Sequence[PartialRequest],
    table: SlotTable,
    pages: PageTable,
    fetch_tokens: int,
    wanted_later: Collection[int],
) -> list[int]:
    """Return free rows for the first waiting requests, up to the first request without pages.

    A row that holds the prompt is preferred. Rows that another of these requests would reuse, then
    rows that hold one of `wanted_later` (prompt numbers of later requests), are given to other
    prompts last. Of equal rows, the row with the oldest last request is taken.
    """
    rows = list[int]()
    busy = np.nonzero(table.busy_B)[0].tolist()
    most_B = -(-needed_B(table, fetch_tokens) // pages.page_tokens)  # pages until the next fetch
    more_B = np.maximum(most_B - pages.held_B, 0)
    room = [len(some) - int(some.sum()) for some in np.split(pages.used_by(busy), pages.ways)]
    for row in busy:
        room[pages.part_B[row]] -= int(more_B[row])
    common = _Common(pages, table, busy)
    free = table.free_rows()
    waiting = waiting[: len(free)]
    reusable = list[dict[int, int]]()  # prompt tokens of each request that rows hold
    claimed = set[int]()  # rows that the requests would reuse, at most one for each
    for p in waiting:
        tokens_R = table.reusable_tokens(p.request, free).tolist() if p.kv is None else ()
        held = dict(zip(free, tokens_R, strict=p.kv is None))
        reusable.append(held)
        claimed.update([r for r in _most(held, free) if r not in claimed][:1])
    free.sort(key=lambda r: (r in claimed, table.prompts[r] in wanted_later, table.entered_B[r]))
    for p, held in zip(waiting, reusable, strict=True):
        number = table.known_prompts.of(p.request).number
        needed = pages.pages_for(needed_by(p, table, fetch_tokens))
        holders = _most(held, free)
        first = {pages.part_B[r]: r for r in reversed(free) if r not in holders}  # by part
        left = {
            row: room[pages.part_B[row]] - needed + common.num_pages(p, number, row, held.get(row))
            for row in (*first.values(), *holders)
        }
        row = max(left, key=lambda r: (left[r] >= 0, r in holders, left[r], -free.index(r)))
        if left[row] < 0 and (rows or busy):
            break
        room[pages.part_B[row]] = left[row]
        common.add(p, number, row, held.get(row))
        free.remove(row)
        rows.append(row)
    return rows


def _most(held: Mapping[int, int], free: Sequence[int]) -> list[int]:
    """Return the free rows that hold the most tokens, if any."""
    best = max([held.get(row, 0) for row in free], default=0)
    return [row for row in free if held.get(row, 0) == best > 0]


class _Common:
    """The pages that a waiting request would share with requests that have a row."""

    def __init__(self, pages: PageTable, table: SlotTable, busy: Sequence[int]) -> None:
        self._pages = pages
        self._used_P = pages.used_by(busy)
        key = {row: (pages.part_B[row], int(table.prompt_B[row])) for row in busy}
        self._wanted = set(key.values())  # also by rows that still lack the prompt
        self._held = {key[row] for row in busy if table.prompts[row] is not None}

    def num_pages(self, p: PartialRequest, number: int, row: int, reused: int | None) -> int:
        """Return how many pages request `p`, with this prompt, would share in this row.

        The row holds `reused` tokens of the prompt.
        """
        key = (self._pages.part_B[row], number)
        full = (len(p.request.prompt_ids) - 1) // self._pages.page_tokens
        if p.kv is not None:
            return full if key in self._held else 0
        if reused:
            return int(self._used_P[self._pages.pages_of(row, reused)].sum())
        return full if key in self._wanted else 0

    def add(self, p: PartialRequest, number: int, row: int, reused: int | None) -> None:
        """Record that request `p` was assigned to `row`, which holds `reused` of its tokens."""
        key = (self._pages.part_B[row], number)
        self._wanted.add(key)
        if p.kv is not None or reused == len(p.request.prompt_ids) - 1 > 0:
            self._held.add(key)
        if reused:
            self._used_P[self._pages.pages_of(row, reused)] = True
