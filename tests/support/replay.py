"""The decisions of a scheduler; a real rollout, replayed with its measured durations.

A scheduler's decisions are a function of its events and their times, so a simulation with each
start's seconds on a real worker decides the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.sched.protocol import Action, ChunkDone, Event, Finished, Scheduler, Start


class SchedulerDecision(NamedTuple):
    now_s: float
    event: Event
    actions: tuple[Action, ...]


class Recorded:
    """A scheduler that keeps its decisions."""

    def __init__(self, scheduler):
        self._scheduler, self.decisions = scheduler, []

    def handle(self, event, now_s):
        actions = tuple(self._scheduler.handle(event, now_s))
        self.decisions.append(SchedulerDecision(now_s, event, actions))
        return actions


class RecordedTeam(MultiEngine):
    """A team that keeps the decisions of its last session's scheduler."""

    def session(self, scheduler, *given, **options):
        self.decisions = (recorded := Recorded(scheduler)).decisions
        return super().session(recorded, *given, **options)


class RecordedAhead(RecordedTeam, AheadEngine):
    pass


def replay(scheduler: Scheduler, decisions: Sequence[SchedulerDecision]) -> list[SchedulerDecision]:
    """Return the decisions of `scheduler` if every start takes its measured time and ends alike.

    Requests and workers arrive at their real times. Raises KeyError for a start that the real
    rollout did not make.
    """
    started_s: dict[tuple[int, int, int], float] = {}
    ends: dict[tuple[int, int, int], tuple[float, Event]] = {}  # of starts: seconds, and the event
    heap: list[tuple[float, int, Event]] = []
    for number, d in enumerate(decisions):
        if isinstance(d.event, Finished | ChunkDone):
            ends[_key(d.event)] = (d.now_s - started_s[_key(d.event)], d.event)
        else:
            heapq.heappush(heap, (d.now_s, number, d.event))
        started_s.update({_key(a): d.now_s for a in d.actions if isinstance(a, Start)})
    replayed: list[SchedulerDecision] = []
    number = len(decisions)
    while heap:
        now_s, _, event = heapq.heappop(heap)
        actions = tuple(scheduler.handle(event, now_s))
        replayed.append(SchedulerDecision(now_s, event, actions))
        for action in actions:
            if isinstance(action, Start):
                seconds, end = ends[_key(action)]
                number += 1
                heapq.heappush(heap, (now_s + seconds, number, end))
    return replayed


def _key(x: Start | Finished | ChunkDone) -> tuple[int, int, int]:
    return x.request_id, x.chunk, x.worker_id
