"""A real rollout, replayed on a virtual clock with its measured durations.

A scheduler's decisions are a function of its events and their times. The seconds that each start
took on a real worker are therefore all that a simulation needs in order to decide the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from sched.protocol import ChunkDone, Event, Finished, Scheduler, SchedulerDecision, Start


def replay(scheduler: Scheduler, decisions: Sequence[SchedulerDecision]) -> list[SchedulerDecision]:
    """Return what `scheduler` decides if every start takes as long, and ends, as it really did.

    Requests and workers arrive when they really did. Raises KeyError for a start that the real
    rollout did not make.
    """
    ends = _measured(decisions)
    heap: list[tuple[float, int, Event]] = []
    for number, d in enumerate(decisions):
        if not isinstance(d.event, Finished | ChunkDone):
            heapq.heappush(heap, (d.now_s, number, d.event))
    found: list[SchedulerDecision] = []
    number = len(decisions)
    while heap:
        now_s, _, event = heapq.heappop(heap)
        actions = tuple(scheduler.handle(event, now_s))
        found.append(SchedulerDecision(now_s, event, actions))
        for action in actions:
            if isinstance(action, Start):
                seconds, end = ends[_name(action)]
                number += 1
                heapq.heappush(heap, (now_s + seconds, number, end))
    return found


def _measured(
    decisions: Iterable[SchedulerDecision],
) -> dict[tuple[int, int, int], tuple[float, Event]]:
    """Return (request, chunk, worker) → the seconds of the start, and the event of its end."""
    began: dict[tuple[int, int, int], float] = {}
    ends: dict[tuple[int, int, int], tuple[float, Event]] = {}
    for d in decisions:
        if isinstance(d.event, Finished | ChunkDone):
            name = _name(d.event)
            ends[name] = (d.now_s - began[name], d.event)
        began.update({_name(a): d.now_s for a in d.actions if isinstance(a, Start)})
    return ends


def _name(x: Start | Finished | ChunkDone) -> tuple[int, int, int]:
    return x.request_id, x.chunk, x.worker_id
