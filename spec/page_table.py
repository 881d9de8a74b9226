"""The pages of each slot in a paged cache: reserved, shared by reference counts, released.

Pure host logic. Slots with the same first tokens may share pages, which are then read-only; a slot
that diverges inside a page gets a copy of the page. On a mesh, slots and pages are split into one
part per way of the batch axes, and a slot has pages of its part.

B slots, N pages of a slot at most, P pages, T positions of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_PAGE = -1


def spread(num_slots: int, slot_pages: int, num_pages: int, ways: int) -> np.ndarray:
    """Return a full table for timing programs; the pages of a part repeat over its slots."""
    slots = num_slots // ways
    each = num_pages // ways
    local_BN = np.arange(slots * slot_pages).reshape(slots, slot_pages) % each
    parts = [local_BN + part * each for part in range(ways)]
    return np.concatenate(parts).astype(np.int32)


def _parts(num_slots: int, ways: int) -> list[int]:
    """Return the part of the mesh that each slot is in."""
    return [slot * ways // num_slots for slot in range(num_slots)]


class PageTable:
    """The tables of B slots over P pages of T positions, in `ways` equal parts."""

    def __init__(
        self, num_slots: int, slot_pages: int, num_pages: int, page_tokens: int, ways: int = 1
    ) -> None:
        assert num_pages % ways == 0 and num_slots % ways == 0, (num_slots, num_pages, ways)
        self.page_tokens = page_tokens
        self.ways = ways
        self.pages_BN = np.full((num_slots, slot_pages), NO_PAGE, np.int32)
        self.held_B = np.zeros(num_slots, np.int64)  # number of pages of each slot
        self.users_P = np.zeros(num_pages, np.int64)  # number of slots that use each page
        self.part_B = _parts(num_slots, ways)
        self.has_changed = True  # since its user last cleared this
        each = num_pages // ways
        self._free = [list(range((w + 1) * each - 1, w * each - 1, -1)) for w in range(ways)]

    def __len__(self) -> int:
        return len(self.pages_BN)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def num_free(self, part: int) -> int:
        return len(self._free[part])

    def pages_of(self, slot: int, num_tokens: int) -> np.ndarray:
        """Return the pages that hold the first `num_tokens` tokens of a slot."""
        count = self.pages_for(num_tokens)
        assert count <= self.held_B[slot], (slot, num_tokens)
        return self.pages_BN[slot, :count]

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Reserve pages for `num_tokens` tokens; return False, unchanged, if too few are free."""
        held = int(self.held_B[slot])
        needed = -(-num_tokens // self.page_tokens)
        assert needed <= self.pages_BN.shape[1], "more positions than a slot may have"
        if needed <= held:
            return True
        free = self._free[self.part_B[slot]]
        if needed - held > len(free):
            return False
        for n in range(held, needed):
            page = free.pop()
            self.pages_BN[slot, n] = page
            self.users_P[page] = 1
        self.held_B[slot] = needed
        self.has_changed = True
        return True

    def share(self, source: int, slot: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Give an empty slot the first `num_tokens` tokens of the slot `source`.

        Returns the pages to copy, (from, to): the last page unless it is full, and all pages if the
        slots are in different parts. Returns None, without a change, if too few pages are free.
        """
        assert self.held_B[slot] == 0 and source != slot, (source, slot)
        theirs = self.pages_of(source, num_tokens).tolist()
        full = num_tokens // self.page_tokens
        shared = full if self.part_B[source] == self.part_B[slot] else 0
        for n, page in enumerate(theirs[:shared]):
            self.pages_BN[slot, n] = page
            self.users_P[page] += 1
        self.held_B[slot] = shared
        self.has_changed = True
        if not self.reserve(slot, num_tokens):
            self.release(slot)
            return None
        own = self.pages_BN[slot, shared : len(theirs)].tolist()
        return list(zip(theirs[shared:], own, strict=True))

    def release(self, slot: int, kept_tokens: int = 0) -> None:
        """Release the pages of a slot after its first `kept_tokens` tokens."""
        held = int(self.held_B[slot])
        num_pages = -(-kept_tokens // self.page_tokens)
        if num_pages >= held:
            return
        for n in range(held - 1, num_pages - 1, -1):
            page = int(self.pages_BN[slot, n])
            self.pages_BN[slot, n] = NO_PAGE
            self.users_P[page] -= 1
            if not self.users_P[page]:
                self._free[page * self.ways // len(self.users_P)].append(page)
        self.held_B[slot] = num_pages
        self.has_changed = True

    def take_rows(self, rows: Sequence[int]) -> None:
        """Move the pages of slot `rows[i]` to slot i (−1: an empty slot); release other slots."""
        keep = set(rows)
        for slot in range(len(self)):
            if slot not in keep:
                self.release(slot)
        before = self.pages_BN
        held_B = self.held_B
        index = np.asarray(rows)
        self.pages_BN = np.where(index[:, None] < 0, NO_PAGE, before[np.maximum(index, 0)])
        self.held_B = np.where(index < 0, 0, held_B[np.maximum(index, 0)])
        self.part_B = _parts(len(index), self.ways)
        self.has_changed = True

    def used_by(self, slots: Sequence[int]) -> np.ndarray:
        """Return a mask of the pages that these slots use; bool [P]."""
        used_P = np.zeros(len(self.users_P), bool)
        for slot in slots:
            used_P[self.pages_BN[slot, : self.held_B[slot]]] = True
        return used_P
