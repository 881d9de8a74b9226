"""Schedulers of one rollout, by name.

group_fifo      whole groups bound to a worker, which admits and pre-empts: synchronous trainers
divided_fifo    chunks, as they come to wait
seer            chunks, probes first, then the longest by what their group has shown
oracle          chunks, the longest first, true lengths known
"""

from __future__ import annotations

from sched.divided import Divided, PreferPool
from sched.group_fifo import GroupFifo
from sched.orders import make_order
from sched.protocol import Scheduler

ORDERS = {"divided_fifo": "fifo", "seer": "context_aware", "oracle": "longest_known"}
POLICIES = ("group_fifo", *ORDERS)


def make_scheduler(
    name: str,
    *,
    seed: int,
    chunk_tokens: int,
    prefer_pool: PreferPool = lambda tokens: True,
) -> Scheduler:
    """The scheduler of that name, for one rollout.

    Raises ValueError for a name that there is not.
    """
    if name == "group_fifo":
        return GroupFifo(seed=seed)
    if name in ORDERS:
        order = make_order(ORDERS[name], seed)
        return Divided(order, chunk_tokens=chunk_tokens, prefer_pool=prefer_pool)
    raise ValueError(f"expected a policy of {', '.join(POLICIES)}, got {name!r}")
