"""The record of the workers of a run by step: their places, weight versions and losses.

Times are on the clock of this program. Rounds of other programs have other clocks, and are moved
into the call that they were part of. Rounds of other processes are moved so that steps start
together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reprise.models.folder import held
from reprise.rl.runtime.run_files import WORKERS_FILE

Kind = Literal["joined", "killed", "hung", "raised"]
Span = tuple[float, float]
MAX_SPANS = 1024  # of a step, over all workers; each worker has at least one
MAX_SPANS_EACH = 32
MAX_TEXT = 120  # characters of a name, a place or a reason
MAX_BYTES = 2**24  # of the file; the oldest steps are removed first
MAX_WORKERS = 2**16


@dataclasses.dataclass(frozen=True)
class WorkerPart:
    """The part of a worker in a step: its place, the step of its weights, its busy spans."""

    name: str
    place: str
    version: int
    busy_s: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class WorkerEvent:
    """A worker that joined or was lost; `requests` of a lost worker move to other workers."""

    name: str
    place: str
    kind: Kind
    at_s: float
    why: str = ""
    requests: int = 0


@dataclasses.dataclass(frozen=True)
class WorkerStep:
    """The workers of one step, in seconds since the start of the leg after step `leg`."""

    step: int
    leg: int
    ended_s: float
    parts: tuple[WorkerPart, ...]
    events: tuple[WorkerEvent, ...]


def fitted(spans: Sequence[Span], began_s: float, ended_s: float) -> list[Span]:
    """Return spans, moved together as little as possible to fit into `began_s … ended_s`."""
    if not spans:
        return []
    first = min(s for s, _ in spans)
    last = max(e for _, e in spans)
    move_s = min(0.0, ended_s - last)
    move_s = max(move_s, began_s - first)
    return [(s + move_s, e + move_s) for s, e in spans]


def merged(spans: Iterable[Span], most: int) -> tuple[Span, ...]:
    """Return at most `most` spans that cover `spans`, merged over the shortest pauses."""
    result: list[list[float]] = []
    for start_s, ended_s in sorted(spans):
        if result and start_s <= result[-1][1]:
            result[-1][1] = max(result[-1][1], ended_s)
        else:
            result.append([start_s, ended_s])
    pauses = [(b[0] - a[1], i) for i, (a, b) in enumerate(itertools.pairwise(result))]
    separate = {i for _, i in sorted(pauses, reverse=True)[: most - 1]}
    whole: list[list[float]] = []
    for i, span in enumerate(result):
        if i and i - 1 not in separate:
            whole[-1][1] = span[1]
        else:
            whole.append(span)
    return tuple((start_s, ended_s) for start_s, ended_s in whole)


class WorkerLog:
    """A builder of the rows of one leg of a run, and of the metrics of its workers.

    A worker that reappears in the same place has not joined; it was between two rollouts.
    """

    def __init__(self, after_step: int) -> None:
        self._after_step = after_step
        self._zero_s: float | None = None
        self._places: dict[str, str] = {}  # of workers that are present
        self._known: set[str] = set()
        self._since_s: dict[int, float] = {}  # when weights became available, by step

    def step(
        self,
        step: int,
        parts: Sequence[WorkerPart],
        events: Sequence[WorkerEvent],
        updated_s: float,
    ) -> tuple[WorkerStep | None, dict[str, float]]:
        """Return the row of a step and its metrics; (None, {}) for a run without workers.

        The update of the step was done at `updated_s`.
        """
        if not parts:
            return None, {}
        happened = self._happened(parts, events)
        if self._zero_s is None:
            starts = (s for p in parts for s, _ in p.busy_s)
            self._zero_s = min(updated_s, *starts, *(e.at_s for e in happened))
        age_versions, age_s = self._age(parts)
        self._since_s[step] = updated_s
        self._since_s = dict(list(self._since_s.items())[-64:])
        lost = sum(e.kind != "joined" for e in happened)
        metrics = {
            "workers/joined": float(len(happened) - lost),
            "workers/lost": float(lost),
            "weights/age_versions": float(age_versions),
            "weights/age_s": age_s,
        }
        return self._row(step, self._zero_s, parts, happened, updated_s), metrics

    def _happened(
        self, parts: Sequence[WorkerPart], events: Sequence[WorkerEvent]
    ) -> list[WorkerEvent]:
        result = []
        # engines without a scheduler report no joins
        seen = [
            WorkerEvent(p.name, p.place, "joined", p.busy_s[0][0])
            for p in parts
            if p.busy_s and p.name not in self._known
        ]
        for event in sorted([*events, *seen], key=lambda e: e.at_s):
            before = self._places.get(event.name)
            self._known.add(event.name)
            if event.kind == "joined":
                if before == event.place:
                    continue
                if before is not None:
                    lost = dataclasses.replace(event, place=before, kind="killed")
                    result.append(dataclasses.replace(lost, why="between two rollouts"))
                self._places[event.name] = event.place
            else:
                self._places.pop(event.name, None)
            result.append(event)
        return result

    def _age(self, parts: Sequence[WorkerPart]) -> tuple[int, float]:
        """Return the maximum age of weights in use, in versions and in seconds."""
        versions = 0
        seconds = 0.0
        for part in parts:
            ended_s = part.busy_s[-1][1] if part.busy_s else -math.inf
            newer = [t for v, t in self._since_s.items() if v > part.version and t < ended_s]
            versions = max(versions, len(newer))
            seconds = max([seconds, *(ended_s - t for t in newer)])
        return versions, seconds

    def _row(
        self,
        step: int,
        zero_s: float,
        parts: Sequence[WorkerPart],
        events: Sequence[WorkerEvent],
        updated_s: float,
    ) -> WorkerStep:
        max_spans = max(1, min(MAX_SPANS_EACH, MAX_SPANS // len(parts)))

        def since(seconds: float) -> float:
            return round(max(seconds - zero_s, 0.0), 4)

        def short(record: Any, **changes: Any) -> Any:
            texts = {k: v[:MAX_TEXT] for k, v in vars(record).items() if isinstance(v, str)}
            return dataclasses.replace(record, **texts, **changes)

        def spans(part: WorkerPart) -> tuple[Span, ...]:
            return tuple((since(s), since(e)) for s, e in merged(part.busy_s, max_spans))

        return WorkerStep(
            step,
            self._after_step,
            since(updated_s),
            tuple(short(p, busy_s=spans(p)) for p in parts),
            tuple(short(e, at_s=since(e.at_s)) for e in events[:MAX_SPANS]),
        )


def moved(part: WorkerPart, by_s: float) -> WorkerPart:
    """Return a part with its times moved `by_s` seconds later."""
    spans = tuple((s + by_s, e + by_s) for s, e in part.busy_s)
    return dataclasses.replace(part, busy_s=spans)


def read_workers(folder: Path) -> list[WorkerStep]:
    """Return the steps in the file of a run folder, by leg and step; [] without a file.

    A torn last line is left out. Raises ValueError for a file that no run wrote.
    """
    with held(folder) as run:
        if not run.exists(WORKERS_FILE):
            return []
        path = run.path / WORKERS_FILE
        content = run.read(WORKERS_FILE, 2 * MAX_BYTES)
    result = list[WorkerStep]()
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            step: WorkerStep = of_json(json.loads(line), WorkerStep)
            if max(len(step.parts), len(step.events)) > MAX_WORKERS:
                raise ValueError(f"more than {MAX_WORKERS:,} workers")
            spans = (span for p in step.parts for span in p.busy_s)
            if step.ended_s < 0 or any(not 0 <= start_s <= end_s for start_s, end_s in spans):
                raise ValueError("a negative time, or a span that ends before it starts")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number} is not a step's workers that a run wrote ({error}): delete it"
            ) from error
        result.append(step)
    return result


def of_json(value: Any, kind: Any) -> Any:
    """Return a JSON value as a dataclass, tuple, array, number or short text, by `kind`.

    Raises ValueError for a value of another kind.
    """
    args = typing.get_args(kind)
    make = kind
    if dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = _hints(kind)
        if type(value) is dict and value.keys() == hints.keys():
            return make(**{name: of_json(value[name], hint) for name, hint in hints.items()})
    elif typing.get_origin(kind) is tuple and type(value) is list:
        kinds = args[:1] * len(value) if args[1:] == (...,) else args
        if len(kinds) == len(value):
            return tuple(of_json(x, hint) for x, hint in zip(value, kinds, strict=True))
    elif kind is np.ndarray:
        return np.array(of_json(value, tuple[int, ...]), np.int64)
    elif kind is int and type(value) is int and 0 <= value < 2**53:
        return value
    elif kind is float and type(value) in (int, float) and abs(value) < 2**53:  # not nan
        return float(value)
    elif (kind is str and type(value) is str and len(value) <= MAX_TEXT) or value in args:
        return value
    raise ValueError(f"expected {kind}, got {str(value)[:40]!r}")


_hints: Any = functools.cache(typing.get_type_hints)
