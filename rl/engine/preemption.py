"""Which rows a worker may hold where its keys and values have a budget: admit, and pre-empt.

A row needs what it holds and what the next fetch can add, at most what its request may come to:

    needed = min(tokens + most a fetch adds, tokens it may have)

Schedulers that reserve whole chunks never let the sum exceed the budget. Where none reserves,
requests wait until they fit, and the newest rows are given up when the others have grown.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rl.engine.phase import Phase
from rl.engine.slot_cache import SlotCache
from rl.engine.slot_table import SlotTable
from rl.engine.waiting_queue import WaitingQueue
from rl.trajectory import PartialRequest, RequestChunk


def needed_B(table: SlotTable, fetch_tokens: int) -> np.ndarray:
    """Positions that each row needs until the fetch to come; 0 for free ones."""
    final_B = table.prompt_tokens_B + table.limit_B
    return np.where(table.busy_B, np.minimum(table.total_tokens_B + fetch_tokens, final_B), 0)


def num_fitting(
    chunks: Iterable[RequestChunk],
    table: SlotTable,
    fetch_tokens: int,
    budget: int,
    default_limit: int,
) -> int:
    """How many of the chunks, in order, can enter beside what runs; one, where nothing runs."""
    held, count = int(needed_B(table, fetch_tokens).sum()), 0
    for chunk in chunks:
        begun = chunk.begun
        tokens = len(begun.request.prompt_ids) + begun.num_tokens
        left = (begun.request.max_new_tokens or default_limit) - begun.num_tokens
        if chunk.max_tokens is not None:
            left = min(left, chunk.max_tokens)
        held += tokens + min(fetch_tokens, left)
        if held > budget and (count or table.num_busy):
            break
        count += 1
    return count


def make_room(rows: SlotCache, waiting: WaitingQueue, phase: Phase, fetch_tokens: int) -> int:
    """Pre-empt what does not fit any more: it waits again, its entries are gone; how many."""
    if phase.kv_tokens is None:
        return 0
    table = rows.table
    given_up = rows_to_give_up(table, fetch_tokens, phase.kv_tokens)
    if given_up:
        phase.speculator.finished(table.view(np.array(given_up)))
        for row in given_up:
            left = int(table.limit_B[row] - table.emitted_B[row])
            begun = PartialRequest(*table.leave(row, phase.policy_version))
            waiting.fed.appendleft(RequestChunk(begun, left))
        rows.changed()
    return len(given_up)


def rows_to_give_up(table: SlotTable, fetch_tokens: int, budget: int) -> list[int]:
    """The newest rows, without which the others fit; the oldest stays in any case."""
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
