"""Schedulers of one rollout, by name.

group_fifo      whole groups bound to a worker, which admits and preempts: synchronous trainers
divided_fifo    chunks, first come, first served
seer            chunks, probes first, then the longest by the estimate of their group
oracle          chunks, the longest first, by their true lengths
"""

from __future__ import annotations

from collections.abc import Callable

from sched.policies.divided import Divided, PreferPool
from sched.policies.group_fifo import GroupFifo
from sched.policies.orders import ContextAware, Fifo, LongestKnown, Order
from sched.protocol import Scheduler

ORDERS: dict[str, Callable[[int], Order]] = {  # of a seed
    "divided_fifo": lambda seed: Fifo(),
    "seer": lambda seed: ContextAware(seed=seed),
    "oracle": lambda seed: LongestKnown(),
}
POLICIES = ("group_fifo", *ORDERS)


def make_scheduler(
    name: str,
    *,
    seed: int,
    chunk_tokens: int,
    prefer_pool: PreferPool = lambda tokens: True,
    ranks_per_instance: int = 1,
) -> Scheduler:
    """Return a new scheduler by its name, for one rollout.

    Raises ValueError for an unknown name.
    """
    if name == "group_fifo":
        return GroupFifo(seed=seed, ranks_per_instance=ranks_per_instance)
    if name in ORDERS:
        return Divided(ORDERS[name](seed), chunk_tokens=chunk_tokens, prefer_pool=prefer_pool)
    raise ValueError(f"expected a policy of {', '.join(POLICIES)}, got {name!r}")
