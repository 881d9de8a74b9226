"""Messages of a run of a worker's engine: what it is given, and what happens there.

run's program → worker    Give, Poll, Abort
worker → run's program    Report, with the events since the last one

A request's number comes back once a drop of it is confirmed (`Dropped`): what is said of it before
that is of the request that was dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rl.remote.drafter_messages import Caught, Tuner
from rl.remote.records import Stats, expect
from rl.trajectory import HostKv, PartialRequest, Prefix, Trajectory
from sched.request import copy_of


@dataclasses.dataclass(frozen=True, eq=False)
class Give:
    """Requests to start; tokens that others may go on for here (0: they leave); `closed`: no more
    requests will come; `lets_go`: all that runs leaves at once.

    Those in `drops` end without an answer, before the others start. `copies` has requests that
    another worker is to have a copy of, and the copies' numbers.
    """

    run: int
    starts: tuple[PartialRequest, ...]
    grants: Mapping[int, int]
    closed: bool
    lets_go: bool = False
    drops: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Poll:
    """Asks for what has happened; answered when something has, or after `wait_s`."""

    run: int
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Abort:
    """End a run without its results."""

    run: int


@dataclasses.dataclass(frozen=True)
class ChunkEnded:
    """A request has used up its tokens here: may it have more?"""

    request_id: int
    response_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Parked:
    """A request leaves, with what it has."""

    request_id: int
    prefix: Prefix | None
    kv: HostKv | None


@dataclasses.dataclass(frozen=True, eq=False)
class Copied:
    """A copy of a request that goes on here, by the number that the copy was asked for with.

    Without keys and values the request is not here, or lacks some of its own.
    """

    number: int
    prefix: Prefix | None
    kv: HostKv | None


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A request that was to be dropped has ended, if it was there."""

    request_id: int


@dataclasses.dataclass(frozen=True, eq=False)
class Answered:
    """A response has ended."""

    trajectory: Trajectory


Event = ChunkEnded | Parked | Copied | Dropped | Answered | Caught


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """All that has happened in a run since the last report, in order; with `stats` it has ended.

    With them comes the state of the worker's bandit, where one decides.
    """

    run: int
    events: tuple[Event, ...]
    rounds: int
    tokens: int
    stats: Stats | None
    tuner: Tuner | None = None


def _check_give(record: Give) -> None:
    expect(all(tokens >= 0 for tokens in record.grants.values()), "tokens of 0 or more")
    originals = [(copy_of(number)[0], copy_of(number)[1] > 0) for _, number in record.copies]
    expect(originals == [(r, True) for r, _ in record.copies], "numbers of copies of requests")


def _check_copied(record: Copied) -> None:
    expect(copy_of(record.number)[1] > 0, "the number of a copy")
    expect(record.prefix is None or record.kv is not None, "keys and values of a response's tokens")


CHECKS: dict[type, Callable[[Any], None]] = {Give: _check_give, Copied: _check_copied}
