"""Which waiting requests enter which free rows, and where their prompts come from.

Pure host logic. A row keeps the keys and values of its prompt after its request
has ended, until another prompt is written over them; siblings that come later
copy from any row that holds their prompt. So a group's prompt is computed
once as long as its requests are admitted in order.

Prompts are compared by number: hashing thousands of tokens of every row in every round takes
longer than a round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rl.trajectory import Prompt

Held = Sequence[int | None]  # by row: the prompt that its cache holds whole, busy or free


class PromptNumbers:
    """The numbers of a rollout's prompts, in the order in which they appear."""

    def __init__(self) -> None:
        self._numbers: dict[Prompt, int] = {}

    def of(self, prompt: Prompt) -> int:
        """Return the prompt's number; this hashes all of it."""
        return self._numbers.setdefault(prompt, len(self._numbers))


def assign(
    prompts: Sequence[int],
    free_rows: Sequence[int],
    held: Held,
    wanted_later: Collection[int] = (),
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


def fills(
    lacking: Mapping[int, int], held: Held, parts: Sequence[int], is_busy: Sequence[bool]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the copies to make, (from row, to row), and the rows to compute something of.

    `lacking` has the rows that lack something, in order of admission, and their prompts; `parts`
    has each row's part of the mesh. A row copies its prompt from one that holds it, best from a
    busy one of its own part, or waits if a row before computes it. No row is both read and written.
    """
    holders = dict[tuple[int, int | None], int]()  # by part and prompt; −1: any part
    for row in sorted(range(len(held)), key=lambda r: is_busy[r]):
        holders[-1, held[row]] = holders[parts[row], held[row]] = row
    copies, computed, begun = [], [], set[int]()
    for row, prompt in lacking.items():
        source = holders.get((parts[row], prompt), holders.get((-1, prompt)))
        if held[row] is not None:
            computed.append(row)  # tokens behind the prompt
        elif source is not None:
            copies.append((source, row))
        elif prompt not in begun:
            begun.add(prompt)
            computed.append(row)
    return copies, computed
