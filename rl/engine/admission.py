"""Which waiting requests enter which free rows, and where their prompts come from.

Pure host logic. A row keeps the keys and values of its prompt after its request
has ended, until another prompt is written over them; siblings that come later
copy from any row that holds their prompt. So a group's prompt is computed
once as long as its requests are admitted in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rl.trajectory import Prompt

Held = Sequence[Prompt | None]  # by row: the prompt that its cache holds whole, busy or free


def assign(
    prompts: Sequence[Prompt],
    free_rows: Sequence[int],
    held: Held,
    wanted_later: Collection[Prompt] = (),
) -> list[int]:
    """Return a free row for each of `prompts` (of waiting requests, in order).

    It is one that holds the prompt, where there is one. Rows that hold one of `wanted_later`
    (prompts still to come) are given to others last.
    """
    assert len(prompts) <= len(free_rows), "more requests than free rows"
    wanted = set(prompts)
    free = sorted(free_rows, key=lambda r: (held[r] in wanted, held[r] in wanted_later, r))
    rows = dict[int, int]()  # by request
    for i, prompt in enumerate(prompts):
        if (row := next((r for r in free if held[r] == prompt), None)) is not None:
            free.remove(row)
            rows[i] = row
    return [rows[i] if i in rows else free.pop(0) for i in range(len(prompts))]


def fills(lacking: Mapping[int, Prompt], held: Held) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the copies to make, (from row, to row), and the rows to compute something of.

    `lacking` has the rows that lack something, in order of admission, and their prompts. A row
    copies its prompt from one that holds it, or waits where it is computed for a row before.
    No row is both read and written.
    """
    holders = {prompt: row for row, prompt in enumerate(held) if prompt is not None}
    copies, computed, begun = [], [], set[Prompt]()
    for row, prompt in lacking.items():
        if held[row] is not None:
            computed.append(row)  # tokens behind the prompt
        elif prompt in holders:
            copies.append((holders[prompt], row))
        elif prompt not in begun:
            begun.add(prompt)
            computed.append(row)
    return copies, computed
