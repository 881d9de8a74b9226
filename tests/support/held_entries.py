"""How much an object of the schedulers or of the workers' rooms holds, in entries of containers."""

import collections
import queue

ROOMS = ("sched.", "rl.workers.")
CONTAINERS = (list, tuple, set, frozenset, collections.deque)


def held_entries(value, seen=None):
    """The entries of all its containers, however deep; things of other rooms count as one."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | int | float | type(None)):
        return 0
    seen.add(id(value))
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if isinstance(value, dict):
        return len(value) + sum(held_entries(x, seen) for x in value.values())
    if isinstance(value, CONTAINERS):
        return len(value) + sum(held_entries(x, seen) for x in value)
    if type(value).__module__.startswith(ROOMS) and hasattr(value, "__dict__"):
        return sum(held_entries(x, seen) for x in vars(value).values())
    return 0
