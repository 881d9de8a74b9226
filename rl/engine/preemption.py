"""Which rows an engine may hold where its keys and values have a budget: admission, preemption.

A row needs what it holds and what the next fetch can add, at most what its request may have:

    needed = min(tokens + most that a fetch adds, most tokens of the request)

and all of a cached response that it verifies in chunks.

Schedulers that reserve whole chunks never let the sum exceed the budget. Where none reserves,
requests wait until they fit, and the newest rows are preempted once the others have grown.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rl.engine.slot_table import SlotTable
from rl.trajectory import PartialRequest


def needed_B(table: SlotTable, fetch_tokens: int) -> np.ndarray:
    """Return the positions that each row needs until the next fetch; 0 for free rows."""
    final_B = table.prompt_tokens_B + table.limit_B
    needed_B = np.minimum(table.total_tokens_B + fetch_tokens, final_B)
    return np.where(table.busy_B, np.maximum(needed_B, table.known_tokens_B + 1), 0)


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
    waiting: Iterable[PartialRequest],
    table: SlotTable,
    fetch_tokens: int,
    budget: int,
) -> int:
    """Return how many waiting requests, in order, fit beside what runs; at least one alone."""
    held, count = int(needed_B(table, fetch_tokens).sum()), 0
    for p in waiting:
        held += needed_by(p, table, fetch_tokens)
        if held > budget and (count or table.num_busy):
            break
        count += 1
    return count


def rows_to_preempt(table: SlotTable, fetch_tokens: int, budget: int) -> list[int]:
    """Return the newest rows, without which the others fit; the oldest row always stays."""
    needed = needed_B(table, fetch_tokens)
    excess, rows = int(needed.sum()) - budget, []
    busy = np.nonzero(table.busy_B)[0]
    newest_first = busy[np.argsort(-table.entered_B[busy], kind="stable")]
    for row in newest_first[:-1].tolist():
        if excess <= 0:
            break
        rows.append(row)
        excess -= int(needed[row])
    return rows
