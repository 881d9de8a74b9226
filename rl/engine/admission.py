"""Which waiting requests enter which free rows, and where their prompts come from.

Pure host logic. A row keeps the keys and values of its prompt after its request
has ended, until another prompt is written over them; siblings that come later
copy from any row that still holds their prompt. So a group's prompt is computed
once as long as its requests are admitted in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from rl.trajectory import Prompt


@dataclasses.dataclass(frozen=True)
class AdmissionPlan:
    """`rows[i]` is the row of request i; where its prompt comes from is in one of the lists.

    `prefill` are prompts to compute; `inserts` (prefilled index, row) and `copies`
    (row, row) fill rows from them and from other rows. Rows in neither list hold
    their prompt already. Copies are safe in any order: no row is both read and
    written.
    """

    rows: tuple[int, ...]
    prefill: tuple[Prompt, ...]
    inserts: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]


def plan(
    prompts: Sequence[Prompt],
    free_rows: Sequence[int],
    held: Sequence[Prompt | None],
    wanted_later: Collection[Prompt] = (),
) -> AdmissionPlan:
    """Assign `prompts` (waiting requests, in order) to `free_rows`.

    `held[row]` is the prompt whose cache a row holds, whether busy or free;
    `wanted_later` are prompts still to come, whose rows are overwritten last.
    """
    assert len(prompts) <= len(free_rows), "more requests than free rows"
    wanted = set(prompts)
    free = sorted(free_rows, key=lambda r: (held[r] in wanted, held[r] in wanted_later, r))
    rows: list[int | None] = [None] * len(prompts)
    kept: dict[Prompt, int] = {}
    for i, prompt in enumerate(prompts):  # a free row that holds the prompt needs nothing
        row = next((r for r in free if held[r] == prompt), None)
        if row is not None:
            free.remove(row)
            rows[i], kept[prompt] = row, row
    busy = set(range(len(held))) - set(free_rows)
    for row in busy:
        theirs = held[row]
        if theirs is not None and theirs in wanted:
            kept.setdefault(theirs, row)
    prefill: dict[Prompt, int] = {}
    inserts, copies = [], []
    for i, prompt in enumerate(prompts):
        if rows[i] is not None:
            continue
        rows[i] = row = free.pop(0)
        if prompt in kept:
            copies.append((kept[prompt], row))
        else:
            inserts.append((prefill.setdefault(prompt, len(prefill)), row))
    assigned = tuple(r for r in rows if r is not None)
    return AdmissionPlan(assigned, tuple(prefill), tuple(inserts), tuple(copies))
